"""A single process needs neither TensorFlow nor Horovod nor MPI: Keras runs on JAX."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest

from candle_p1.records import read_record

pytestmark = pytest.mark.skipif(
    find_spec("jax") is None or any(map(find_spec, ("tensorflow", "horovod", "mpi4py"))),
    reason="needs JAX without TensorFlow, Horovod and mpi4py: `make test-jax`",
)


def test_nt3_trains_and_is_recorded(execute, monkeypatch, nt3_script, tmp_path):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    flags = ["--size", "small", "--epochs", "2", "--output_dir", "out"]
    code, output = execute([sys.executable, nt3_script, *flags])
    assert code == 0, output
    record = read_record(tmp_path / "out/EXP000/RUN000/run.json")
    assert record["status"] == "ok"
    assert record["num_ranks"] == 1
