from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from candle_p1.cli.bench import command


@pytest.mark.extended
def test_a_synthetic_record_of_many_ranks_is_measured(tmp_path):
    file = tmp_path / "record.json"
    flags = ["record", "--ranks", "40", "--epochs", "2", "--records", "2", "--json", str(file)]
    result = CliRunner().invoke(command, flags)
    assert result.exit_code == 0, result.output
    assert "synthetic" in result.output
    results = json.loads(file.read_text())
    assert results["synthetic"] is True
    assert {each["variant"] for each in results["results"]} == {
        "write",
        "read",
        "read raw values",
        "report",
    }
    assert all(each["median_s"] > 0 for each in results["results"])
    assert 0 < results["file_bytes"]["run.json"] < 200_000
    # Every rank's values: at least those of the 15 phases and of 2 epochs.
    assert results["file_bytes"]["per_rank.npz"] > 8 * 40 * 100
