"""The engine jax needs neither TensorFlow nor Horovod, and a single process no MPI either."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.conftest import CANDLE_P1
from tests.records import read_record

pytestmark = [pytest.mark.extended, pytest.mark.jax_engine]

STEPS = "--epochs 2 --train_steps 5 --val_steps 2 --test_steps 2"
RUNS = {
    "nt3": f"nt3 {STEPS}",
    "p1b1": f"p1b1 --model vae --dense 32 {STEPS}",
    "p1b2": f"p1b2 {STEPS}",
    "p1b3": f"p1b3 --cell_noise_sigma 0.1 {STEPS}",
}
NOT_NEEDED = ("tensorflow", "horovod", "mpi4py")
HIDE = f"import sys\nsys.modules.update(dict.fromkeys({NOT_NEEDED}))\n"
"""Makes them look as if they were not installed, where Python reads this at its start."""
TRACED = ("tensorflow", "horovod")
TRACE = """\
import os, traceback
with open(os.environ["IMPORTS"], "a") as file:
    print(__name__, *traceback.format_stack(), file=file)
raise RuntimeError(f"{__name__} was imported")
"""
"""A package that takes the place of another one, and writes down who imports it."""


@pytest.fixture(scope="module")
def hidden(tmp_path_factory):
    """Variables with which a process finds neither TensorFlow nor Horovod nor mpi4py."""
    directory = tmp_path_factory.mktemp("hidden")
    (directory / "sitecustomize.py").write_text(HIDE)
    return {"PYTHONPATH": str(directory)}


@pytest.fixture(scope="module")
def trained(train_all, hidden):
    """The directory of all runs, of a process that finds none of the three."""
    return train_all(1, RUNS, settings=hidden)


@pytest.mark.parametrize("name", RUNS)
def test_every_benchmark_trains_and_is_recorded(trained, name):
    record = read_record(trained / name / "run.json")
    assert record["benchmark"] == name
    assert record["status"] == "ok"
    assert record["num_ranks"] == 1
    assert record["quality"]["loss"]["value"] > 0


@pytest.mark.parametrize("name", NOT_NEEDED)
def test_what_is_hidden_cannot_be_imported(execute, hidden, name):
    """Otherwise, the runs would show nothing."""
    code, output = execute([sys.executable, "-c", f"import {name}"], env=os.environ | hidden)
    assert code != 0
    assert f"import of {name} halted; None in sys.modules" in output


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """Variables with which TensorFlow and Horovod look installed; IMPORTS lists their imports."""
    directory = tmp_path_factory.mktemp("traced")
    for name in TRACED:
        (directory / name).mkdir()
        (directory / name / "__init__.py").write_text(TRACE)
    return {"PYTHONPATH": str(directory), "IMPORTS": str(directory / "imports")}


def take_imports(traced):
    """Returns what has been imported since the last call, in words."""
    path = Path(traced["IMPORTS"])
    found = path.read_text() if path.exists() else ""
    path.unlink(missing_ok=True)
    return found


@pytest.mark.parallel
def test_ranks_of_the_engine_jax_import_neither_tensorflow_nor_horovod(train_all, traced):
    lines = {name: f"{line} --engine jax" for name, line in RUNS.items()}
    directory = train_all(2, lines, settings=traced)
    assert take_imports(traced) == ""
    for name in RUNS:
        record = read_record(directory / name / "run.json")
        assert (record["status"], record["num_ranks"]) == ("ok", 2)
        assert record["distributed"]["backend"] == "jax"


@pytest.mark.parallel
def test_the_command_line_imports_neither_for_the_engine_jax(execute, traced, tmp_path):
    flags = [*STEPS.split(), "--engine", "jax", "--output_dir", "out"]
    argv = [*CANDLE_P1, "run", "nt3", "--np", "2", "--", *flags]
    code, output = execute(argv, env=os.environ | traced)
    assert take_imports(traced) == ""
    assert code == 0, output
    record = read_record(tmp_path / "out/EXP000/RUN000/run.json")
    assert (record["num_ranks"], record["distributed"]["backend"]) == (2, "jax")


@pytest.mark.parametrize("name", TRACED)
def test_what_is_traced_is_found_by_its_import(execute, traced, name):
    """Otherwise, the runs would show nothing."""
    code, output = execute([sys.executable, "-c", f"import {name}"], env=os.environ | traced)
    assert code != 0
    assert f"{name} was imported" in output
    assert take_imports(traced).startswith(f"{name} ")
