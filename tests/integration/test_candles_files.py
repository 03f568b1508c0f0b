"""CANDLE's parameter files and the command lines of its READMEs train as they are, but small."""

from __future__ import annotations

import pytest

from tests.candle import FILES, LINES, benchmark_of
from tests.records import read_record

pytestmark = pytest.mark.extended

SMALL = "--epochs 1 --train_steps 1 --val_steps 1 --test_steps 1 --save_path save"
"""One step on the small data, and no results elsewhere."""
FEW_GENES = {"v0.4-nt3_noise_model": "--feature_col 5"}
"""The small data do not have the gene that this file names."""


def runs_of_files():
    """Those of HEAD are config files, the others are in place of the benchmark's own.

    Unit tests show that a file means the same in both ways.
    """
    runs = {}
    for path in FILES:
        benchmark, name = benchmark_of(path), f"{path.parent.name}-{path.stem}"
        use = f" --config_file {path}" if path.parent.name == "HEAD" else f":{path}"
        runs[name] = f"{benchmark}{use} {FEW_GENES.get(name, '')}"
    return runs


RUNS = runs_of_files() | {
    f"{benchmark}-{number}": f"{benchmark} {line}"
    for benchmark, lines in LINES.items()
    for number, line in enumerate(lines)
}


@pytest.fixture(scope="module")
def directory(train_all):
    """Holds a directory for each of RUNS, trained in one process."""
    return train_all(1, {name: f"{line} {SMALL}" for name, line in RUNS.items()}, limit_s=1800)


@pytest.mark.parametrize("name", RUNS)
def test_every_file_and_every_command_line_trains(directory, name):
    record = read_record(directory / name / "run.json")
    assert (record["status"], record["data"]["synthetic"]) == ("ok", True)
    assert len(record["training"]["epochs"]) == 1
