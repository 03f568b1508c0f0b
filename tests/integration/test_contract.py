"""CANDLE's contract: a driver imports the scripts, changes parameters and runs each twice.

On one rank, CANDLE's own parameter files are in place of the benchmarks'.
"""

from __future__ import annotations

import shutil
import sys

import pytest

from tests.candle import CANDLE
from tests.records import read_record

pytestmark = pytest.mark.extended

BENCHMARKS = ("nt3", "p1b1", "p1b2", "p1b3")

DRIVER = """
import sys

folders, sys.argv = sys.argv[1:], sys.argv[:1]
sys.path[:0] = folders
import nt3_baseline_keras2, p1b1_baseline_keras2, p1b2_baseline_keras2, p1b3_baseline_keras2

SMALL = {
    nt3_baseline_keras2: {"conv": [8, 20, 1], "pool": [10]},
    p1b1_baseline_keras2: {"dropout": 0.1},
    p1b2_baseline_keras2: {},
    p1b3_baseline_keras2: {"batch_size": 1000},
}
SHORT = {"train_steps": 4, "val_steps": 1, "test_steps": 1}
for module, small in SMALL.items():
    name = module.__name__.split("_")[0]
    losses = []
    for rate in (0.001, 0.002):
        sys.argv = [name, "--epochs", "2", "--dense", "16"]
        params = module.initialize_parameters(default_model=f"{name}_default_model.txt")
        params.update(small | SHORT, learning_rate=rate, output_dir="out", experiment_id=name)
        # What CANDLE Supervisor adds, and what its users set.
        params.update(framework="keras", save="x", instance_directory=".", timeout=3600.0)
        history = module.run(params)
        losses.append(history.history["val_loss"][-1])
    assert losses[0] != losses[1], losses
    print("DRIVEN", name, losses)
"""


@pytest.mark.parallel
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_driver_runs_each_script_twice_in_one_process(
    mpirun, execute, benchmark_folders, tmp_path, num_ranks
):
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    if num_ranks == 1:
        for name in BENCHMARKS:
            shutil.copytree(benchmark_folders / name, tmp_path / name)
            shutil.copy(CANDLE / f"HEAD/{name}_default_model.txt", tmp_path / name)
        benchmark_folders = tmp_path
    argv = [script, *(benchmark_folders / name for name in BENCHMARKS)]
    code, output = execute(mpirun(num_ranks, *argv) if num_ranks > 1 else [sys.executable, *argv])
    print(output)
    assert code == 0, output
    for name in BENCHMARKS:
        assert f"DRIVEN {name}" in output
        records = [
            read_record(tmp_path / "out" / name / run / "run.json") for run in ("RUN000", "RUN001")
        ]
        assert [record["plan"]["base_learning_rate"] for record in records] == [0.001, 0.002]
        assert {record["status"] for record in records} == {"ok"}
        assert {record["benchmark"] for record in records} == {name}
        for run in ("RUN000", "RUN001"):
            files = {path.name for path in (tmp_path / "out" / name / run).iterdir()}
            assert {"training.log", "history.csv", "history.png", "final_params.txt"} <= files
