"""A single process needs neither TensorFlow nor Horovod nor MPI: Keras runs on JAX."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest

from candle_p1.records.record import read_record

pytestmark = pytest.mark.skipif(
    find_spec("jax") is None or any(map(find_spec, ("tensorflow", "horovod", "mpi4py"))),
    reason="needs JAX without TensorFlow, Horovod and mpi4py: `make test-jax`",
)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("nt3", ["--epochs", "2"]),
        ("p1b1", ["--epochs", "2", "--model", "vae", "--dense", "32"]),
        ("p1b2", ["--epochs", "2"]),
        ("p1b3", ["--train_steps", "20", "--cell_noise_sigma", "0.1"]),
    ],
)
def test_a_benchmark_trains_and_is_recorded(
    execute, monkeypatch, benchmark_folders, tmp_path, name, flags
):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    script = benchmark_folders / name / f"{name}_baseline_keras2.py"
    code, output = execute([sys.executable, script, "--output_dir", "out", *flags])
    assert code == 0, output
    record = read_record(tmp_path / "out/EXP000/RUN000/run.json")
    assert record["status"] == "ok"
    assert record["num_ranks"] == 1
    assert record["quality"]["loss"]["value"] > 0
