"""The engine jax needs neither TensorFlow nor Horovod, and a single process no MPI either."""

from __future__ import annotations

import os
import sys

import pytest

from tests.conftest import CANDLE_P1
from tests.integration.conftest import NARROW
from tests.records import read_record

pytestmark = [pytest.mark.extended, pytest.mark.jax_engine]

STEPS = "--epochs 2 --train_steps 5 --val_steps 2 --test_steps 2"
RUNS = {
    "nt3": f"{NARROW} {STEPS}",
    "p1b1": f"p1b1 --model vae --dense 32 {STEPS}",
    "p1b2": f"p1b2 --dense 16 {STEPS}",
    "p1b3": f"p1b3 --dense 16 --cell_noise_sigma 0.1 {STEPS}",
}
NOT_NEEDED = ("tensorflow", "horovod", "mpi4py")
HIDE = f"import sys\nsys.modules.update(dict.fromkeys({NOT_NEEDED}))\n"
"""Makes them look as if they were not installed, where Python reads this at its start."""
TRACE = """\
import os, traceback
with open(os.environ["IMPORTS"], "a") as file:
    print(__name__, *traceback.format_stack(), file=file)
raise RuntimeError(f"{__name__} was imported")
"""
"""A package that takes the place of another one, and writes down who imports it."""


def test_every_benchmark_trains_where_none_of_the_three_is_found(train_all, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    directory = train_all(1, RUNS, settings={"PYTHONPATH": str(tmp_path)})
    for name in RUNS:
        record = read_record(directory / name / "run.json")
        assert (record["benchmark"], record["status"]) == (name, "ok")
        assert record["num_ranks"] == 1
        assert record["quality"]["loss"]["value"] > 0


@pytest.mark.parallel
def test_ranks_import_neither_tensorflow_nor_horovod(mpirun, execute, tmp_path):
    """Both look installed; their import is noticed, as a last command shows."""
    for name in ("tensorflow", "horovod"):
        (tmp_path / "packages" / name).mkdir(parents=True)
        (tmp_path / "packages" / name / "__init__.py").write_text(TRACE)
    imports = tmp_path / "imports"
    env = os.environ | {"PYTHONPATH": str(tmp_path / "packages"), "IMPORTS": str(imports)}
    flags = [*RUNS["nt3"].split()[1:], "--engine", "jax", "--output_dir", "out"]
    code, output = execute([*CANDLE_P1, "run", "nt3", "--np", "2", "--", *flags], env=env)
    assert not imports.exists(), imports.read_text()
    assert code == 0, output
    record = read_record(tmp_path / "out/EXP000/RUN000/run.json")
    assert (record["num_ranks"], record["distributed"]["backend"]) == (2, "jax")
    execute([sys.executable, "-c", "import horovod"], env=env)
    assert imports.read_text().startswith("horovod ")


@pytest.mark.parallel
def test_ranks_that_share_a_gpu_average_through_the_host(mpirun, execute, tmp_path):
    """Also on CPUs: they train as with JAX's own collectives, to rounding."""
    losses = []
    for share in ("True", "False"):
        flags = [*RUNS["nt3"].split()[1:], "--engine", "jax", "--check_replicas", "True"]
        flags += ["--share_gpus", share, "--output_dir", share]
        code, output = execute([*CANDLE_P1, "run", "nt3", "--np", "2", "--", *flags])
        assert code == 0, output
        record = read_record(tmp_path / share / "EXP000/RUN000/run.json")
        assert (record["distributed"]["settings"]["collectives"] == "host") == (share == "True")
        losses.append([epoch["metrics"]["loss"] for epoch in record["training"]["epochs"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
