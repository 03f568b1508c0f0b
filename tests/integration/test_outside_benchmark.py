"""The benchmark of docs/add-a-benchmark.md, written to a directory outside the repository."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.records import read_record

pytestmark = pytest.mark.extended

PAGE = Path(__file__).resolve().parents[2] / "docs/add-a-benchmark.md"
FILE = re.compile(r"^`(blobs/\S+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def blobs(tmp_path):
    """The folder that the page describes."""
    files = dict(FILE.findall(PAGE.read_text(encoding="utf-8")))
    assert len(files) == 3
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path / "blobs"


@pytest.mark.parallel
def test_the_command_line_finds_it_by_path_and_by_name(blobs, execute, tmp_path, monkeypatch):
    candle_p1 = [sys.executable, "-m", "candle_p1.cli"]
    code, output = execute(
        [*candle_p1, "data", "make", "./blobs", "--size", "small", "--out", "made"]
    )
    assert code == 0, output
    assert (tmp_path / "made/blobs_test.csv").read_text().count("\n") == 150
    monkeypatch.setenv("CANDLE_BENCHMARKS_PATH", str(tmp_path))
    flags = ["--data_dir", "made", "--epochs", "2", "--output_dir", "out", "--noise", "0.1"]
    flags += ["--batch_normalization", "True"]  # CANDLE's, and not among those it supports
    code, output = execute([*candle_p1, "run", "blobs", "--np", "2", "--", *flags])
    assert code == 0, output
    record = read_record(tmp_path / "out/EXP000/RUN000/run.json")
    assert record["parameters"]["noise"]["value"] == 0.1
    assert sum("batch_normalization (flag)" in warning for warning in record["warnings"]) == 1
    assert record["data"]["files"]["train"]["path"] == str(tmp_path / "made/blobs_train.csv")
    assert record["parameters"]["train_data"] == {
        "value": str(tmp_path / "made/blobs_train.csv"),
        "origin": "flag --data_dir",
    }
