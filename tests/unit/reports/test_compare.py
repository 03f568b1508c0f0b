"""Two runs, or two sets, beside each other: planted ratios, differences and warnings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from candle_p1 import cli
from candle_p1.errors import ParameterError, RecordError
from candle_p1.reports.compare import HIGHER, LOWER, SINGLE, Side, compare
from candle_p1.reports.frame import Run
from candle_p1.reports.statistics import NOT_SIGNIFICANT, TOO_FEW
from tests.planted_records import changed, plant, planted_record


def sides(*planted):
    """Returns sides a and b, of runs with these settings and changes of the record."""
    return [
        Side(
            name,
            tuple(
                Run(Path(f"{name}{i}"), changed(planted_record(**kwargs), changes))
                for i, (kwargs, changes) in enumerate(map(split, of_side))
            ),
        )
        for name, of_side in zip("ab", planted, strict=True)
    ]


def split(kwargs):
    kwargs = dict(kwargs)
    return kwargs, kwargs.pop("changes", {})


def compared(*planted):
    return compare(*sides(*planted))


def rows_of(comparison, index=0):
    return {row.quantity.name: row for row in comparison.pairings[index].rows}


def test_a_planted_ratio_is_found_with_its_interval():
    loads = [8.0, 9.0, 10.0, 11.0]
    a, b = sides(
        [{"load_s": s, "energy_j": 100 * s, "rng_seed": i} for i, s in enumerate(loads)],
        [{"load_s": s / 4, "energy_j": 50 * s, "rng_seed": i} for i, s in enumerate(loads)],
    )
    comparison = compare(a, b)
    load = rows_of(comparison)["phase_load_s"]
    # 4 against 4: the smallest and the largest ratio of all pairs, at 97 %
    ends = (load.change.value, load.change.low, load.change.high)
    assert ends == pytest.approx((1 / 4, 2 / 11, 2.75 / 8))
    assert load.verdict == LOWER
    energy = rows_of(comparison)["energy_j"]
    assert energy.change.value == pytest.approx(1 / 2)
    assert energy.verdict == LOWER
    assert compare(b, a).pairings[0].rows[0].verdict == HIGHER
    assert comparison.differences == comparison.warnings == ()


@pytest.mark.parametrize(
    ("a", "factor", "verdict"),
    [
        ([2.0, 2.1, 2.2, 2.3, 2.4], 1, NOT_SIGNIFICANT),
        ([8.0, 9.0, 10.0], 1 / 100, TOO_FEW),
        ([8.0], 1 / 100, SINGLE),
    ],
)
def test_nothing_is_claimed_without_significance(a, factor, verdict):
    row = rows_of(compared([{"load_s": s} for s in a], [{"load_s": factor * s} for s in a]))
    assert row["phase_load_s"].verdict == verdict
    assert row["phase_load_s"].change.value == pytest.approx(factor)


def test_quality_is_compared_by_difference():
    a, b = (
        [{"quality": {"accuracy": v + more}} for v in (0.80, 0.81, 0.82, 0.83)] for more in (0, 0.1)
    )
    row = rows_of(compared(a, b))["test_accuracy"]
    assert row.change.value == pytest.approx(0.1)
    assert row.verdict == HIGHER


def test_energy_is_compared_by_phase():
    a, b = (
        [{"energy_j": 50.0, "changes": {"energy.phases": {"train": facts | {"energy_j": joules}}}}]
        for facts in [{"kind": "measured", "mean_w": 1.0}]
        for joules in (10.0, 20.0)
    )
    row = rows_of(compared(a, b))["energy_train_j"]
    assert (row.a, row.b, row.change.value) == ((10.0,), (20.0,), 2.0)


def test_zeros_and_values_of_one_side_have_no_ratio():
    rows = rows_of(compared([{"energy_j": 5.0}], [{"wait_s": 1.0}]))
    assert rows["broadcast_wait_s"].change is None
    assert rows["broadcast_wait_s"].verdict != rows["energy_j"].verdict
    assert rows["energy_j"].change is None


def test_runs_are_compared_with_those_of_the_same_settings():
    grid = [(ranks, loader) for ranks in (1, 2) for loader in ("original", "parallel")]

    def planted(load_s, keys):
        return [{"num_ranks": n, "loader": loader, "load_s": load_s * n} for n, loader in keys]

    comparison = compared(planted(10.0, [*grid, grid[0]]), planted(5.0, grid[1:]))
    found = {p.settings: {r.quantity.name: r for r in p.rows} for p in comparison.pairings}
    assert list(found) == [
        "loader original, ranks 2", "loader parallel, ranks 1", "loader parallel, ranks 2",
    ]  # fmt: skip
    for rows, ranks in zip(found.values(), (2, 1, 2), strict=True):
        assert rows["phase_load_s"].a == (10.0 * ranks,)
        assert rows["phase_load_s"].change.value == pytest.approx(0.5)
    assert "only a has runs with loader original, ranks 1" in comparison.warnings


def test_every_difference_is_listed():
    packages = {"packages": {"candle-p1": "0.1.0", "keras": "3.16.0"}, "cpu": "Z"}
    other = {"num_ranks": 2, "batch_size": 40, "rng_seed": 2, "output_dir": "y"}
    other |= {"environment": packages, "exchange": {"HOROVOD_CYCLE_TIME": "5"}}
    comparison = compared([{"loader": "original", "rng_seed": 1, "output_dir": "x"}], [other])
    found = {(each.kind, each.name): (each.a, each.b) for each in comparison.differences}
    assert (
        found.items()
        >= {
            ("parameter", "loader"): ("original", "parallel"),
            ("parameter", "batch_size"): ("20", "40"),
            ("repeat", "rng_seed"): ("1", "2"),
            ("place or logging", "output_dir"): ("x", "y"),
            ("plan", "epochs_per_rank"): ("48", "24"),
            ("plan", "global_batch_size"): ("20", "80"),
            ("version", "keras"): ("3.15.1", "3.16.0"),
            ("machine", "cpu"): ("AMD EPYC", "Z"),
            ("machine", "ranks"): ("1", "2"),
            ("machine", "HOROVOD_CYCLE_TIME"): ("absent", "5"),
        }.items()
    )


CLUSTER = {"deterministic": False, "exchange": {"HOROVOD_FUSION_THRESHOLD": "67108864"}}
LAPTOP = {"deterministic": True, "exchange": {"HOROVOD_FUSION_THRESHOLD": "0"}}


@pytest.mark.parametrize(
    ("a", "b", "warnings"),
    [
        ({}, {"environment": {"cpu": "Z"}}, ["machines differ: A AMD EPYC, 2 cores, 24 GiB; B Z"]),
        ({"num_ranks": 1}, {}, ["ranks differ: A 1, B 2"]),
        ({}, {"size": "full"}, ["A synthetic, small; B synthetic, full"]),
        ({}, {"changes": {"data.synthetic": False}}, ["A synthetic, small; B files: "]),
        ({}, {"data_seed": 1}, ["seeds"]),
        ({"training": {"traced": True}}, {}, ["A was traced"]),
        (LAPTOP, CLUSTER, ["times: A True; B False", "A none; B up to 67108864 bytes"]),
        ({"jit_compile": True}, {"jit_compile": False}, ["XLA", "times: A True; B False"]),
        ({"engine": "horovod"}, {"engine": "jax"}, ["engine", "times: A horovod; B jax"]),
    ],
)
def test_caveats_are_stated(a, b, warnings):
    found = "\n".join(compared([{"num_ranks": 2} | a], [{"num_ranks": 2} | b]).warnings)
    assert all(text in found for text in warnings), found


def test_excluded_and_shared_runs_are_named():
    a, b = sides([{}, {"status": "failed"}], [{}, {"training": {"profiled": True}}])
    assert compare(a, b).warnings == (
        "A: 1 run left out, failed", "B: 1 run left out, traced, profiled or continued",
    )  # fmt: skip
    assert "1 run in A and also in B" in compare(a, Side("a", a.runs[:1])).warnings


@pytest.mark.parametrize(
    ("planted", "expected"),
    [
        (
            [{"jit_compile": True, "num_ranks": 1}]
            + [{"jit_compile": False, "num_ranks": num} for num in (1, 2)],
            [
                "jit_compile False, ranks 1",
                "jit_compile False, ranks 2",
                "jit_compile True, ranks 1",
            ],
        ),
        (
            [{"num_ranks": 2, "engine": engine} for engine in ("horovod", "jax", "jax")],
            ["engine horovod", "engine jax"],
        ),
        ([{"threads": threads} for threads in (1, 1, 2)], ["threads 1", "threads 2"]),
    ],
)
def test_nothing_is_averaged_over_what_differs_on_a_side(planted, expected):
    (mixed, _) = sides(planted, [])
    pairings = compare(mixed, mixed).pairings
    assert [pairing.settings for pairing in pairings] == expected


def test_the_engine_that_was_used_is_the_difference_whatever_the_parameter_says():
    comparison = compared([{"num_ranks": 2}], [{"num_ranks": 2, "engine": "jax"}])
    (difference,) = (each for each in comparison.differences if each.name == "engine")
    assert difference == ("parameter", "engine", "horovod", "jax")


def test_energies_of_different_parts_are_not_compared():
    parts = {"energy_j": 20.0, "changes": {"energy.covers": ["cpu", "gpu"]}}
    comparison = compared([{"energy_j": 10.0}] * 4, [parts] * 4)
    assert "energy_j" not in rows_of(comparison)
    (warning,) = comparison.warnings
    assert "A gpu; B cpu and gpu" in warning


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        ([{"benchmark": "p1b2"}], "nt3, b of p1b2"),
        ([{"status": "failed"}], "b: "),
        ([{"epochs": 24}, {"epochs": 12}], "only b has runs with epochs 12"),
    ],
)
def test_incomparable_runs_are_refused(planted, message):
    with pytest.raises(ParameterError, match=message):
        compared([{}], planted)
    with pytest.raises(ParameterError, match="no run has finished"):
        compared([], [])


def invoke(*words):
    return CliRunner().invoke(cli.cli, ["compare", *(str(word) for word in words)])


def test_the_command_prints_and_writes_json(tmp_path):
    a, b = plant(tmp_path, load_s=3.0), plant(tmp_path, load_s=6.0, loader="original")
    path = tmp_path / "out.json"
    result = invoke(a, b, "--json", path)
    assert result.exit_code == 0, result.output
    for text in ("phase load (s)", "3.00", "6.00", "2.00", "single run", "loader", "original"):
        assert text in result.output
    written = json.loads(path.read_text())
    (rows,) = [each["quantities"] for each in written["comparisons"]]
    load = next(row for row in rows if row["name"] == "phase_load_s")
    assert load["ratio"]["value"] == 2
    assert load["a"] == {"median": 3.0, "values": [3.0]}
    assert written["a"] | {"records": []} == {
        "name": str(a), "num_runs": 1, "num_left_out": 0, "records": [],
    }  # fmt: skip
    difference = {"kind": "parameter", "name": "loader", "a": "parallel", "b": "original"}
    assert difference in written["differences"]
    for words, name in (((a, b, "--json", f"{a}/no/out.json"), "no/out.json"), ((a, "no"), "no")):
        result = invoke(*words)
        assert isinstance(result.exception, (ParameterError, RecordError, SystemExit))
        assert name in str(result.exception) + result.output
