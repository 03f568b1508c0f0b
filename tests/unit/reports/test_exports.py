"""The table of all runs, and Extra-P's input, against its documentation and its own reader."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections import defaultdict
from importlib.util import find_spec

import pandas as pd
import pytest

from candle_p1.reports.experiments import group
from candle_p1.reports.export import INDEX_NAME, QUANTITIES, extrap_files, tidy
from candle_p1.reports.frame import Run, read_runs
from tests.planted_records import REMOVED, changed, plant, planted_record

PATHS = {"total", "total->load", "total->broadcast", "total->train"}


def measured_in(text):
    """Returns the values by call path and processes; see Extra-P's page "JSON Lines format"."""
    found = defaultdict(dict)
    for line in text.splitlines():
        point = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        assert set(point) == {"params", "value", "callpath", "metric"}
        assert point["metric"] == "time_s"
        assert all(isinstance(value, float) for value in point["value"])
        (num,) = point["params"].values()
        assert num not in found[point["callpath"]]
        found[point["callpath"]][num] = point["value"]
    assert len({tuple(points) for points in found.values()}) == 1  # every path at every point
    return found


def plant_series(directory, counts=(1, 2, 4, 8, 16), **kwargs):
    for repeat, num in itertools.product(range(3), counts):
        load_s = num + 0.1 * repeat
        plant(directory, "nt3", num, load_s=load_s, wait_s=0.5, rng_seed=repeat, **kwargs)


def files_of(directory):
    return extrap_files(group(read_runs([directory]).runs))


def test_all_repeats_of_a_strong_series_are_exported(tmp_path):
    plant_series(tmp_path)
    plant(tmp_path, "nt3", 2, status="failed")
    files = files_of(tmp_path)
    assert list(files) == ["nt3-strong-all-runs.jsonl", INDEX_NAME]
    measured = measured_in(files["nt3-strong-all-runs.jsonl"])
    assert set(measured) == PATHS
    assert list(measured["total->load"]) == [1, 2, 4, 8, 16]
    assert sorted(measured["total->load"][4]) == pytest.approx([4.0, 4.1, 4.2])
    assert measured["total->train"][16] == pytest.approx([3.5] * 3)  # 48 / 16 + 0.5
    assert measured["total->broadcast"][1] == [0.5] * 3


def test_every_series_has_a_file_that_the_index_explains(tmp_path):
    loaders, modes = ("original", "parallel"), ("strong", "weak")
    for loader, scaling in itertools.product(loaders, modes):
        plant_series(tmp_path, (1, 2), loader=loader, epochs_scaling=scaling)
    files = files_of(tmp_path)
    index = list(csv.DictReader(io.StringIO(files.pop(INDEX_NAME))))
    named = [
        (f"nt3-{mode}-loader-{x}.jsonl", f"loader {x}", "2") for mode in modes for x in loaders
    ]
    assert sorted((row["file"], row["series"], row["points"]) for row in index) == named
    assert [row["file"] for row in index] == list(files)


def test_long_names_are_shortened_and_unique(tmp_path):
    for size in ("1" * 40, "2" * 40):
        plant_series(tmp_path, (1, 2), batch_scaling="none", model=f"{'x' * 30} {'y' * 30} {size}")
    stem = f"nt3-strong-model-{'x' * 30}"
    assert set(files_of(tmp_path)) == {f"{stem}.jsonl", f"{stem}-1.jsonl", INDEX_NAME}


def test_one_point_and_growing_batches_give_no_file(tmp_path):
    plant_series(tmp_path, (2,))
    plant_series(tmp_path, (2, 4), batch_scaling="linear")
    assert files_of(tmp_path) == {}


def test_a_phase_that_a_point_lacks_is_left_out(tmp_path):
    first = changed(planted_record(num_ranks=1), {"phases.broadcast": REMOVED})
    runs = [Run(tmp_path / "1", first), Run(tmp_path / "2", planted_record(num_ranks=2))]
    files = extrap_files(group(runs))
    assert set(measured_in(files["nt3-strong-all-runs.jsonl"])) == PATHS - {"total->broadcast"}


@pytest.mark.formats
@pytest.mark.skipif(find_spec("extrap") is None, reason="Extra-P is not installed")
@pytest.mark.filterwarnings("ignore")  # its own
def test_extrap_reads_it(tmp_path):
    from extrap.fileio.file_reader.jsonlines_file_reader import read_jsonlines_file

    (tmp_path / "runs").mkdir()
    plant_series(tmp_path / "runs")
    path = tmp_path / "series.jsonl"
    path.write_text(files_of(tmp_path / "runs")["nt3-strong-all-runs.jsonl"])
    experiment = read_jsonlines_file(str(path))
    assert [parameter.name for parameter in experiment.parameters] == ["processes"]
    assert {path.name for path in experiment.callpaths} == PATHS
    for measurements in experiment.measurements.values():
        assert [float(each.coordinate[0]) for each in measurements] == [1, 2, 4, 8, 16]
        assert all(each.repetitions == 3 for each in measurements)


@pytest.fixture
def runs(tmp_path):
    merits = {"quality": {"accuracy": 0.9}, "naive": {"accuracy": 0.5}}
    plant(tmp_path, "nt3", 2, load_s=4.0, energy_j=50.0, conv=[1, 2], **merits)
    plant(tmp_path, "p1b2", status="failed", learning_rate=None)
    plant(tmp_path, "nt3", training={"traced": True}, loader='a "b", c')
    return read_runs([tmp_path]).runs


def test_every_run_is_a_row_with_its_quantities(runs):
    rows = list(csv.DictReader(io.StringIO(tidy(runs).to_csv(index=False))))
    ok, failed, traced = rows
    assert [row["status"] for row in rows] == ["ok", "failed", "ok"]
    assert ok["record"] == str(runs[0].path)
    assert (ok["benchmark"], ok["mode"], ok["num_ranks"]) == ("nt3", "strong", "2")
    assert float(ok["phase_load_s"]) == 4.0
    assert float(ok["total_s"]) == runs[0]["total_s"]
    assert float(ok["energy_j"]) == 50.0
    assert float(ok["test_accuracy"]) == 0.9
    assert float(ok["naive_accuracy"]) == 0.5
    assert (ok["plan_epochs_per_rank"], ok["parameter_conv"]) == ("24", "1 2")
    assert (ok["cpu"], ok["memory_gib"], ok["version_keras"]) == ("AMD EPYC", "24", "3.15.1")
    assert ok["failure"] == ok["perturbed_by"] == ""
    assert failed["failure"] == "rank 0 died"
    assert failed["total_s"] == failed["phase_load_s"] == failed["energy_j"] == ""
    assert traced["perturbed_by"] == "traced by Horovod's timeline"
    assert traced["parameter_loader"] == 'a "b", c'


def test_columns_have_one_type_and_a_fixed_order(runs):
    table = tidy(runs)
    assert {*QUANTITIES} <= set(table)
    assert table.dtypes["num_ranks"] == "Int64"
    assert table.dtypes["synthetic"] == "boolean"
    assert table["parameter_learning_rate"].to_list() == [0.001, pd.NA, 0.001]
    assert table.dtypes["first_step_s"] == table.dtypes["power_w"] == "Float64"
    names = list(table)
    assert names.index("total_s") < names.index("phase_load_s") < names.index("test_accuracy")


def test_a_column_of_several_kinds_is_text_and_unknown_ones_are_empty(tmp_path):
    for value in (1, "auto", True):
        plant(tmp_path, warmup=value, status="running")
    table = tidy(read_runs([tmp_path]).runs)
    assert table["parameter_warmup"].to_list() == ["1", "auto", "True"]
    assert table["total_s"].isna().all()
    assert tidy([]).empty
