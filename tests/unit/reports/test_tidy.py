"""The tidy table of all runs, as CSV and as Parquet."""

from __future__ import annotations

import csv
import io

import pytest

from candle_p1.reports.exports.tidy import ALWAYS, tidy, to_csv, to_parquet
from candle_p1.reports.runs import read_runs
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
    rows = list(csv.DictReader(io.StringIO(to_csv(runs))))
    ok, failed, traced = rows
    assert [row["status"] for row in rows] == ["ok", "failed", "ok"]
    assert ok["record"] == str(runs[0].path)
    assert (ok["benchmark"], ok["mode"], ok["num_ranks"]) == ("nt3", "strong", "2")
    assert float(ok["phase_load_s"]) == 4.0
    assert float(ok["total_s"]) == runs[0].total_s
    assert float(ok["energy_j"]) == 50.0
    assert float(ok["test_accuracy"]) == 0.9
    assert float(ok["naive_accuracy"]) == 0.5
    assert (ok["plan_epochs_per_rank"], ok["parameter_conv"]) == ("24", "1 2")
    assert (ok["cpu"], ok["memory_gib"], ok["version_keras"]) == ("AMD EPYC", "24", "3.15.1")
    assert ok["failure"] == ok["disturbed"] == ""
    assert failed["failure"] == "rank 0 died"
    assert failed["total_s"] == failed["phase_load_s"] == failed["energy_j"] == ""
    assert traced["disturbed"] == "traced by Horovod's timeline"
    assert traced["parameter_loader"] == 'a "b", c'


def test_columns_have_one_type_and_a_fixed_order(runs):
    columns = tidy(runs)
    assert columns.keys() >= ALWAYS
    assert columns["num_ranks"] == (int, [2, 1, 1])
    assert columns["synthetic"] == (bool, [True, None, True])
    assert columns["parameter_learning_rate"] == (float, [0.001, None, 0.001])
    assert columns["first_step_s"][0] is float
    names = list(columns)
    assert names.index("total_s") < names.index("phase_load_s") < names.index("test_accuracy")


def test_a_column_of_several_kinds_is_text(tmp_path):
    for value in (1, "auto", True):
        plant(tmp_path, warmup=value)
    assert tidy(read_runs([tmp_path]).runs)["parameter_warmup"] == (str, ["1", "auto", "True"])


def test_parquet_holds_the_same(runs):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = parquet.read_table(pyarrow.BufferReader(to_parquet(runs)))
    assert table.to_pydict() == {name: values for name, (_, values) in tidy(runs).items()}
    assert table.schema.field("total_s").type == pyarrow.float64()
    assert table.schema.field("num_ranks").type == pyarrow.int64()


def test_without_pyarrow_there_is_no_parquet(runs, monkeypatch):
    from candle_p1.reports.exports import tidy as module

    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert to_parquet(runs) is None


def test_a_table_can_consist_of_running_runs(tmp_path):
    plant(tmp_path, status="running")
    (row,) = csv.DictReader(io.StringIO(to_csv(read_runs([tmp_path]).runs)))
    assert row["total_s"] == ""
    assert row["status"] == "running"
