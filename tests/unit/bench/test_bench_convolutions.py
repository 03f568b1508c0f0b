"""candle-p1 bench conv: what is timed, and what is fitted to it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from candle_p1.bench import convolutions, show_convolutions
from candle_p1.bench.convolutions import (
    ConvolutionMeasurement,
    ConvolutionOutcome,
    TimedConvolution,
    fit,
    fitted_set,
    held_out_set,
)
from candle_p1.errors import DataError
from candle_p1.models.fast.convolution_costs import FACTORS, FORMS, Convolution, Rates, seconds
from tests.conftest import NEEDS_HOROVOD, ROOT

STORED = ROOT / "tests/files/convolution_times.json"

KNOWN = {
    form: {name: 0.5 + 0.25 * number for number, name in enumerate(sorted(factors))}
    for form, factors in FACTORS.items()
}
RATES = [Rates(400e9, 50e9), Rates(200e9, 30e9)]
"""The machine's rates change while it is timed."""


def run_of_known_factors(job, num_ranks):
    """Takes exactly the times of known factors."""
    times = []
    for number, of in enumerate(job.convolutions):
        rates = RATES[number % 2]
        forms_s = {form: seconds(form, of, rates, KNOWN) for form in of.forms}
        times.append(TimedConvolution(rates, forms_s))
    return [ConvolutionOutcome(2, times)]


@pytest.fixture
def report(monkeypatch):
    monkeypatch.setattr(convolutions, "run", run_of_known_factors)
    return ConvolutionMeasurement().measure(lambda *progress: None)


def test_known_factors_are_found_again(report):
    for form in FORMS:
        assert report["median_error"][form] < 1e-6
    held_out = [each for each in report["results"] if each["name"]]
    assert [each["name"] for each in held_out] == list(held_out_set())
    for each in held_out:
        for found in each["forms"].values():
            assert found["fitted_s"] == pytest.approx(found["least_s"], rel=1e-3)


def test_the_benchmarks_own_convolutions_are_not_fitted_to():
    fitted = {(of.taps, of.channels, of.filters, of.length) for of in fitted_set()}
    held_out = {(of.taps, of.channels, of.filters, of.length) for of in held_out_set().values()}
    assert not fitted & held_out
    assert fitted_set() == fitted_set()  # the same every time
    assert {form for of in fitted_set() for form in of.forms} == set(FORMS)


def test_the_tables_show_times_factors_and_choices(report):
    shown = list(show_convolutions.parts(report))
    fitted, held_out, factors = (part for part in shown if not isinstance(part, str))
    assert fitted.row_count == len(fitted_set())
    assert held_out.row_count == len(held_out_set())
    assert factors.row_count == sum(map(len, FACTORS.values()))


@pytest.mark.parametrize(
    "of",
    [
        Convolution(400, 5, 3, 6, 4, 2, gives_gradient=True),
        Convolution(400, 5, 32, 32, 4, 2, 7),
        Convolution(400, 3, 1, 6, 1, 3),
    ],
)
def test_all_forms_that_are_timed_compute_the_same(of):
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "tensorflow":
        pytest.skip(NEEDS_HOROVOD)
    from candle_p1.models.fast.convolution_steps import step_of

    first, *others = ([each.numpy() for each in step_of(form, of)()] for form in of.forms)
    assert len(first) == 2 * len(of.separate) + of.gives_gradient
    for found in others:
        for one, other in zip(found, first, strict=True):
            assert np.abs(one - other).max() <= 2e-5 * np.abs(other).max()


def test_a_disturbed_time_does_not_change_what_is_fitted():
    measured = [
        ("direct", of, RATES[0], seconds("direct", of, RATES[0], KNOWN))
        for of in fitted_set()
        if "direct" in of.forms
    ]
    form, of, rates, time_s = measured[3]
    measured[3] = (form, of, rates, 5 * time_s)
    found = fit(measured)
    for form, of, rates, time_s in (*measured[:3], *measured[4:]):
        assert seconds(form, of, rates, found) == pytest.approx(time_s, rel=0.01)


def test_the_factors_in_use_follow_from_the_stored_times():
    """What docs/performance.md says of the fit is printed from this file, too."""
    report = ConvolutionMeasurement(times=STORED).measure(lambda *progress: None)
    for form, factors in FACTORS.items():
        assert report["fitted_factors"][form] == pytest.approx(factors, rel=0.01, abs=0.01)
    assert max(report["median_error"].values()) < 0.15
    chosen = [each["chosen"] == each["fastest"] for each in report["results"]]
    assert sum(chosen) >= 0.85 * len(chosen)
    for each in report["results"]:
        if each["name"]:
            own = each["forms"][each["chosen"]]
            assert own["predicted_s"] == pytest.approx(own["least_s"], rel=0.2)
            plain = each["forms"]["plain"]
            assert plain["predicted_s"] == pytest.approx(plain["least_s"], rel=0.2)


@pytest.mark.parametrize("text", ["", "[]", '{"threads": 2, "results": []}'])
def test_a_file_of_other_times_is_refused(tmp_path, text):
    file = tmp_path / "times.json"
    file.write_text(text)
    with pytest.raises(DataError, match="bench conv --json"):
        convolutions.read_outcome(file)


def test_what_is_written_can_be_read_again(report, tmp_path):
    file = tmp_path / "times.json"
    file.write_text(json.dumps(report))
    again = convolutions.report(convolutions.read_outcome(file))
    assert again["fitted_factors"] == report["fitted_factors"]
