"""Times convolutions in each of their forms, and fits the model of their costs to the times.

The model, candle_p1.models.fast.convolution_costs, is fitted to `fitted_set`, none of which a
benchmark has, and held to `held_out_set`, which is what the benchmarks have. Of several calls the
fastest counts, and of the rates as well: what else runs on the machine only adds to times.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from candle_p1.bench.job import BareJob, OnStart, run
from candle_p1.errors import DataError
from candle_p1.models.fast.convolution_costs import (
    FACTORS,
    FORMS,
    Convolution,
    Rates,
    choose,
    ideal_seconds,
    seconds,
)
from candle_p1.records import environment
from candle_p1.records.record import utc_now

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SEED = 7
NUM_DRAWN = 26
NUM_FITS = 20
LEAST_ERROR = 0.01
"""Relative errors below this count as this much when weights follow from them."""
OUTPUT_BYTES = (40e6, 100e6)
"""The size of the outputs of what is drawn: more than caches hold."""


@dataclass(frozen=True)
class ConvolutionJob(BareJob):
    """What a job times.

    Attributes:
        convolutions: Are timed one after the other, each in all of its forms.
        num_calls: Timed calls of each.
    """

    worker: ClassVar[str] = "candle_p1.bench.convolutions_worker"

    convolutions: Sequence[Convolution]
    num_calls: int = 7

    @property
    def name(self) -> str:
        """What is timed."""
        return "convolutions"


@dataclass(frozen=True)
class TimedConvolution:
    """The times of a convolution, and the machine's rates around them.

    Attributes:
        rates: The higher ones of before and after.
        forms_s: The least time of a step by form, in s: forward and gradients.
    """

    rates: Rates
    forms_s: dict[str, float]


@dataclass(frozen=True)
class ConvolutionOutcome:
    """What a job has measured.

    Attributes:
        threads: The number of threads of an operation.
        times: Those of each convolution.
    """

    threads: int
    times: list[TimedConvolution]


def fitted_set() -> list[Convolution]:
    """Returns the convolutions to which the model is fitted.

    Some are drawn at random, some have many channels, and some of these follow a first convolution
    of one channel.
    """
    random = np.random.default_rng(SEED)

    def one_of(*values: int) -> int:
        return int(random.choice(values))

    found = []
    for number in range(NUM_DRAWN):
        is_first = number % 2 == 0
        channels = 1 if is_first else one_of(2, 4, 8, 10, 16, 24, 32, 64)
        filters = one_of(4, 6, 8, 12, 16, 20, 32, 48, 64)
        taps, pool = one_of(3, 5, 7, 8, 12, 15), one_of(1, 2, 3, 5, 8, 12)
        length = one_of(2500, 4000, 8000, 16000, 32000)
        batch = max(1, round(random.uniform(*OUTPUT_BYTES) / 4 / filters / length))
        found.append(
            Convolution(length, taps, channels, filters, pool, batch, gives_gradient=not is_first)
        )
    after_first = [
        # length, taps, channels, filters, pool, batch, taps of the first
        (8000, 6, 64, 64, 4, 6, 8),
        (16000, 12, 96, 64, 8, 3, 12),
        (32000, 8, 64, 128, 5, 2, 15),
        (48000, 10, 96, 96, 10, 1, 25),
        (24000, 14, 64, 64, 1, 4, 10),
        (4000, 5, 128, 64, 2, 16, 16),
    ]
    many_channels = [
        (50000, 8, 128, 64, 1, 1),
        (40000, 12, 64, 96, 5, 2),
        (10000, 6, 96, 64, 3, 8),
        (20000, 15, 32, 96, 8, 3),
        (24000, 5, 128, 128, 4, 2),
        (40000, 14, 128, 128, 8, 1),
    ]
    return [
        *found,
        *(Convolution(*sizes) for sizes in after_first),
        *(Convolution(*sizes, gives_gradient=True) for sizes in many_channels),
    ]


def held_out_set() -> dict[str, Convolution]:
    """Returns the convolutions of the benchmarks at full size; NT3's for a tenth of a batch."""
    return {
        "p1b3, first": Convolution(29532, 10, 1, 10, 10, 100),
        "p1b3, second": Convolution(2952, 5, 10, 5, 10, 100, gives_gradient=True),
        "nt3": Convolution(60483, 10, 128, 128, 10, 2, 20),
    }


@dataclass(frozen=True)
class ConvolutionMeasurement:
    """Times both sets.

    Attributes:
        num_calls: Timed calls of each convolution and form.
        times: A file with the times of an earlier measurement, to be used instead; None: measure.
    """

    num_calls: int = 7
    times: Path | None = None

    def measure(self, on_start: OnStart) -> dict[str, Any]:
        """Runs the job; returns what ``--json`` writes.

        Raises:
            CandleError: There are no fast forms here, or the file is wrong.
        """
        started = utc_now()
        on_start(0, 1, "convolutions")
        if self.times is not None:
            outcome = read_outcome(self.times)
        else:
            job = ConvolutionJob([*fitted_set(), *held_out_set().values()], self.num_calls)
            (outcome,) = run(job, 1)
        return report(outcome) | {
            "command": sys.argv,
            "started": started,
            "machine": environment.capture(),
        }


def read_outcome(path: Path) -> ConvolutionOutcome:
    """Returns what a job has measured, from the file that ``--json`` has written.

    Raises:
        DataError: The file cannot be read, or holds the times of other convolutions.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        names = [field.name for field in fields(Convolution)]
        measured = {
            Convolution(**{name: each[name] for name in names}): TimedConvolution(
                Rates(**each["rates"]),
                {form: float(each["forms"][form]["least_s"]) for form in each["forms"]},
            )
            for each in found["results"]
        }
        times = [measured[of] for of in (*fitted_set(), *held_out_set().values())]
        return ConvolutionOutcome(int(found["threads"]), times)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"not the times that `candle-p1 bench conv --json` writes: {error!r}", path
        ) from error


def report(outcome: ConvolutionOutcome) -> dict[str, Any]:
    """Returns the fitted factors, and how the model predicts both sets with them."""
    fitted, held_out = fitted_set(), held_out_set()
    times_of = dict(zip([*fitted, *held_out.values()], outcome.times, strict=True))
    factors = fit(
        [
            (form, of, times_of[of].rates, time_s)
            for of in fitted
            for form, time_s in times_of[of].forms_s.items()
        ]
    )
    names: dict[Convolution, str] = {of: name for name, of in held_out.items()}
    results = [
        {"name": names.get(of), **asdict(of)} | _compare(of, timed, factors)
        for of, timed in times_of.items()
    ]
    rates = [timed.rates for timed in outcome.times]
    return {
        "rates": {name: median(getattr(each, name) for each in rates) for name in asdict(rates[0])},
        "threads": outcome.threads,
        "results": results,
        "fitted_factors": factors,
        "used_factors": FACTORS,
        "median_error": {
            form: median(
                abs(each["forms"][form]["fitted_s"] / each["forms"][form]["least_s"] - 1)
                for each in results
                if each["name"] is None and form in each["forms"]
            )
            for form in FORMS
        },
    }


def fit(measured: Sequence[tuple[str, Convolution, Rates, float]]) -> dict[str, dict[str, float]]:
    """Returns the factors of each form with which the sum of the relative errors is least.

    So a time that something else has disturbed counts no more than any other.

    Args:
        measured: Forms, convolutions, the machine's rates meanwhile, and times in s.
    """
    from scipy.optimize import nnls

    factors = {}
    for form in FORMS:
        own = [(of, rates, time_s) for kind, of, rates, time_s in measured if kind == form]
        if not own:
            continue
        ideal = [ideal_seconds(form, of, rates) for of, rates, _ in own]
        times = np.array([time_s for *_, time_s in own])
        matrix = np.array([list(each.values()) for each in ideal])
        relative = matrix / times[:, np.newaxis]
        weights = np.ones(len(own))
        for _ in range(NUM_FITS):
            found, _ = nnls(relative * weights[:, np.newaxis], weights)
            # Least squares with these weights are least absolute errors.
            weights = 1 / np.sqrt(np.maximum(np.abs(relative @ found - 1), LEAST_ERROR))
        factors[form] = {name: float(f) for name, f in zip(ideal[0], found, strict=True)}
    return factors


def _compare(
    of: Convolution, timed: TimedConvolution, factors: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    forms = {
        form: {
            "least_s": time_s,
            "fitted_s": seconds(form, of, timed.rates, factors),
            "predicted_s": seconds(form, of, timed.rates, FACTORS),
        }
        for form, time_s in timed.forms_s.items()
    }
    own = {form: time_s for form, time_s in timed.forms_s.items() if form != "plain"}
    return {
        "rates": asdict(timed.rates),
        "forms": forms,
        "chosen": choose(of),
        "fastest": min(own, key=lambda form: own[form]),
    }
