"""Ranks of the engine jax import neither TensorFlow nor Horovod, and keep compiled programs."""

import subprocess
import sys

import pytest

from tests.conftest import CANDLE_P1, await_end, shell_environment, start_group
from tests.integration.conftest import NARROW
from tests.records import read_record

pytestmark = [pytest.mark.extended, pytest.mark.jax_engine, pytest.mark.parallel]

FLAGS = f"{NARROW} --epochs 2 --train_steps 5 --val_steps 2 --test_steps 2 --power none"
RUNS = {
    "first": "",
    "second": "",
    "host": "--share_gpus True --check_replicas True --compiled_dir none",
}
TRACE = """\
import os, traceback
with open(os.environ["IMPORTS"], "a") as file:
    print(__name__, *traceback.format_stack(), file=file)
raise RuntimeError(f"{__name__} was imported")
"""
"""A package that takes the place of another one, and writes down who imports it."""


@pytest.fixture(scope="module")
def jobs(mpirun, data_directory, tmp_path_factory):
    """The directory of runs of NT3 on two ranks, one after the other, with one for programs.

    TensorFlow and Horovod look installed; their import is noticed.
    """
    directory = tmp_path_factory.mktemp("jobs")
    for name in ("tensorflow", "horovod"):
        (directory / "packages" / name).mkdir(parents=True)
        (directory / "packages" / name / "__init__.py").write_text(TRACE)
    env = shell_environment(data_directory) | {"PYTHONPATH": str(directory / "packages")}
    env["IMPORTS"] = str(directory / "imports")
    flags = f"{FLAGS} --engine jax --compiled_dir kept --output_dir {directory}"
    for name, further in RUNS.items():
        benchmark, *argv = f"{flags} --experiment_id . --run_id {name} {further}".split()
        job = start_group(
            [*CANDLE_P1, "run", benchmark, "--np", 2, "--", *argv], directory, env=env
        )
        code, output = await_end(job, 600)
        assert code == 0, output
    assert not (directory / "imports").exists(), (directory / "imports").read_text()
    subprocess.run([sys.executable, "-c", "import horovod"], env=env, capture_output=True)
    return directory


def test_ranks_import_neither_tensorflow_nor_horovod(jobs):
    """The last import shows that one would have been noticed."""
    assert (jobs / "imports").read_text().startswith("horovod ")
    record = read_record(jobs / "first/run.json")
    assert (record["num_ranks"], record["distributed"]["backend"]) == (2, "jax")


def test_programs_are_kept_and_train_as_those_that_are_not(jobs):
    cold, warm = (read_record(jobs / each / "run.json")["programs"] for each in ("first", "second"))
    assert (cold["start"], warm["start"]) == ("cold", "warm")
    assert cold["num_kept"] > 3 > cold["num_loaded"]
    assert warm["num_loaded"] >= cold["num_kept"]
    assert read_record(jobs / "host/run.json")["programs"]["directory"] is None
    histories = [(jobs / each / "history.csv").read_text() for each in ("first", "second")]
    assert histories[0] == histories[1]
    (directory,) = (jobs / "kept").iterdir()
    assert directory.stat().st_mode & 0o077 == 0  # who can write a program can run it


def test_ranks_that_share_a_gpu_average_through_the_host(jobs):
    """Also on CPUs: they train as with JAX's own collectives, to rounding."""
    records = {each: read_record(jobs / each / "run.json") for each in ("second", "host")}
    losses = []
    for name, record in records.items():
        assert (record["distributed"]["settings"]["collectives"] == "host") == (name == "host")
        losses.append([epoch["metrics"]["loss"] for epoch in record["training"]["epochs"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
