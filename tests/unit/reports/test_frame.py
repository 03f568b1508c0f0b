"""Records as a table of runs, and its groups: experiments, series and points."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from candle_p1.errors import RecordError
from candle_p1.records.parts import KeptWork, earlier_parts, next_part
from candle_p1.records.record import extend_record, make_record, read_record, write_record
from candle_p1.records.types import Failure, PositionFacts
from candle_p1.reports.columns import time_parts
from candle_p1.reports.experiments import group
from candle_p1.reports.frame import (
    BATCH,
    OTHER,
    PARTS,
    STRONG,
    UNDIVIDED,
    WEAK,
    Run,
    load_frame,
    read_runs,
)
from candle_p1.reports.notes import notes_on, notes_on_all
from tests.planted_records import REMOVED, changed, plant, planted_record

ONE = {1: (1, 0, 0), 2: (1, 0, 0)}
"""The points of a series of one timed run on 1 and on 2 ranks."""


def run_of(*args, changes=None, **kwargs):
    return Run(Path("run.json"), changed(planted_record(*args, **kwargs), changes or {}))


def only(*planted):
    """Returns the experiment of records with these settings."""
    (experiment,) = group(run_of(**{"num_ranks": 2} | kwargs) for kwargs in planted)
    return experiment


def outline(experiment):
    """Returns {series: {ranks: (timed, perturbed, unfinished)}}."""

    def nums(point):
        timed, unfinished = len(point.runs), point.num_unfinished
        return timed, len(point.all_runs) - timed - unfinished, unfinished

    return {
        series.name: {point.num_ranks: nums(point) for point in series.points}
        for series in experiment.series
    }


def test_every_record_is_found_once_and_invalid_ones_are_reported(tmp_path):
    plant(tmp_path, num_ranks=2)
    plant(tmp_path, num_ranks=1)
    bad = tmp_path / "bad/deeper"
    bad.mkdir(parents=True)
    (bad / "run.json").write_text('{"schema_version": 2}')
    runs = read_runs([tmp_path, tmp_path / "run000"])
    assert [run["num_ranks"] for run in runs.runs] == [2, 1]
    ((path, reason),) = runs.problems.items()
    assert path == bad / "run.json"
    assert "status" in reason
    assert str(bad) not in reason


def test_directories_without_records_are_refused(tmp_path):
    with pytest.raises(RecordError, match=r"run\.json"):
        read_runs([tmp_path])
    with pytest.raises(RecordError, match="nowhere"):
        read_runs([tmp_path / "nowhere"])


def test_times_are_those_of_the_slowest_rank_and_epochs_exclude_the_first_step():
    facts = {"num_ranks": 2, "load_s": 3.0, "epoch_s": 1.5, "first_step_s": 9.0, "epochs": 8}
    run = run_of(**facts, changes={"phases.load.max_s": 4.0})
    assert run["phase_load_s"] == 4.0
    assert run["epoch_s"] == pytest.approx(1.5)
    assert run["first_step_s"] == 9.0
    assert run["epochs_per_rank"] == 4
    assert run["phase_train_s"] == 4 * 1.5 + 9.0
    assert run_of(epochs=1, changes={"training.epochs.0.steps.num": 1})["epoch_s"] is None


@pytest.mark.parametrize("is_logged", [True, False])
def test_the_parts_of_a_run_add_up_to_its_total(is_logged):
    """Unmeasured communication is one part with training."""
    changes = {} if is_logged else {"phases.train.communication": REMOVED}
    run = run_of(num_ranks=2, wait_s=1.0, communication_s=2.0, changes=changes)
    parts = time_parts(load_frame([run])).iloc[0]
    assert sum(parts.dropna()) == pytest.approx(run["total_s"])
    assert parts[OTHER] == pytest.approx(0)
    without = {UNDIVIDED} if is_logged else {"training", "communication"}
    assert set(parts.dropna().index) == set(PARTS) - without
    if is_logged:
        assert parts["communication"] == pytest.approx(2)
        assert run_of(num_ranks=1)["communication_share"] == 0
    else:
        assert run["communication_share"] is None
        assert parts[UNDIVIDED] == run["phase_train_s"]


def test_epochs_are_counted_as_trained():
    stopped = run_of(
        epochs=8,
        epochs_per_rank=3,
        training={"stopped": "early_stop"},
        changes={"plan.epochs_per_rank": 8},
    )
    assert stopped["epochs_per_rank"] == 3
    assert any("1 run (early_stop)" in note for note in notes_on(group([stopped])[0]))


def test_a_machine_has_the_cores_of_a_node_however_ranks_are_bound():
    bound = run_of(environment={"num_cores": 1, "node_cores": 16})
    assert bound["machine"] == run_of(environment={"num_cores": 16})["machine"]


def test_places_logging_and_seeds_do_not_define_a_point():
    one = run_of(rng_seed=1, output_dir="a", timeline="t", power="none", epochs_scaling=None)
    other = run_of(rng_seed=2, output_dir="b", epochs_scaling="strong")
    assert one["settings"] == other["settings"]
    assert one["settings"].items() >= {"loader": "parallel", "epochs_scaling": "strong"}.items()


def test_files_are_distinguished_by_their_values():
    first, same, other = (
        run_of(changes={"data.synthetic": False, "data.files.train.values_sha256": digest})
        for digest in ("a" * 64, "a" * 64, "b" * 64)
    )
    assert first["settings"] == same["settings"] != other["settings"]
    assert "size" not in first["settings"]


@pytest.mark.parametrize(
    ("mode", "parameters"),
    [
        (STRONG, {"epochs_scaling": None, "epochs": 4}),
        (WEAK, {"epochs_scaling": None, "epochs": 1}),
        (WEAK, {"epochs_scaling": "weak"}),
        (STRONG, {"epochs_scaling": "none", "data_parallel": "batch_step"}),
        (BATCH, {"epochs_scaling": "weak", "batch_scaling": "cbrt"}),
    ],
)
def test_the_mode_of_scaling_comes_from_the_plan(mode, parameters):
    assert only(parameters).mode == mode


def test_a_constant_batch_size_is_compared_with_those_that_grow():
    runs = [
        run_of("p1b3", num, epochs_scaling="none", batch_scaling=scaling)
        for num, scaling in itertools.product((1, 2), ("none", "cbrt"))
    ]
    weak, batch = group([*runs, run_of("p1b3", 2, epochs_scaling="weak")])
    assert (weak.mode, len(weak.runs), batch.mode) == (WEAK, 1, BATCH)
    assert outline(batch) == {"batch_scaling none": ONE, "batch_scaling cbrt": ONE}


def test_runs_with_limited_steps_are_apart():
    limited = {"train_steps": 2, "val_steps": 1, "test_steps": 0}
    runs = [run_of(num_ranks=num, size="full") for num in (1, 2)]
    runs += [run_of(num_ranks=2, size="full", **limited)]
    runs += [run_of(num_ranks=2, status="failed", **limited)]
    whole, apart = group(runs)
    assert outline(whole) == {"all runs": ONE}
    assert apart.limits == (("train_steps", 2), ("val_steps", 1))
    assert len(apart.all_runs) == 2
    assert not any("limited" in note for note in notes_on(whole))
    assert any("train_steps 2, val_steps 1" in note for note in notes_on(apart))


@pytest.mark.parametrize(
    ("planted", "expected"),
    [
        (  # the settings that differ name series, the others are common; seeds are repeats
            [
                {"loader": loader, "batch_size": size, "num_ranks": num}
                for loader in ("original", "parallel")
                for size in (20, 40)
                for num in (1, 2)
            ],
            {
                f"loader {loader}, batch_size {size}": ONE
                for loader in ("original", "parallel")
                for size in (20, 40)
            },
        ),
        (  # the size of synthetic data is named once
            [{"size": "small"}, {"size": "full"}],
            {f"data synthetic, {size}": {2: (1, 0, 0)} for size in ("small", "full")},
        ),
        (  # ranks per node, where they differ at the same scale
            [{"num_ranks": 4}, {"num_ranks": 4, "changes": {"num_nodes": 2}}],
            {f"ranks_per_node {num}": {4: (1, 0, 0)} for num in (2, 4)},
        ),
        (  # threads follow from the number of ranks
            [{"num_ranks": 1, "threads": 2}, {"threads": 1}],
            {"all runs": ONE},
        ),
        (  # but not where one number of ranks has several
            [{"num_ranks": 1, "threads": 2}, {"threads": 1}, {"num_ranks": 1, "threads": 1}],
            {"threads 1": ONE, "threads 2": {1: (1, 0, 0)}},
        ),
        (  # whether XLA compiled
            [{"num_ranks": 1, "jit_compile": True}, {"jit_compile": False}, {"jit_compile": True}],
            {"jit_compile False": {2: (1, 0, 0)}, "jit_compile True": ONE},
        ),
        (  # a single rank belongs to the engine whose backend it has
            [
                {"engine": "horovod"},
                {"engine": "jax"},
                {"num_ranks": 1, "environment": {"settings": {"KERAS_BACKEND": "jax"}}},
            ],
            {"engine horovod": {2: (1, 0, 0)}, "engine jax": ONE},
        ),
        (  # or, without one, to both
            [{"engine": "horovod"}, {"engine": "jax"}, {"num_ranks": 1}],
            {"engine horovod": ONE, "engine jax": ONE},
        ),
        (  # a run on one rank is the base of all settings of communication
            [
                {"num_ranks": 1},
                *(
                    {"exchange": {"HOROVOD_FUSION_THRESHOLD": size, "HOROVOD_STALL_X": size}}
                    for size in ("0", "134217728")
                ),
                {"status": "failed"},
            ],
            {
                "HOROVOD_FUSION_THRESHOLD 0": ONE,
                "HOROVOD_FUSION_THRESHOLD 134217728": ONE,
                "HOROVOD_FUSION_THRESHOLD unknown": {2: (0, 0, 1)},
            },
        ),
        (  # unfinished and perturbed runs are counted, but not timed
            [
                *({"loader": loader} for loader in ("original", "parallel")),
                {"loader": "original", "status": "failed"},
                {"loader": "original", "status": "interrupted", "num_ranks": 4},
                {"loader": "parallel", "status": "running"},
                {"loader": "parallel", "training": {"traced": True}},
                {"loader": "parallel", "training": {"profiled": True}},
            ],
            {
                "loader original": {2: (1, 0, 1), 4: (0, 0, 1)},
                "loader parallel": {2: (1, 2, 1)},
            },
        ),
    ],
)
def test_runs_make_series_of_points(planted, expected):
    experiment = only(*planted)
    assert outline(experiment) == expected
    assert len(experiment.all_runs) == len(planted)


def test_written_and_staged_caches_make_series():
    write = {"write": planted_record().phases["load"].model_dump(exclude_unset=True)}
    cached = {"loader": "cached", "stage_dir": None}
    experiment = only(
        cached | {"changes": {"phases.load.parts": write}}, cached, cached | {"stage_dir": "/ssd"}
    )
    assert list(outline(experiment)) == [
        "loader cached, staged False",
        "loader cached, staged True",
        "loader cached (first time), staged False",
    ]


def test_runs_of_different_machines_never_share_a_point():
    facts = [{"environment": each} for each in ({}, {"cpu": "POWER9"}, {"num_cores": 4})]
    facts += [{"device": "Tesla V100"}, {"status": "failed"}]
    experiments = group([run_of(num_ranks=2, **each) for each in facts])
    assert sorted(len(each.runs) for each in experiments) == [0, 1, 1, 1, 1]
    (unknown,) = (each for each in experiments if each.machine is None)
    assert outline(unknown) == {"all runs": {2: (0, 0, 1)}}


@pytest.mark.parametrize(
    ("kwargs", "asked", "engine"),
    [
        ({"num_ranks": 2, "engine": "jax"}, "auto", "jax"),
        ({"num_ranks": 2, "status": "failed"}, "jax", "jax"),
        ({"num_ranks": 2, "status": "failed"}, "auto", None),
        ({"environment": {"settings": {"KERAS_BACKEND": "tensorflow"}}}, "auto", "horovod"),
        ({}, "jax", None),
    ],
)
def test_the_engine_is_the_one_that_a_run_used(kwargs, asked, engine):
    """Or, if it ended before it recorded that, the one that it asked for."""
    changes = {"parameters.engine": {"value": asked, "origin": "flag"}}
    run = run_of(**kwargs, changes=changes)
    assert run["engine"] == run["settings"].get("engine") == engine


EXCHANGE = ({"HOROVOD_FUSION_THRESHOLD": size} for size in ("0", "67108864"))
LAPTOP, CLUSTER = (
    {"deterministic": deterministic, "exchange": exchange}
    for deterministic, exchange in zip((True, False), EXCHANGE, strict=True)
)


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        ([{}], ["Energy was not measured.", "The data are synthetic", "single run: 1 of 1"]),
        (
            [{}, {"environment": {"packages": {"keras": "3.8.0"}}}],
            ["keras: 3.15.1 and 3.8.0"],
        ),
        ([{}, {"energy_j": 100.0}], ["Energy was not measured in 1 of 2 runs"]),
        (
            [{"energy_j": 100.0, "changes": {"energy.kind": "simulated"}}],
            ["energy of 1 run is simulated"],
        ),
        (
            [{}, {"status": "failed"}, {"status": "running"}, {"training": {"traced": True}}],
            ["1 failed and 1 running", "1 run was traced"],
        ),
        ([{"num_ranks": 1, "threads": 2}, {"threads": 1}], ["2 on 1 rank, 1 on 2 ranks"]),
        ([{"engine": "horovod"}, {"engine": "jax"}], ["engines (horovod and jax)"]),
        (
            [{"num_ranks": 1, "jit_compile": True}, {"jit_compile": False}, {"jit_compile": True}],
            ["(jit_compile) of 2 runs, and not of 1 other"],
        ),
        ([LAPTOP], ["repeat bit for bit (deterministic True)", "fusion: none"]),
        ([CLUSTER], ["a cluster (deterministic False)", "up to 67108864 bytes"]),
        ([LAPTOP, CLUSTER], ["deterministic True", "deterministic False", "none and up to"]),
        (
            [{"changes": {"communication": {"logged": True, "clock_waits_for": "element"}}}],
            ["one element of each"],
        ),
        ([{"changes": {"warnings": ["no NUMA"]}}] * 2, ["Warning in 2 runs: no NUMA."]),
    ],
)
def test_what_is_missing_or_mixed_is_noted(planted, words):
    notes = " ".join(notes_on(only(*planted)))
    assert all(each in notes for each in words), notes


def test_clocks_that_wait_for_tensors_need_no_note():
    facts = {"communication": {"logged": True, "clock_waits_for": "tensor"}}
    assert not any("one element" in note for note in notes_on(only({"changes": facts})))


def continued(record):
    """Returns a record whose run was killed after 100 s and continued."""
    kept = KeptWork(part=1, steps=20, position=PositionFacts(epoch=2, step=0), checkpoint="c")
    old = {name: getattr(record, name) for name in ("schema_version", "benchmark", "num_ranks")}
    failure = Failure(reason="rank 0 died", rank=0, steps=25)
    first = make_record(old | {
        "status": "failed", "started": "2025-12-31T23:00:00+00:00", "parameters": {},
        "ended": "2025-12-31T23:01:40+00:00", "failure": failure,
    })  # fmt: skip
    return extend_record(record, parts=[*earlier_parts(first, kept, ""), next_part(record, kept)])


def test_a_continued_run_is_counted_but_its_times_are_not_compared(tmp_path):
    plant(tmp_path, "nt3", 2)
    path = plant(tmp_path, "nt3", 2)
    again = continued(read_record(path))
    write_record(path, again)
    runs = read_runs([tmp_path])
    (experiment,) = group(runs.runs)
    assert list(outline(experiment).values()) == [{2: (1, 1, 0)}]
    assert "1 run was continued from a checkpoint" in " ".join(notes_on(experiment))
    (run,) = [each for each in runs.runs if each["num_parts"] == 2]
    assert run["total_s"] == 100 + again.total_s
    assert run["energy_kind"] == "absent"
    assert next(notes_on_all(runs)) == "2 runs: 2 ok."
