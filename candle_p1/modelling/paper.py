"""A model of the paper's runs on Summit, from the numbers that the paper prints and nothing else.

A run takes the time of loading, the broadcast overhead, its epochs, and a rest: start-up,
preprocessing, evaluation. What the paper prints can be read in several ways, and some of it is
missing; every combination of readings is a sample, of which the first is the one that this module
calls usual. READINGS and the command's output list them. No reading was chosen by the gains that
are predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from math import log2
from typing import NamedTuple

import numpy as np

from candle_p1.errors import ParameterError
from candle_p1.modelling.forecast import Changes, ForecastSource
from candle_p1.modelling.laws import COMPUTE, EXPOSED, LOAD, REST, WAIT
from candle_p1.modelling.samples import TimeSamples

ROUNDED_UP = 0.5
""""More than 3 times" may be anything below 3.5 times, which would round to 4."""


class LoaderTimes(NamedTuple):
    """Seconds by loader: that of the benchmarks, and the paper's own method."""

    original: float
    chunked: float


@dataclass(frozen=True)
class PaperInputs:
    """What the paper prints about a benchmark on Summit, and about NT3, of which it prints most."""

    # the seconds of loading all files in one process alone, by loader (Table 3)
    loading: LoaderTimes
    epochs: int  # the epochs of all ranks together, under strong scaling
    weak_epochs: int  # those of each rank, under weak scaling
    # the smallest and the largest gain in time under weak scaling, in percent
    weak_gains: tuple[float, float]
    most_ranks: int  # the largest number of ranks under weak scaling
    nt3: PaperInputs | None = None  # the same of NT3; None for NT3 itself
    # NT3's time per epoch, by number of ranks
    epochs_s: Mapping[int, float] = field(default_factory=dict)
    at_least: int = 0  # the number of ranks for which that is a lower bound ("more than 3 times")
    loading_in_job_s: float = 0.0  # NT3's time of loading in a job, with the original loader
    # NT3's broadcast overhead by loader, by number of ranks
    broadcasts_s: Mapping[int, LoaderTimes] = field(default_factory=dict)


class Reading(NamedTuple):
    """One way of reading what the paper prints, and of supplying what it does not."""

    loading: str
    last_epoch: str
    broadcast: str
    rest: str
    between: str


READINGS = [
    Reading(*each)
    for each in product(
        ("alone", "all"),  # the 153 s are of loading, or include the broadcast
        ("least", "most"),  # NT3's last time per epoch is 3 or 3.5 times the first
        ("nearest", "other"),  # the printed number of ranks whose broadcast stands for others
        ("usual", "none", "all"),  # the rest; "all" is the time left at the least scale
        ("log", "fewer", "more"),  # between two printed numbers of ranks, epochs are as at these
    )
]
"""All readings; the usual one comes first."""


def paper_source(inputs: PaperInputs, mode: str, loader: str, changes: Changes) -> ForecastSource:
    """Returns what predicts the paper's runs on Summit, with a sample for each reading.

    The mode is strong or weak, and the loader original or chunked.

    Raises:
        ParameterError: The paper prints nothing about what is changed.
    """
    if changes.batch_size is not None:
        raise ParameterError(
            "--set batch_size: the paper prints no times for other batch sizes; give runs with"
            " --from"
        )
    shared = mode == "strong" and changes.epochs_per_rank is None
    epochs = changes.epochs or (inputs.epochs if mode == "strong" else inputs.weak_epochs)

    def samples(num_ranks: int) -> TimeSamples:
        each_rank = changes.epochs_per_rank or (-(-epochs // num_ranks) if shared else epochs)
        found = [_times_s(inputs, loader, num_ranks, each_rank, changes, r) for r in READINGS]
        times = {phase: np.array([each[phase] for each in found]) for phase in found[0]}
        return TimeSamples(num_ranks, times, None, max(1.0, num_ranks / inputs.most_ranks))

    return ForecastSource(
        samples,
        lambda num_ranks: not shared or epochs % num_ranks == 0,
        shared,
        confidence=None,
    )


def _times_s(
    inputs: PaperInputs,
    loader: str,
    num_ranks: int,
    epochs: int,
    changes: Changes,
    reading: Reading,
) -> dict[str, float]:
    in_job_s, broadcast_s = _loading_s(inputs, loader, num_ranks, reading)
    # It is unknown what the file system takes of the time in one process, so what a job takes in
    # addition is all that a faster file system shortens.
    alone_s: float = getattr(inputs.loading, loader)
    load_s = alone_s + (in_job_s - alone_s) / changes.file_system
    first_s = _epoch_s(inputs, 1, reading)
    grown_s = (_epoch_s(inputs, num_ranks, reading) - first_s) / changes.network
    return {
        LOAD: load_s,
        WAIT: broadcast_s * load_s / in_job_s,
        COMPUTE: epochs * first_s,
        EXPOSED: epochs * grown_s,
        REST: rest_s(inputs, reading),
    }


def _loading_s(
    inputs: PaperInputs, loader: str, num_ranks: int, reading: Reading
) -> tuple[float, float]:
    """Returns the seconds of loading and of the broadcast overhead."""
    nt3 = inputs.nt3 or inputs
    alone_s: float = getattr(inputs.loading, loader)
    if num_ranks == 1:
        return alone_s, 0.0
    printed = sorted(nt3.broadcasts_s, key=lambda ranks: abs(log2(ranks / num_ranks)))
    overhead_s = nt3.broadcasts_s[printed[0 if reading.broadcast == "nearest" else -1]]
    in_job_s = nt3.loading_in_job_s
    if reading.loading == "all":
        # NT3's overhead was printed for the run of which the 153 s are, the first of both.
        in_job_s -= nt3.broadcasts_s[min(nt3.broadcasts_s)].original
    factor = in_job_s / nt3.loading.original
    # The overhead is waiting for the slowest loader, so it goes with the time of loading.
    share = getattr(overhead_s, loader) / (factor * getattr(nt3.loading, loader))
    return factor * alone_s, share * factor * alone_s


def rest_s(inputs: PaperInputs, reading: Reading) -> float:
    """Returns the seconds that are neither loading nor broadcast nor epochs.

    They follow from NT3's largest gain under weak scaling, which is that on the fewest ranks, where
    an epoch takes as long as on one.
    """
    if reading.rest == "none":
        return 0.0
    left_s = _left_s(inputs, max(inputs.weak_gains), reading)
    if inputs.nt3 is None:
        return max(0.0, left_s - inputs.weak_epochs * inputs.epochs_s[1])
    return left_s if reading.rest == "all" else min(left_s, rest_s(inputs.nt3, reading))


def _left_s(inputs: PaperInputs, gain: float, reading: Reading) -> float:
    """Returns the seconds of epochs and rest with which loading faster gains so much, in percent.

    (load + broadcast)(original) - (load + broadcast)(chunked) = gain (that of original + left).
    """
    num_ranks = max((inputs.nt3 or inputs).broadcasts_s)  # of the two, that under weak scaling
    before_s, after_s = (
        sum(_loading_s(inputs, loader, num_ranks, reading)) for loader in LoaderTimes._fields
    )
    return max(0.0, (before_s - after_s) / (gain / 100) - before_s)


def _epoch_s(inputs: PaperInputs, num_ranks: int, reading: Reading) -> float:
    if inputs.nt3 is None:
        return _nt3_epoch_s(inputs, num_ranks, reading)
    # The paper prints no time per epoch, so those on the fewest and the most ranks follow from the
    # gains there, and those between have the shape of NT3's.
    others_s = rest_s(inputs, reading)
    first_s, last_s = (
        max(0.0, _left_s(inputs, gain, reading) - others_s) / inputs.weak_epochs
        for gain in sorted(inputs.weak_gains, reverse=True)
    )
    least, here, most = (
        _nt3_epoch_s(inputs.nt3, num, reading) for num in (1, num_ranks, inputs.most_ranks)
    )
    return first_s + (last_s - first_s) * (here - least) / (most - least)


def _nt3_epoch_s(inputs: PaperInputs, num_ranks: int, reading: Reading) -> float:
    printed = dict(inputs.epochs_s)
    if reading.last_epoch == "most":
        printed[inputs.at_least] += ROUNDED_UP * printed[1]
    counts = sorted(printed)
    if num_ranks > counts[-1]:
        # As between the last two.
        (x0, x1), (y0, y1) = counts[-2:], (printed[each] for each in counts[-2:])
        return y1 + (y1 - y0) * log2(num_ranks / x1) / log2(x1 / x0)
    if reading.between == "fewer":
        num_ranks = max(each for each in counts if each <= num_ranks)
    elif reading.between == "more":
        num_ranks = min(each for each in counts if each >= num_ranks)
    xs = [log2(each) for each in counts]
    return float(np.interp(log2(num_ranks), xs, [printed[each] for each in counts]))
