"""Records as a table of runs, and its groups: experiments, series and points."""

from itertools import product
from pathlib import Path

import pytest

from candle_p1.records.record import extend_record, make_record, read_record, write_record
from candle_p1.records.segments import ResumePoint, earlier_segments, next_segment
from candle_p1.records.types import Failure, Position
from candle_p1.reports import frame
from candle_p1.reports.experiments import group, time_parts
from candle_p1.reports.frame import Run, load_frame, read_runs
from candle_p1.reports.gains import pairs
from candle_p1.reports.report import notes_on, notes_on_all
from tests.planted_records import REMOVED, changed, experiment_of, plant, planted_record


def run_of(*args, changes=None, **kwargs):
    return Run(Path("run.json"), changed(planted_record(*args, **kwargs), changes or {}))


@pytest.mark.parametrize("is_logged", [True, False])
def test_the_parts_of_a_run_add_up_to_its_total(is_logged):
    """Unmeasured communication is one part with training."""
    changes = {} if is_logged else {"phases.train.communication": REMOVED}
    facts = {"num_ranks": 2, "wait_s": 1.0, "communication_s": 2.0}
    transfer = run_of(**facts).record.phases["broadcast"].regions["wait"]  # of a second, too
    changes["phases.broadcast.regions.transfer"] = transfer.model_dump(exclude_unset=True)
    changes["total_s"] = 30.5 + 1
    run = run_of(changes=changes, **facts)
    parts = time_parts(load_frame([run])).iloc[0].dropna()
    assert sum(parts) == pytest.approx(run["total_s"])
    without = {frame.UNDIVIDED} if is_logged else {"training", "communication"}
    assert set(parts.index) == set(frame.PARTS) - without
    known = {"communication": 2 + 1} if is_logged else {frame.UNDIVIDED: run["phase_train_s"] + 1}
    assert parts[frame.OTHER] == pytest.approx(0)
    assert parts[list(known)].to_dict() == pytest.approx(known)
    assert (run["communication_share"] is None) != is_logged


def continued(record):
    """Returns a record whose run was killed after 100 s and continued."""
    kept = ResumePoint(segment=1, steps=20, position=Position(epoch=2, step=0), checkpoint="c")
    old = {name: getattr(record, name) for name in ("schema_version", "benchmark", "num_ranks")}
    old |= {"status": "failed", "failure": Failure(reason="rank 0 died", rank=0, steps=25)}
    old |= {"started": "2025-12-31T23:00:00+00:00", "ended": "2025-12-31T23:01:40+00:00"}
    first = make_record(old | {"parameters": {}})
    segments = [*earlier_segments(first, kept, ""), next_segment(record, kept)]
    return extend_record(record, segments=segments)


def test_a_continued_run_is_counted_but_its_times_are_not_compared(tmp_path):
    plant(tmp_path, "nt3", 2)
    path = plant(tmp_path, "nt3", 2)
    again = continued(read_record(path))
    write_record(path, again)
    runs = read_runs([tmp_path])
    (experiment,) = group(runs.runs)
    ((point,),) = (series.points for series in experiment.series)
    assert (len(point.runs), len(point.all_runs), point.num_unfinished) == (1, 2, 0)
    assert "1 run was continued from a checkpoint" in " ".join(notes_on(experiment))
    (run,) = [each for each in runs.runs if each["num_segments"] == 2]
    assert run["total_s"] == 100 + again.total_s
    assert run["energy_kind"] == "absent"
    assert next(notes_on_all(runs)) == "2 runs: 2 ok."


def test_only_settings_of_the_paper_are_bases_of_improvements():
    loaders = ("original", "chunked", "cached", "parallel")
    records = [
        planted_record("nt3", 1, epochs=8, loader=loader, kernels=kernels, batch_size=size)
        for loader, kernels, size in product(loaders, ("plain", "fast"), (20, 40))
    ]
    experiment = experiment_of(*records)
    found = pairs(experiment)
    for pair in found:
        before, after = pair.base.settings, pair.other.settings
        assert before["batch_size"] == after["batch_size"]
        assert before["loader"] in ("original", "chunked", after["loader"])
        assert after["loader"] != "original" or before["loader"] == "original"
        assert before["kernels"] in ("plain", after["kernels"])
    # 5 pairs of loaders for plain, fast, and plain against fast kernels, and 4 of kernels alone
    assert len(found) == len(set(found)) == 2 * (3 * 5 + 4)
    method = [pair for pair in found if pair.is_method]
    assert method == pairs(experiment, {True})
    loaders = {(pair.base.settings["loader"], pair.other.settings["loader"]) for pair in method}
    assert (loaders, len(method)) == ({("original", "chunked")}, 4)
    assert {*method, *pairs(experiment, {False})} == {*found}
