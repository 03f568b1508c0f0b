"""Timed convolutions: what is timed, and what is fitted to it."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from candle_p1.models.fast.convolution_costs import FACTORS, Convolution, Rates, seconds
from tests.conftest import NEEDS_HOROVOD, ROOT
from tools import convolutions
from tools.convolutions import analyse, fitted_set, held_out_set

STORED = ROOT / "tests/files/convolution_times.csv"
KNOWN = {
    name: {term: 0.5 + 0.25 * number for number, term in enumerate(sorted(factors))}
    for name, factors in FACTORS.items()
}


def times_of_known_factors():
    rows = []
    for number, of in enumerate([*fitted_set(), *held_out_set()]):
        rates = Rates(400e9, 50e9) if number % 2 else Rates(200e9, 30e9)  # they change meanwhile
        for algorithm in of.algorithms:
            time_s = {"algorithm": algorithm, "least_s": seconds(algorithm, of, rates, KNOWN)}
            rows.append(asdict(of) | asdict(rates) | time_s)
    return pd.DataFrame(rows)


def test_known_factors_are_found_again_whatever_disturbs_one_time():
    times = times_of_known_factors()
    times.loc[7, "least_s"] *= 5
    found, _ = analyse(times)
    others = found.drop(index=7)
    np.testing.assert_allclose(others["fitted_s"], others["least_s"], rtol=0.01)
    assert set(found["name"]) == {"", "nt3", "p1b3, first", "p1b3, second"}


def test_the_benchmarks_own_convolutions_are_not_fitted_to():
    fitted = {(of.taps, of.channels, of.filters, of.length) for of in fitted_set()}
    assert not fitted & {(of.taps, of.channels, of.filters, of.length) for of in held_out_set()}
    assert fitted_set() == fitted_set()  # the same every time
    assert {name for of in fitted_set() for name in of.algorithms} == set(FACTORS)


def test_the_factors_in_use_follow_from_the_stored_times():
    """What docs/performance.md says of the fit is printed from this file, too."""
    found, factors = analyse(pd.read_csv(STORED))
    for name, used in FACTORS.items():
        assert factors[name] == pytest.approx(used, rel=0.01, abs=0.01)
    chosen = found[found["algorithm"] == found["chosen"]]
    assert (chosen["loss"] == 0).mean() >= 0.85
    held_out = found[(found["name"] != "") & found["algorithm"].isin(["plain"])]
    held_out = pd.concat([held_out, chosen[chosen["name"] != ""]])
    np.testing.assert_allclose(held_out["predicted_s"], held_out["least_s"], rtol=0.2)


def test_what_was_timed_is_written_and_read_again(monkeypatch, tmp_path):
    monkeypatch.setattr(convolutions, "measure", lambda num_calls: times_of_known_factors())
    file = str(tmp_path / "times.csv")
    measured, again = (
        CliRunner().invoke(convolutions.main, words)
        for words in (["--csv", file], ["--times", file])
    )
    assert measured.exit_code == again.exit_code == 0, measured.output
    assert measured.output == again.output
    assert "kernel_gradient_flop" in again.output


@pytest.mark.parametrize(
    "of",
    [
        Convolution(400, 5, 3, 6, 4, 2, gives_gradient=True),
        Convolution(400, 5, 32, 32, 4, 2, 7),
        Convolution(400, 3, 1, 6, 1, 3),
    ],
)
def test_all_algorithms_that_are_timed_compute_the_same(of):
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "tensorflow":
        pytest.skip(NEEDS_HOROVOD)
    from candle_p1.models.fast.convolution_steps import step_of

    first, *others = ([each.numpy() for each in step_of(name, of)()] for name in of.algorithms)
    assert len(first) == 2 * len(of.separate) + of.gives_gradient
    for found in others:
        for one, other in zip(found, first, strict=True):
            assert np.abs(one - other).max() <= 2e-5 * np.abs(other).max()
