import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from candle_p1.models.fast.convolution_algorithms import ALGORITHMS
from tests.conftest import NEEDS_HOROVOD, ROOT
from tools import convolutions
from tools.convolutions import Case, analyse, cases, step_of

STORED = ROOT / "tests/files/convolution_times.csv"


def test_every_algorithm_is_timed():
    assert {name for case in cases() for name in case.algorithms} == set(ALGORITHMS)


def test_the_rule_mostly_chooses_the_fastest_algorithm():
    found = analyse(pd.read_csv(STORED))
    assert set(found["name"]) == {"", "nt3", "p1b3, first", "p1b3, second"}
    assert (found["loss"] == 0).mean() >= 0.8
    assert found["loss"].mean() < 0.05
    assert (found["loss"][found["name"] != ""] == 0).all()


def test_what_was_timed_is_written_and_read_again(monkeypatch, tmp_path):
    monkeypatch.setattr(convolutions, "measure", lambda num_calls: pd.read_csv(STORED))
    file = str(tmp_path / "times.csv")
    measured, again = (
        CliRunner().invoke(convolutions.main, words)
        for words in (["--csv", file], ["--times", file])
    )
    assert measured.exit_code == again.exit_code == 0, measured.output
    assert measured.output == again.output
    assert "the fastest algorithm of 34 of 41" in again.output


@pytest.mark.parametrize(
    ("case", "algorithms"),
    [
        (Case(400, 5, 32, 32, 4, 2, 7), ["plain", "whole", "chunked", "tiled"]),
        (Case(400, 5, 16, 32, 4, 2, gives_gradient=True), list(ALGORITHMS)),
        (Case(400, 3, 1, 6, 1, 3), ["plain", "whole", "chunked", "direct"]),
    ],
)
def test_all_algorithms_that_are_timed_compute_the_same(case, algorithms):
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "tensorflow":
        pytest.skip(NEEDS_HOROVOD)
    assert case.algorithms == algorithms
    first, *others = ([each.numpy() for each in step_of(name, case)()] for name in algorithms)
    assert len(first) == 2 * (1 + bool(case.first_taps)) + case.gives_gradient
    for found in others:
        for one, other in zip(found, first, strict=True):
            assert np.abs(one - other).max() <= 2e-5 * np.abs(other).max()
