"""Programs that JAX has compiled are kept, and training with them is the same, bit for bit."""

from __future__ import annotations

import os

import pytest

from tests.conftest import CANDLE_P1
from tests.integration.conftest import NARROW
from tests.records import read_record

pytestmark = pytest.mark.jax_engine

FLAGS = f"{NARROW} --epochs 2 --train_steps 5 --save_model False --power none --engine jax"


@pytest.fixture
def train(execute, tmp_path):
    """Trains on ranks of this machine with a directory of programs; returns (record, history)."""

    def train(output, programs, num_ranks=1):
        benchmark, *flags = FLAGS.split()
        flags += ["--output_dir", output, "--compiled_dir", programs]
        argv = [*CANDLE_P1, "run", benchmark, "--np", str(num_ranks), "--", *flags]
        code, printed = execute(argv, env=os.environ)
        assert code == 0, printed
        directory = tmp_path / output / "EXP000/RUN000"
        return read_record(directory / "run.json"), (directory / "history.csv").read_text()

    return train


def test_the_second_start_is_warm_and_trains_the_same(train, tmp_path):
    cold, history = train("cold", "kept")
    warm, again = train("warm", "kept")
    without, plain = train("without", "none")
    assert (cold["programs"]["start"], warm["programs"]["start"]) == ("cold", "warm")
    assert cold["programs"]["num_kept"] > 3 > cold["programs"]["num_loaded"]
    assert warm["programs"]["num_loaded"] >= cold["programs"]["num_kept"]
    assert history == again == plain
    assert without["programs"]["directory"] is None
    assert without["programs"]["num_kept"] == without["programs"]["num_loaded"] == 0
    (directory,) = (tmp_path / "kept").iterdir()
    assert directory.stat().st_mode & 0o077 == 0  # who can write a program can run it


@pytest.mark.parallel
def test_ranks_that_start_together_share_a_directory(train, mpirun, tmp_path):
    first, history = train("first", "kept", num_ranks=2)
    second, again = train("second", "kept", num_ranks=2)
    assert (first["programs"]["start"], second["programs"]["start"]) == ("cold", "warm")
    assert history == again
    assert len(list((tmp_path / "kept").iterdir())) == 1
