"""A single process needs neither TensorFlow nor Horovod nor MPI: Keras runs on JAX."""

from __future__ import annotations

import os
import sys

import pytest

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


@pytest.fixture(scope="module")
def hidden(tmp_path_factory):
    """Variables with which a process finds neither TensorFlow nor Horovod nor mpi4py."""
    directory = tmp_path_factory.mktemp("hidden")
    (directory / "sitecustomize.py").write_text(HIDE)
    return {"PYTHONPATH": str(directory)}


@pytest.fixture(scope="module")
def trained(train_all, hidden):
    """The directory of all runs, of a process that finds none of the three."""
    return train_all(1, RUNS, settings=hidden | {"KERAS_BACKEND": "jax"})


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
