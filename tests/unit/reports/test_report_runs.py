"""Records as a report reads them, and their order: experiments, series and points."""

from __future__ import annotations

import itertools

import pytest

from candle_p1.errors import RecordError
from candle_p1.records.parts import KeptWork, earlier_parts, next_part
from candle_p1.records.record import extend_record, make_record, read_record, write_record
from candle_p1.records.spread import Seconds
from candle_p1.records.summary import details
from candle_p1.records.tables import as_cells
from candle_p1.records.types import Failure, PhaseTimes, PositionFacts
from candle_p1.reports.columns import LOAD, OTHER, PARTS, TRAIN, UNDIVIDED, parts_s
from candle_p1.reports.experiments import BATCH, STRONG, WEAK, group
from candle_p1.reports.frame import Run, read_runs
from candle_p1.reports.notes import notes_on, notes_on_all
from tests.planted_records import REMOVED, changed, plant, planted_record

OTHER_MACHINE = {"cpu": "POWER9"}


def run_of(*args, **kwargs):
    return Run(None, planted_record(*args, **kwargs))


def runs_in(directory):
    return read_runs([directory]).runs


def outline(experiment):
    """Returns {series: {ranks: (timed, disturbed, unfinished)}}."""

    def nums(point):
        timed, unfinished = len(point.runs), len(point.unfinished)
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
    assert [run.num_ranks for run in runs.runs] == [2, 1]
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
    record = planted_record(num_ranks=2, load_s=3.0, epoch_s=1.5, first_step_s=9.0, epochs=8)
    run = Run(None, changed(record, {"phases.load.max_s": 4.0}))
    assert LOAD.of(run) == 4.0
    assert run.epoch_s == pytest.approx(1.5)
    assert run.first_step_s == 9.0
    assert run.epochs_per_rank == 4
    assert TRAIN.of(run) == 4 * 1.5 + 9.0


def test_a_single_step_gives_no_time_per_epoch():
    record = changed(planted_record(epochs=1), {"training.epochs.0.steps.num": 1})
    assert Run(None, record).epoch_s is None


def test_the_parts_of_a_run_add_up_to_its_total():
    run = run_of(num_ranks=2, wait_s=1.0, communication_s=2.0)
    parts = parts_s(run)
    assert tuple(parts) == tuple(part for part in PARTS if part != UNDIVIDED)
    assert sum(parts.values()) == pytest.approx(run.total_s)
    assert parts["communication"] == pytest.approx(2)
    assert run_of(num_ranks=1).communication_share == 0
    assert parts[OTHER] == pytest.approx(0)


def test_unmeasured_communication_is_one_part_with_training():
    record = planted_record(num_ranks=2, epochs=8)
    run = Run(None, changed(record, {"phases.train.communication": REMOVED}))
    parts = parts_s(run)
    assert run.communication_share is None
    assert {"training", "communication"}.isdisjoint(parts)
    assert parts[UNDIVIDED] == TRAIN.of(run)
    assert sum(parts.values()) == pytest.approx(run.total_s)


def test_epochs_are_counted_as_trained():
    record = planted_record(epochs=8, epochs_per_rank=3, training={"stopped": "early_stop"})
    stopped = Run(None, changed(record, {"plan.epochs_per_rank": 8}))
    assert stopped.epochs_per_rank == 3
    (experiment,) = group([stopped])
    assert any("1 run (early_stop)" in note for note in notes_on(experiment))


def test_a_machine_has_the_cores_of_a_node_however_ranks_are_bound():
    bound = {"num_cores": 1, "node_cores": 16}
    assert run_of(environment=bound).machine == run_of(environment={"num_cores": 16}).machine


def test_ranks_per_node_make_series_where_they_differ_at_the_same_scale():
    records = [planted_record(num_ranks=4) for _ in range(3)]
    records[0] = changed(records[0], {"num_nodes": 2})
    (experiment,) = group([Run(i, record) for i, record in enumerate(records)])
    assert [series.name for series in experiment.series] == ["ranks_per_node 2", "ranks_per_node 4"]


def test_written_and_staged_caches_make_series():
    records = [planted_record(loader="cached", stage_dir=None) for _ in range(3)]
    write = records[0].phases["load"].model_dump(exclude_unset=True)
    records[0] = changed(records[0], {"phases.load.parts": {"write": write}})
    records[2] = changed(records[2], {"parameters.stage_dir.value": "/ssd"})
    (experiment,) = group([Run(i, record) for i, record in enumerate(records)])
    assert [series.name for series in experiment.series] == [
        "loader cached, staged False",
        "loader cached, staged True",
        "loader cached (first time), staged False",
    ]


def test_places_logging_and_seeds_do_not_define_a_point():
    one = run_of(rng_seed=1, output_dir="a", timeline="t", power="none", epochs_scaling=None)
    other = run_of(rng_seed=2, output_dir="b", epochs_scaling="strong")
    assert one.settings == other.settings
    assert "loader" in one.settings
    assert one.settings["epochs_scaling"] == "strong"


def test_files_are_distinguished_by_their_values():
    records = [
        changed(
            planted_record(),
            {"data.synthetic": False, "data.files.train.values_sha256": digest},
        )
        for digest in ("a" * 64, "a" * 64, "b" * 64)
    ]
    first, same, other = (Run(None, record) for record in records)
    assert first.settings == same.settings != other.settings
    assert "size" not in first.settings


def test_the_mode_of_scaling_comes_from_the_plan():
    for mode, parameters in (
        (STRONG, {"epochs_scaling": None, "epochs": 4}),
        (WEAK, {"epochs_scaling": None, "epochs": 1}),
        (WEAK, {"epochs_scaling": "weak"}),
        (STRONG, {"epochs_scaling": "none", "data_parallel": "batch_step"}),
        (BATCH, {"epochs_scaling": "weak", "batch_scaling": "cbrt"}),
    ):
        (experiment,) = group([run_of(**parameters)])
        assert experiment.mode == mode


def test_a_constant_batch_size_is_compared_with_those_that_grow(tmp_path):
    for num_ranks, batch_scaling in itertools.product((1, 2), ("none", "cbrt")):
        plant(tmp_path, "p1b3", num_ranks, epochs_scaling="none", batch_scaling=batch_scaling)
    plant(tmp_path, "p1b3", 2, epochs_scaling="weak")
    weak, batch = group(runs_in(tmp_path))
    assert (weak.mode, len(weak.runs), batch.mode) == (WEAK, 1, BATCH)
    points = {1: (1, 0, 0), 2: (1, 0, 0)}
    assert outline(batch) == {"batch_scaling none": points, "batch_scaling cbrt": points}


def test_series_are_named_by_the_settings_that_differ(tmp_path):
    grid = list(itertools.product(("original", "parallel"), (20, 40), (1, 2), (0, 1)))
    for loader, batch_size, num_ranks, seed in grid:
        plant(tmp_path, "nt3", num_ranks, loader=loader, batch_size=batch_size, rng_seed=seed)
    (experiment,) = group(runs_in(tmp_path))
    points = {1: (2, 0, 0), 2: (2, 0, 0)}
    assert outline(experiment) == {
        f"loader {loader}, batch_size {batch_size}": points for loader, batch_size, *_ in grid
    }
    assert "epochs" in experiment.common
    assert len(experiment.runs) == len(grid)


def test_runs_with_limited_steps_are_apart(tmp_path):
    for num_ranks in (1, 2):
        plant(tmp_path, "nt3", num_ranks, size="full", epochs=48)
    plant(tmp_path, "nt3", 2, size="full", epochs=2, train_steps=2, val_steps=1, test_steps=0)
    plant(tmp_path, "nt3", 2, status="failed", train_steps=2, val_steps=1, test_steps=0)
    whole, limited = group(runs_in(tmp_path))
    assert outline(whole) == {"all runs": {1: (1, 0, 0), 2: (1, 0, 0)}}
    assert limited.limits == (("train_steps", 2), ("val_steps", 1))
    assert len(limited.all_runs) == 2
    assert not any("limited" in note for note in notes_on(whole))
    assert any("train_steps 2, val_steps 1" in note for note in notes_on(limited))


def test_the_size_of_synthetic_data_is_named_once():
    records = [planted_record(size=size) for size in ("small", "full")]
    (experiment,) = group(Run(i, record) for i, record in enumerate(records))
    names = {series.name for series in experiment.series}
    assert names == {"data synthetic, small", "data synthetic, full"}


def test_unfinished_and_traced_runs_are_counted_but_not_timed(tmp_path):
    for loader in ("original", "parallel"):
        plant(tmp_path, "nt3", 2, loader=loader)
    plant(tmp_path, "nt3", 2, loader="original", status="failed")
    plant(tmp_path, "nt3", 4, loader="original", status="interrupted")
    plant(tmp_path, "nt3", 2, loader="parallel", status="running")
    plant(tmp_path, "nt3", 2, loader="parallel", training={"traced": True})
    plant(tmp_path, "nt3", 2, loader="parallel", training={"profiled": True})
    runs = read_runs([tmp_path])
    (experiment,) = group(runs.runs)
    assert outline(experiment) == {
        "loader original": {2: (1, 0, 1), 4: (0, 0, 1)},
        "loader parallel": {2: (1, 2, 1)},
    }
    notes = " ".join(notes_on(experiment))
    assert "1 failed, 1 interrupted and 1 running" in notes
    assert "1 run was traced" in notes
    assert "1 run was profiled" in notes
    assert notes_on_all(runs)[0] == "7 runs: 1 failed, 1 interrupted, 4 ok and 1 running."


def test_runs_of_different_machines_never_share_a_point(tmp_path):
    for environment in ({}, OTHER_MACHINE, {"num_cores": 4}):
        plant(tmp_path, "nt3", 2, environment=environment)
    plant(tmp_path, "nt3", 2, device="Tesla V100")
    plant(tmp_path, "nt3", 2, status="failed")
    runs = read_runs([tmp_path])
    experiments = group(runs.runs)
    assert len(experiments) == 5
    assert sorted(len(each.runs) for each in experiments) == [0, 1, 1, 1, 1]
    (unknown,) = (each for each in experiments if each.machine is None)
    assert outline(unknown) == {"all runs": {2: (0, 0, 1)}}
    assert "4 machines" in " ".join(notes_on_all(runs))


def test_threads_make_series_only_where_one_number_of_ranks_has_several(tmp_path):
    plant(tmp_path, "nt3", 1, threads=2)
    plant(tmp_path, "nt3", 2, threads=1)
    (experiment,) = group(runs_in(tmp_path))
    assert outline(experiment) == {"all runs": {1: (1, 0, 0), 2: (1, 0, 0)}}
    assert any("2 on 1 rank, 1 on 2 ranks" in note for note in notes_on(experiment))
    plant(tmp_path, "nt3", 1, threads=1)
    (experiment,) = group(runs_in(tmp_path))
    assert set(outline(experiment)) == {"threads 1", "threads 2"}


def test_runs_that_xla_compiled_are_a_series_of_their_own(tmp_path):
    for num_ranks, compiled in ((1, True), (2, False), (2, True)):
        plant(tmp_path, "nt3", num_ranks, jit_compile=compiled)
    (experiment,) = group(runs_in(tmp_path))
    assert outline(experiment) == {
        "jit_compile False": {2: (1, 0, 0)},
        "jit_compile True": {1: (1, 0, 0), 2: (1, 0, 0)},
    }
    assert any("(jit_compile) of 2 runs, and not of 1 other" in n for n in notes_on(experiment))


def test_runs_with_different_engines_are_never_pooled(tmp_path):
    """A single rank belongs to the engine whose backend it has; without one, to both."""
    for engine in ("horovod", "jax"):
        plant(tmp_path, "nt3", 2, engine=engine)
    with_jax = {"settings": {"KERAS_BACKEND": "jax"}}
    plant(tmp_path, "nt3", 1, environment=with_jax)
    (experiment,) = group(runs_in(tmp_path))
    assert outline(experiment) == {
        "engine horovod": {2: (1, 0, 0)},
        "engine jax": {1: (1, 0, 0), 2: (1, 0, 0)},
    }
    assert any("different engines (horovod and jax)" in note for note in notes_on(experiment))
    plant(tmp_path, "nt3", 1)
    (experiment,) = group(runs_in(tmp_path))
    assert outline(experiment) == {
        "engine horovod": {1: (1, 0, 0), 2: (1, 0, 0)},
        "engine jax": {1: (2, 0, 0), 2: (1, 0, 0)},
    }


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
    run = Run(None, changed(planted_record(**kwargs), changes))
    assert run.engine == engine
    assert run.settings.get("engine") == engine


def test_a_run_on_one_rank_is_the_base_of_all_communication_settings(tmp_path):
    plant(tmp_path, "nt3", 1)
    for size in ("0", "134217728"):
        settings = {"HOROVOD_FUSION_THRESHOLD": size, "HOROVOD_STALL_CHECK_TIME_SECONDS": size}
        plant(tmp_path, "nt3", 2, exchange=settings)
    (experiment,) = group(runs_in(tmp_path))
    assert outline(experiment) == {
        "HOROVOD_FUSION_THRESHOLD 0": {1: (1, 0, 0), 2: (1, 0, 0)},
        "HOROVOD_FUSION_THRESHOLD 134217728": {1: (1, 0, 0), 2: (1, 0, 0)},
    }
    assert len(experiment.runs) == 3
    plant(tmp_path, "nt3", 2, status="failed")
    (experiment,) = group(runs_in(tmp_path))
    assert outline(experiment)["HOROVOD_FUSION_THRESHOLD unknown"] == {2: (0, 0, 1)}


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({}, "Energy was not measured."),
        ({}, "The data are synthetic"),
        ({}, "single run: 1 of 1"),
        ({"environment": {"packages": {"keras": "3.8.0"}}}, "keras: 3.15.1 and 3.8.0"),
        ({"energy_j": 100.0}, "Energy was not measured in 1 of 2 runs"),
    ],
)
def test_missing_or_mixed_data_are_noted(tmp_path, change, note):
    plant(tmp_path, "nt3", 2)
    if change:
        plant(tmp_path, "nt3", 2, **change)
    (experiment,) = group(runs_in(tmp_path))
    assert note in " ".join(notes_on(experiment))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([(True, "0")], ["repeat bit for bit (deterministic True)", "fusion: none"]),
        (
            [(False, "67108864")],
            ["settings of a cluster (deterministic False)", "up to 67108864 bytes"],
        ),
        (
            [(True, "0"), (False, "67108864")],
            ["deterministic True", "deterministic False", "none and up to 67108864 bytes"],
        ),
    ],
)
def test_the_settings_of_kernels_and_communication_are_named(tmp_path, values, words):
    for deterministic, threshold in values:
        exchange = {"HOROVOD_FUSION_THRESHOLD": threshold}
        plant(tmp_path, "nt3", 2, deterministic=deterministic, exchange=exchange)
    (experiment,) = group(runs_in(tmp_path))
    (note,) = [note for note in notes_on(experiment) if "deterministic" in note]
    assert all(word in note for word in words), note


def test_simulated_energy_is_labelled():
    record = changed(planted_record(energy_j=100.0), {"energy.kind": "simulated"})
    (experiment,) = group([Run(None, record)])
    assert any("energy of 1 run is simulated" in note for note in notes_on(experiment))


def test_clocks_that_wait_for_an_element_are_noted():
    record = planted_record(num_ranks=2)
    for waits_for, noted in ((None, False), ("tensor", False), ("element", True)):
        facts = {"communication": {"logged": True, "clock_waits_for": waits_for}}
        (experiment,) = group([Run(None, changed(record, facts))])
        assert any("one element of each" in note for note in notes_on(experiment)) == noted


@pytest.mark.parametrize("is_logged", [True, False])
def test_the_broadcast_overhead_is_the_papers_with_waiting_and_transfer_beside_it(is_logged):
    """It does not include the framework's preparation, here 0.7 s, where collectives are logged."""

    def communicated(*seconds):
        return {"communication": Seconds.over(seconds)} if is_logged else {}

    transfer = PhaseTimes.over([0.9, 0.9], **communicated(0.2, 0.2))
    parts = {"wait": PhaseTimes.over([3.1, 0.0]), "transfer": transfer}
    broadcast = PhaseTimes.over([4.0, 0.9], parts=parts, **communicated(3.3, 0.2))
    place = {"phases.broadcast": broadcast.model_dump(exclude_unset=True)}
    run = Run(None, changed(planted_record(num_ranks=2), place))
    found = run.broadcast_overhead_s, run.broadcast_wait_s, run.broadcast_transfer_s
    assert found == ((3.3, 3.1, 0.2) if is_logged else (4.0, 3.1, 0.9))
    assert run_of(num_ranks=1).broadcast_overhead_s is None


def continued(record):
    """Returns a record as that of a run whose first part was killed."""
    kept = KeptWork(part=1, steps=20, position=PositionFacts(epoch=2, step=0), checkpoint="c")
    old = {name: getattr(record, name) for name in ("schema_version", "benchmark", "num_ranks")}
    failure = Failure(reason="rank 0 died", rank=0, steps=25)
    first = make_record(old | {
        "status": "failed", "started": "2025-12-31T23:00:00+00:00", "parameters": {},
        "ended": "2025-12-31T23:01:40+00:00", "failure": failure,
    })  # fmt: skip
    parts = [*earlier_parts(first, kept, ""), next_part(record, kept)]
    return extend_record(record, parts=parts)


def test_a_continued_run_is_counted_but_its_times_are_not_compared(tmp_path):
    plant(tmp_path, "nt3", 2)
    path = plant(tmp_path, "nt3", 2)
    again = continued(read_record(path))
    write_record(path, again)
    runs = read_runs([tmp_path])
    (experiment,) = group(runs.runs)
    assert list(outline(experiment).values()) == [{2: (1, 1, 0)}]
    assert "1 run was continued from a checkpoint" in " ".join(notes_on(experiment))
    (run,) = [each for each in runs.runs if each.num_parts == 2]
    assert run.remark == "continued, 2 parts"
    assert run.total_s == 100 + again.total_s
    assert run.energy_kind == "absent"
    (table,) = [
        part for part in details(again) if "parts of the run" in str(getattr(part, "title", ""))
    ]
    headings, rows = as_cells(table)
    shown = [dict(zip(headings, row, strict=True)) for row in rows]
    assert [row["lost"] for row in shown] == ["5", ""]
    assert [row["from epoch/step"] for row in shown] == ["0/0", "2/0"]
    assert any("continued, 2 parts" in part for part in details(again) if isinstance(part, str))
