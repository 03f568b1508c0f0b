from __future__ import annotations

import json

import pytest

from candle_p1.bench import harness
from candle_p1.data.reader import FileSet


@pytest.fixture
def compare(monkeypatch, tmp_path):
    """Compares by jobs whose outcomes a function (task, number of ranks) -> list returns."""

    def compare(comparison, measure, content="1,2\n"):
        file = tmp_path / "train.csv"
        file.write_text(content)
        monkeypatch.setattr(harness, "run", lambda task, num_ranks, name: measure(task, num_ranks))
        comparison.files = FileSet.of({"train": file})
        report = comparison.measure(lambda *progress: None)
        json.dumps(report, allow_nan=False)
        return report

    return compare
