"""A single process needs neither TensorFlow nor Horovod nor MPI: Keras runs on JAX."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.records import read_record

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(
        find_spec("jax") is None or any(map(find_spec, ("tensorflow", "horovod", "mpi4py"))),
        reason="needs JAX without TensorFlow, Horovod and mpi4py: `make test-jax`",
    ),
]

STEPS = "--epochs 2 --train_steps 5 --val_steps 2 --test_steps 2"
RUNS = {
    "nt3": f"nt3 {STEPS}",
    "p1b1": f"p1b1 --model vae --dense 32 {STEPS}",
    "p1b2": f"p1b2 {STEPS}",
    "p1b3": f"p1b3 --cell_noise_sigma 0.1 {STEPS}",
}


def test_every_benchmark_trains_and_is_recorded(train_all, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    directory = train_all(1, RUNS)
    for name in RUNS:
        record = read_record(directory / name / "run.json")
        assert record["benchmark"] == name
        assert record["status"] == "ok"
        assert record["num_ranks"] == 1
        assert record["quality"]["loss"]["value"] > 0
