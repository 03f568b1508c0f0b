"""A run from its directory to its record: what ranks other than 0 are told."""

from __future__ import annotations

from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.training import lifecycle
from tests.unit.training.test_place import parameters


class OpeningElsewhere(lifecycle.RunOpening):
    """As on a rank other than 0: it does not open the directory, which is not the expected one."""

    def open(self, record, watchdog):
        return self.find().parent / "another", 1


def test_each_rank_learns_where_the_record_is(tmp_path, monkeypatch):
    """An unwatched rank that fails would mark the record of the job that was faster as failed."""
    told = []

    def watch(*arguments):
        watchdog = unwatched(*arguments)
        monkeypatch.setattr(watchdog, "report_record", told.append)
        return watchdog

    unwatched = lifecycle.watch
    monkeypatch.setenv("CANDLE_P1_WATCHDOG", "off")
    monkeypatch.setattr(lifecycle, "watch", watch)
    monkeypatch.setattr(lifecycle, "RunOpening", OpeningElsewhere)
    params = parameters(tmp_path)
    with lifecycle.recorded_run("nt3", params, SerialCommunicator()) as run:
        directory = run.directory
        assert told == [directory / "run.json"]
    assert directory.name == "another"
