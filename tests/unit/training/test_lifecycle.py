"""A run from its directory to its record: what ranks other than 0 are told."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest

from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.errors import SetupError
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


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (lifecycle.RunOpening, "find"),
        (lifecycle.RunOpening, "open"),
        (lifecycle, "watch"),
        (lifecycle, "CallProfile"),
        (lifecycle.Run, "result_directory"),
    ],
)
def test_a_run_that_fails_while_it_opens_leaves_nothing_behind(tmp_path, monkeypatch, place, name):
    """Another one in the same process then takes its directory."""

    def fail(*arguments):
        if name == "find":
            find(*arguments)  # has the lock by then
        os.environ["HOROVOD_TIMELINE"] = "left"
        raise SetupError("planted").on_all_ranks()

    def left():
        gc.collect()  # the memory in which steps are counted
        return threading.enumerate(), dict(os.environ), sorted(Path("/proc/self/fd").iterdir())

    monkeypatch.setenv("CANDLE_P1_WATCHDOG", "off")
    find = lifecycle.RunOpening.find
    params = parameters(tmp_path, "--run_id", "one", "--logfile", str(tmp_path / "log"))
    with lifecycle.recorded_run("nt3", parameters(tmp_path), SerialCommunicator()):
        pass  # what is opened once per process
    before = left()

    def run():
        with lifecycle.recorded_run("nt3", params, SerialCommunicator()) as opened:
            opened.result_directory(None)

    with monkeypatch.context() as planted:
        planted.setattr(place, name, fail)
        with pytest.raises(SetupError, match="planted"):
            run()
    assert left() == before
    (tmp_path / "EXP000/one/run.json").unlink(missing_ok=True)  # there may be a record of it
    run()
