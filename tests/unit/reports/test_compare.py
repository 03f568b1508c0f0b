"""Two runs, or two sets, beside each other: planted ratios, differences and warnings."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from candle_p1 import cli
from candle_p1.errors import ParameterError, RecordError
from candle_p1.reports.compare import HIGHER, LOWER, SINGLE, Side, compare
from candle_p1.reports.frame import read_runs
from candle_p1.reports.statistics import NOT_SIGNIFICANT, TOO_FEW
from tests.planted_records import changed, plant


@pytest.fixture
def sides(tmp_path):
    """Returns a function that plants two sets and returns them."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()

    def sides(planted_a, planted_b):
        for name, planted in (("a", planted_a), ("b", planted_b)):
            for kwargs in planted:
                plant(tmp_path / name, **kwargs)
        return [Side(n, read_runs([tmp_path / n]).runs) for n in ("a", "b")]

    return sides


def rows_of(comparison, index=0):
    return {row.quantity.name: row for row in comparison.pairings[index].rows}


def test_a_planted_ratio_is_found_with_its_interval(sides):
    loads = [8.0, 9.0, 10.0, 11.0]
    a, b = sides(
        [{"load_s": s, "energy_j": 100 * s, "rng_seed": i} for i, s in enumerate(loads)],
        [{"load_s": s / 4, "energy_j": 50 * s, "rng_seed": i} for i, s in enumerate(loads)],
    )
    comparison = compare(a, b)
    load = rows_of(comparison)["phase_load_s"]
    assert load.change.value == pytest.approx(1 / 4)
    # 4 against 4: the smallest and the largest ratio of all pairs, at 97 %
    assert (load.change.low, load.change.high) == pytest.approx((2 / 11, 2.75 / 8))
    assert load.verdict == LOWER
    energy = rows_of(comparison)["energy_j"]
    assert energy.change.value == pytest.approx(1 / 2)
    assert energy.verdict == LOWER
    assert compare(b, a).pairings[0].rows[0].verdict == HIGHER
    assert comparison.differences == ()
    assert comparison.warnings == ()


def test_no_change_is_not_significant(sides):
    planted = [{"epoch_s": 1.0 + 0.1 * i, "load_s": 2.0 + 0.1 * i} for i in range(5)]
    row = rows_of(compare(*sides(planted, planted)))["phase_load_s"]
    assert row.change.value == pytest.approx(1)
    assert row.verdict == NOT_SIGNIFICANT


def test_few_and_single_runs_claim_nothing(sides):
    few = [{"load_s": s} for s in (8.0, 9.0, 10.0)]
    a, b = sides(few, [{"load_s": s / 100} for s in (8.0, 9.0, 10.0)])
    assert rows_of(compare(a, b))["phase_load_s"].verdict == TOO_FEW
    single = [Side(side.name, side.runs[:1]) for side in (a, b)]
    row = rows_of(compare(*single))["phase_load_s"]
    assert row.verdict == SINGLE
    assert row.change.value == pytest.approx(1 / 100)
    assert row.change.confidence == 0


def test_quality_is_compared_by_difference(sides):
    accuracies = [0.80, 0.81, 0.82, 0.83]
    a, b = sides(
        [{"quality": {"accuracy": value}} for value in accuracies],
        [{"quality": {"accuracy": value + 0.1}} for value in accuracies],
    )
    row = rows_of(compare(a, b))["test_accuracy"]
    assert row.change.value == pytest.approx(0.1)
    assert row.verdict == HIGHER


def test_energy_is_compared_by_phase(sides):
    a, b = sides([{"energy_j": 50.0}], [{"energy_j": 90.0}])
    row = rows_of(compare(with_train_energy(a, 10.0), with_train_energy(b, 20.0)))["energy_train_j"]
    assert (row.a, row.b, row.change.value) == ((10.0,), (20.0,), 2.0)


def with_train_energy(side, energy_j):
    phases = {"train": {"kind": "measured", "energy_j": energy_j, "mean_w": 1.0}}
    return with_change(side, {"energy.phases": phases})


def with_change(side, change):
    runs = [replace(run, record=changed(run.record, change)) for run in side.runs]
    return Side(side.name, tuple(runs))


def test_zeros_and_values_of_one_side_have_no_ratio(sides):
    rows = rows_of(compare(*sides([{"energy_j": 5.0}], [{"wait_s": 1.0}])))
    assert rows["broadcast_wait_s"].change is None
    assert rows["broadcast_wait_s"].verdict != rows["energy_j"].verdict
    assert rows["energy_j"].change is None


def test_runs_are_compared_with_those_of_the_same_settings(sides):
    grid = [
        {"num_ranks": ranks, "loader": loader}
        for ranks in (1, 2)
        for loader in ("original", "parallel")
    ]
    a, b = sides(
        [{**each, "load_s": 10.0 * each["num_ranks"]} for each in [*grid, grid[0]]],
        [{**each, "load_s": 5.0 * each["num_ranks"]} for each in grid[1:]],
    )
    comparison = compare(a, b)
    found = {p.settings: {r.quantity.name: r for r in p.rows} for p in comparison.pairings}
    assert list(found) == [
        "loader original, ranks 2", "loader parallel, ranks 1", "loader parallel, ranks 2",
    ]  # fmt: skip
    for settings, ranks in zip(found, (2, 1, 2), strict=True):
        load = found[settings]["phase_load_s"]
        assert load.a == (10.0 * ranks,)
        assert load.change.value == pytest.approx(0.5)
    assert "only a has runs with loader original, ranks 1" in comparison.warnings


def test_every_difference_is_listed(sides):
    a, b = sides(
        [{"loader": "original", "rng_seed": 1, "output_dir": "x"}],
        [
            {
                "num_ranks": 2,
                "batch_size": 40,
                "rng_seed": 2,
                "output_dir": "y",
                "environment": {"packages": {"candle-p1": "0.1.0", "keras": "3.16.0"}, "cpu": "Z"},
                "exchange": {"HOROVOD_CYCLE_TIME": "5"},
            }
        ],
    )
    comparison = compare(a, b)
    found = {(each.kind, each.name): (each.a, each.b) for each in comparison.differences}
    assert found["parameter", "loader"] == ("original", "parallel")
    assert found["parameter", "batch_size"] == ("20", "40")
    assert found["repeat", "rng_seed"] == ("1", "2")
    assert found["place or logging", "output_dir"] == ("x", "y")
    assert found["plan", "epochs_per_rank"] == ("48", "24")
    assert found["plan", "global_batch_size"] == ("20", "80")
    assert found["version", "keras"] == ("3.15.1", "3.16.0")
    assert found["machine", "cpu"] == ("AMD EPYC", "Z")
    assert found["machine", "ranks"] == ("1", "2")
    assert found["machine", "HOROVOD_CYCLE_TIME"] == ("absent", "5")
    warnings = "\n".join(comparison.warnings)
    assert "A AMD EPYC, 2 cores, 24 GiB; B Z, 2 cores" in warnings
    assert "ranks differ: A 1, B 2" in warnings


def test_caveats_are_stated(sides, tmp_path):
    a, b = sides(
        [{"training": {"traced": True}}, {"status": "failed"}],
        [{"size": "full"}, {"size": "full", "training": {"profiled": True}}],
    )
    warnings = "\n".join(compare(a, b).warnings)
    for text in (
        "A synthetic, small; B synthetic, full",
        "A was traced",
        "A: 1 run left out, failed",
        "B: 1 run left out, traced, profiled or continued",
    ):
        assert text in warnings, text
    assert any(
        "1 run in A and also in B" in w
        for w in compare(b, Side("b", tuple(b.timed["run"]))).warnings
    )


def test_settings_of_a_laptop_and_of_a_cluster_are_distinguished(sides):
    def planted(deterministic, threshold):
        exchange = {"HOROVOD_FUSION_THRESHOLD": threshold}
        return [{"num_ranks": 2, "deterministic": deterministic, "exchange": exchange}]

    a, b = sides(planted(True, "0"), planted(False, "67108864"))
    warnings = "\n".join(compare(a, b).warnings)
    assert "times: A True; B False" in warnings
    assert "times: A none; B up to 67108864 bytes" in warnings


def test_sides_and_runs_that_xla_compiled_are_distinguished(sides):
    a, b = sides(
        [{"num_ranks": 1, "jit_compile": True}],
        [{"num_ranks": 1, "jit_compile": False}, {"num_ranks": 2, "jit_compile": False}],
    )
    comparison = compare(a, Side("b", b.runs[:1]))
    warnings = "\n".join(comparison.warnings)
    assert "jit_compile (whether XLA compiled the training step) differs" in warnings
    assert "times: A True; B False" in warnings
    found = {each.name: (each.a, each.b) for each in comparison.differences}
    assert found["jit_compile"] == ("True", "False")
    mixed = Side("mixed", (*a.runs, *b.runs))
    settings = [pairing.settings for pairing in compare(mixed, mixed).pairings]
    assert settings == [
        "jit_compile False, ranks 1",
        "jit_compile False, ranks 2",
        "jit_compile True, ranks 1",
    ]


def test_engines_are_distinguished_whatever_the_parameter_says(sides):
    a, b = sides(
        [{"num_ranks": 2, "engine": "horovod"}],
        [{"num_ranks": 2, "engine": "jax"}, {"num_ranks": 2, "engine": "jax"}],
    )
    comparison = compare(a, b)
    (warning,) = comparison.warnings
    assert warning.startswith("engine (what averaged the gradients) differs, which affects times")
    assert warning.endswith("A horovod; B jax")
    (difference,) = (each for each in comparison.differences if each.name == "engine")
    assert (difference.kind, difference.a, difference.b) == ("parameter", "horovod", "jax")
    mixed = Side("mixed", (*a.runs, *b.runs))
    pairings = compare(mixed, mixed).pairings
    assert [pairing.settings for pairing in pairings] == ["engine horovod", "engine jax"]


def test_real_and_synthetic_data_are_distinguished(sides):
    a, b = sides([{}], [{}])
    (warning,) = compare(a, with_change(b, {"data.synthetic": False})).warnings
    assert "A synthetic, small; B files: " in warning


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        ([{"benchmark": "p1b2"}], "nt3, b of p1b2"),
        ([{"status": "failed"}], "b: "),
        ([{"epochs": 24}, {"epochs": 12}], "only b has runs with epochs 12"),
    ],
)
def test_incomparable_runs_are_refused(sides, planted, message):
    with pytest.raises(ParameterError, match=message):
        compare(*sides([{}], planted))


def test_the_command_prints_and_writes_json(sides, tmp_path):
    a, _ = sides([{"load_s": 3.0}], [{"load_s": 6.0, "loader": "original"}])
    path = tmp_path / "out.json"
    words = ["compare", a.runs[0].path, tmp_path / "b", "--json", path]
    result = CliRunner().invoke(cli.cli, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    for text in ("phase load (s)", "3.00", "6.00", "2.00", "single run", "loader", "original"):
        assert text in result.output
    written = json.loads(path.read_text())
    (rows,) = [each["quantities"] for each in written["comparisons"]]
    load = next(row for row in rows if row["name"] == "phase_load_s")
    assert load["ratio"]["value"] == 2
    assert load["a"] == {"median": 3.0, "values": [3.0]}
    assert written["a"]["num_runs"] == 1
    assert {"kind": "parameter", "name": "loader", "a": "parallel", "b": "original"} in written[
        "differences"
    ]


def test_files_that_cannot_be_read_or_written_are_named(sides, tmp_path):
    sides([{}], [{}])
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    for words, name in (([a, b, "--json", f"{a}/no/out.json"], "no/out.json"), ([a, "no"], "no")):
        result = CliRunner().invoke(cli.cli, ["compare", *words])
        assert isinstance(result.exception, (ParameterError, RecordError))
        assert name in str(result.exception)


def test_threads_and_machines_are_not_averaged_over(sides):
    planted = [
        {"load_s": load_s, "threads": threads, "rng_seed": seed}
        for threads, load_s in ((1, 8.0), (2, 4.0))
        for seed in range(3)
    ]
    comparison = compare(*sides(planted, planted))
    assert [pairing.settings for pairing in comparison.pairings] == ["threads 1", "threads 2"]
    assert rows_of(comparison)["phase_load_s"].a == (8.0, 8.0, 8.0)
    assert rows_of(comparison, 1)["phase_load_s"].a == (4.0, 4.0, 4.0)


def test_energies_of_different_parts_are_not_compared(sides):
    a, b = sides([{"energy_j": 10.0}] * 4, [{"energy_j": 20.0}] * 4)
    comparison = compare(a, with_change(b, {"energy.covers": ["cpu", "gpu"]}))
    assert "energy_j" not in rows_of(comparison)
    (warning,) = comparison.warnings
    assert "A gpu; B cpu and gpu" in warning
