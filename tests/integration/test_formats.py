"""What a report writes for other tools: Extra-P, data frames."""

from __future__ import annotations

import csv
import sys

import pytest

from tests.unit.reports.test_exports import measured_in

pytestmark = pytest.mark.extended


def test_a_report_of_runs_writes_for_extrap_and_data_frames(execute, tmp_path):
    from tests.planted_records import plant

    (tmp_path / "runs").mkdir()
    for num_ranks in (1, 2, 4):
        plant(tmp_path / "runs", "nt3", num_ranks)
    plant(tmp_path / "runs", "nt3", 2, status="failed")
    words = ["-m", "candle_p1.cli", "report", "runs", "-o", "report"]
    code, output = execute([sys.executable, *words])
    assert code == 0, output
    with (tmp_path / "report/runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sorted((row["num_ranks"], row["status"]) for row in rows) == [
        ("1", "ok"), ("2", "failed"), ("2", "ok"), ("4", "ok"),
    ]  # fmt: skip
    measured = measured_in((tmp_path / "report/extrap/nt3-strong-all-runs.jsonl").read_text())
    assert list(measured["total"]) == [1, 2, 4]
