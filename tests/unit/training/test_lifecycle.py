"""A run from its directory to its record."""

import gc
import os
import threading
from pathlib import Path

import pytest

from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.errors import RecordError, SetupError
from candle_p1.records.record import end_record, read_record
from candle_p1.records.types import Failure
from candle_p1.training import lifecycle
from candle_p1.training.measured import describe_rank
from tests.planted_records import planted_record
from tests.unit.training.test_run_directory import parameters


@pytest.fixture(autouse=True)
def unwatched(monkeypatch):
    monkeypatch.setenv("CANDLE_P1_WATCHDOG", "off")


def recorded_run(params):
    return lifecycle.recorded_run("nt3", params, SerialCommunicator())


def test_each_rank_learns_where_the_record_is(tmp_path, monkeypatch):
    """Which may not be expected: rank 0 alone opens the directory, beside equal jobs."""
    told = []
    monkeypatch.setattr(lifecycle.RankAgent, "report_record", lambda _, path: told.append(path))
    monkeypatch.setattr(
        lifecycle.RunDirectory, "open", lambda run, *_: (run.find().parent / "x", 1)
    )
    with recorded_run(parameters(tmp_path)):
        assert told == [tmp_path / "EXP000/x/run.json"]


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (lifecycle.RunDirectory, "find"),
        (lifecycle.RunDirectory, "open"),
        (lifecycle, "watch"),
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

    def run():
        with recorded_run(params) as opened:
            opened.result_directory(None)

    find = lifecycle.RunDirectory.find
    params = parameters(tmp_path, "--run_id", "one", "--logfile", str(tmp_path / "log"))
    with recorded_run(parameters(tmp_path)):
        pass  # what is opened once per process
    before = left()
    with monkeypatch.context() as planted:
        planted.setattr(place, name, fail)
        with pytest.raises(SetupError, match="planted"):
            run()
    assert left() == before
    (tmp_path / "EXP000/one/run.json").unlink(missing_ok=True)  # there may be a record of it
    run()


def run_to_its_end(params, before_end):
    """Runs without training; `before_end` is called with the path of the record."""
    record = planted_record("nt3", 1)
    names = ("data", "plan", "model", "distributed", "training", "quality", "environment")
    with recorded_run(params) as run:
        with run.phases("train"):
            before_end(run.record_path)
        run.finish(
            describe_rank(run.comm, threads=1, device="cpu", num_cores=1),
            efficiency={"kind": "absent", "reason": "nothing was trained"},
            **{name: getattr(record, name) for name in names},
        )
        return run


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_text("{")])
def test_a_record_that_is_lost_is_written_all_the_same(tmp_path, harm):
    run = run_to_its_end(parameters(tmp_path), harm)
    written = read_record(run.record_path)
    assert written == run.record
    assert (written.status, written.benchmark, written.num_ranks) == ("ok", "nt3", 1)
    assert written.parameters["epochs"].value == 4


def test_a_record_that_says_otherwise_is_an_error(tmp_path):
    """As when the watchdog server has taken a rank for dead."""

    def fail(path):
        end_record(path, "failed", Failure(reason="rank 1 died", rank=1))

    path = tmp_path / "EXP000/RUN000/run.json"
    with pytest.raises(RecordError, match=r'"ok", but .*"failed"') as caught:
        run_to_its_end(parameters(tmp_path), fail)
    assert caught.value.agreed
    assert str(path) in str(caught.value)
    assert read_record(path).failure.reason == "rank 1 died"
