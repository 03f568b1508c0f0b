import json
import sys

import pytest
from rich.console import Console

from candle_p1.bench import harness
from candle_p1.data.reader import FileSet


@pytest.fixture
def compare(monkeypatch, tmp_path):
    """Compares by jobs whose outcomes functions (task, number of ranks) -> list return.

    Those of another environment are what `there` returns.
    """

    def compare(comparison, measure, content="1,2\n", there=None):
        file = tmp_path / "train.csv"
        file.write_text(content)

        def run(task, num_ranks, name, python):
            return (measure if python == sys.executable else there)(task, num_ranks)

        monkeypatch.setattr(harness, "run", run)
        comparison.files = FileSet.at({"train": file})
        report = comparison.measure(lambda *progress: None)
        json.dumps(report, allow_nan=False)
        return report

    return compare


@pytest.fixture
def printed():
    """Returns what a terminal that is wide enough shows of the parts of a report."""

    def printed(parts):
        console = Console(width=250)
        with console.capture() as capture:
            console.print(*parts, sep="\n")
        return capture.get()

    return printed
