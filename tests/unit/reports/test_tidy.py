"""The tidy table of all runs, as CSV and as Parquet."""

from __future__ import annotations

import csv
import io

import pandas as pd
import pytest

from candle_p1.reports.exports.tidy import QUANTITIES, tidy
from candle_p1.reports.frame import read_runs
from tests.planted_records import plant


@pytest.fixture
def runs(tmp_path):
    plant(
        tmp_path,
        "nt3",
        2,
        load_s=4.0,
        energy_j=50.0,
        quality={"accuracy": 0.9},
        naive={"accuracy": 0.5},
        conv=[1, 2],
    )
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


def test_a_column_of_several_kinds_is_text(tmp_path):
    for value in (1, "auto", True):
        plant(tmp_path, warmup=value)
    assert tidy(read_runs([tmp_path]).runs)["parameter_warmup"].to_list() == ["1", "auto", "True"]


def test_a_table_can_consist_of_running_runs_or_none(tmp_path):
    plant(tmp_path, status="running")
    table = tidy(read_runs([tmp_path]).runs)
    assert table["status"].to_list() == ["running"]
    assert table["total_s"].isna().all()
    assert tidy([]).empty
