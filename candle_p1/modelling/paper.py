"""A model of the paper's runs on Summit, from the numbers that the paper prints and nothing else.

A run takes the time of loading, the broadcast overhead, its epochs, and a rest: start-up,
preprocessing, evaluation. What the paper prints can be read in several ways, and some of it is
missing; every combination of readings is a sample, of which the first is the one that this module
calls usual. docs/modelling.md lists them. No reading was chosen by the gains that are predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import log2
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from candle_p1.errors import ModelError
from candle_p1.modelling.phases import COMPUTE, EXPOSED, LOAD, REST, WAIT
from candle_p1.modelling.samples import TimeSamples

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.float64]

ORIGINAL, CHUNKED = "original", "chunked"
STRONG, WEAK = "strong", "weak"

ROUNDED_UP = 0.5
""""More than 3 times" may be anything below 3.5 times, which would round to 4."""


@dataclass(frozen=True)
class LoadingTimes:
    """The seconds of loading all files of a benchmark, one process alone, by loader (Table 3)."""

    original: float
    chunked: float

    def of(self, loader: str) -> float:
        """Returns those of a loader."""
        return self.original if loader == ORIGINAL else self.chunked


@dataclass(frozen=True)
class PaperInputs:
    """What the paper prints about a benchmark on Summit, and about NT3, of which it prints most.

    Attributes:
        benchmark: Its name.
        loading: Loading in one process.
        epochs: The epochs of all ranks together, under strong scaling.
        weak_epochs: Those of each rank, under weak scaling.
        weak_gains: The smallest and the largest gain in time under weak scaling, in percent.
        most_ranks: The largest number of ranks under weak scaling.
        nt3: The same of NT3; None for NT3 itself.
        epochs_s: NT3's time per epoch, by number of ranks.
        at_least: The number of ranks for which that is a lower bound ("more than 3 times").
        loading_in_job_s: NT3's time of loading in a job, with the original loader.
        broadcasts_s: NT3's broadcast overhead, by number of ranks and loader.
    """

    benchmark: str
    loading: LoadingTimes
    epochs: int
    weak_epochs: int
    weak_gains: tuple[float, float]
    most_ranks: int
    nt3: PaperInputs | None = None
    epochs_s: Mapping[int, float] | None = None
    at_least: int = 0
    loading_in_job_s: float = 0.0
    broadcasts_s: Mapping[int, LoadingTimes] | None = None


class Reading(NamedTuple):
    """One way of reading what the paper prints, and of supplying what it does not.

    Attributes:
        loading: "alone" if the 153 s are of loading, "all" if they include the broadcast.
        last_epoch: "least" if NT3's last time per epoch is 3 times the first, "most" if 3.5 times.
        broadcast: "nearest" for the printed number of ranks that is nearest, else "other".
        rest: "usual", or "none", or for benchmarks other than NT3 "all" of the time at the least
            scale that is neither loading nor broadcast.
        between: How times per epoch go from one printed number of ranks to the next: "log", or
            as at the "fewer" or the "more" of both.
    """

    loading: str
    last_epoch: str
    broadcast: str
    rest: str
    between: str


READINGS = {
    "loading": ("alone", "all"),
    "last_epoch": ("least", "most"),
    "broadcast": ("nearest", "other"),
    "rest": ("usual", "none", "all"),
    "between": ("log", "fewer", "more"),
}
"""All readings; the usual one comes first."""


class _Times(NamedTuple):
    """The seconds of one run, by phase."""

    load: float
    broadcast: float
    compute: float
    communicate: float
    rest: float


class PaperModel:
    """A model of one benchmark's runs on Summit.

    Args:
        inputs: What the paper prints.
        mode: strong or weak.
        epochs: The epochs of all ranks together (strong) or of each rank (weak), if they are not
            the paper's.
        epochs_per_rank: The epochs of each rank, in either mode.
        file_system: How many times as fast the file system is.
        network: How many times as fast the network is.
    """

    def __init__(
        self,
        inputs: PaperInputs,
        mode: str,
        *,
        epochs: int | None = None,
        epochs_per_rank: int | None = None,
        file_system: float = 1.0,
        network: float = 1.0,
    ) -> None:
        self.inputs, self.mode = inputs, mode
        self._epochs = epochs or (inputs.epochs if mode == STRONG else inputs.weak_epochs)
        self._epochs_per_rank = epochs_per_rank
        self._file_system, self._network = file_system, network
        self.readings = [Reading(*each) for each in product(*READINGS.values())]

    @property
    def is_strong(self) -> bool:
        """Whether ideal scaling divides the time by the ranks."""
        return self.mode == STRONG and self._epochs_per_rank is None

    def can_run(self, num_ranks: int) -> bool:
        """Returns whether all ranks can have the same number of epochs, and at least one."""
        return not self.is_strong or self._epochs % num_ranks == 0

    def epochs_of(self, num_ranks: int) -> int:
        """Returns the epochs of each rank, rounded up."""
        if self._epochs_per_rank is not None:
            return self._epochs_per_rank
        return -(-self._epochs // num_ranks) if self.mode == STRONG else self._epochs

    def samples(self, loader: str, num_ranks: int) -> TimeSamples:
        """Returns the times of runs with a loader, one for each reading.

        Raises:
            ModelError: A reading contradicts itself, so that the published values were changed.
        """
        found = [self._times(loader, num_ranks, each) for each in self.readings]
        names = (LOAD, WAIT, COMPUTE, EXPOSED, REST)
        phases = {name: np.array([each[i] for each in found]) for i, name in enumerate(names)}
        extrapolation = max(1.0, num_ranks / self.inputs.most_ranks)
        return TimeSamples(num_ranks, phases, None, extrapolation)

    def rest_s(self) -> Array:
        """Returns the rest of every reading, in s."""
        return np.array([_rest_s(self.inputs, each) for each in self.readings])

    def _times(self, loader: str, num_ranks: int, reading: Reading) -> _Times:
        inputs = self.inputs
        load_s, broadcast_s = _loading(inputs, loader, num_ranks, reading)
        alone_s = inputs.loading.of(loader)
        # Of the time in one process nobody knows what the file system takes, so what a job takes
        # in addition is all that a faster file system shortens.
        in_job_s = load_s
        load_s = alone_s + (load_s - alone_s) / self._file_system
        broadcast_s *= load_s / in_job_s
        first_s = _epoch_s(inputs, 1, reading)
        epoch_s = _epoch_s(inputs, num_ranks, reading)
        epochs = self.epochs_of(num_ranks)
        grown_s = (epoch_s - first_s) / self._network
        return _Times(
            load_s,
            broadcast_s,
            epochs * first_s,
            epochs * grown_s,
            _rest_s(inputs, reading),
        )


def _loading(
    inputs: PaperInputs, loader: str, num_ranks: int, reading: Reading
) -> tuple[float, float]:
    """Returns the seconds of loading and of the broadcast overhead."""
    nt3 = inputs.nt3 or inputs
    alone_s = inputs.loading.of(loader)
    if num_ranks == 1:
        return alone_s, 0.0
    broadcasts_s = nt3.broadcasts_s or {}
    printed = sorted(broadcasts_s, key=lambda ranks: abs(log2(ranks / num_ranks)))
    overhead_s = broadcasts_s[printed[0 if reading.broadcast == "nearest" else -1]]
    in_job_s = nt3.loading_in_job_s
    if reading.loading == "all":
        # NT3's overhead was printed for the run of which the 153 s are, the first of both.
        in_job_s -= broadcasts_s[min(broadcasts_s)].original
    factor = in_job_s / nt3.loading.original
    # The overhead is waiting for the slowest loader, so it goes with the time of loading.
    share = overhead_s.of(loader) / (factor * nt3.loading.of(loader))
    return factor * alone_s, share * factor * alone_s


def _rest_s(inputs: PaperInputs, reading: Reading) -> float:
    """Returns the seconds that are neither loading nor broadcast nor epochs.

    They follow from NT3's largest gain under weak scaling, which is that on the fewest ranks, where
    an epoch takes as long as on one.
    """
    if reading.rest == "none":
        return 0.0
    if inputs.nt3 is None:
        return max(0.0, _left_s(inputs, max(inputs.weak_gains), reading) - _nt3_epochs_s(inputs))
    left_s = _left_s(inputs, max(inputs.weak_gains), reading)
    return left_s if reading.rest == "all" else min(left_s, _rest_s(inputs.nt3, reading))


def _nt3_epochs_s(inputs: PaperInputs) -> float:
    return inputs.weak_epochs * (inputs.epochs_s or {})[1]


def _left_s(inputs: PaperInputs, gain: float, reading: Reading) -> float:
    """Returns the seconds of epochs and rest with which loading faster gains so much, in percent.

    (load + broadcast)(original) - (load + broadcast)(chunked) = gain (that of original + left).
    """
    broadcasts = (inputs.nt3 or inputs).broadcasts_s or {}
    num_ranks = max(broadcasts)  # of the two, that under weak scaling
    before_s = sum(_loading(inputs, ORIGINAL, num_ranks, reading))
    after_s = sum(_loading(inputs, CHUNKED, num_ranks, reading))
    return max(0.0, (before_s - after_s) / (gain / 100) - before_s)


def _epoch_s(inputs: PaperInputs, num_ranks: int, reading: Reading) -> float:
    """Returns the seconds of an epoch."""
    if inputs.nt3 is None:
        return _nt3_epoch_s(inputs, num_ranks, reading)
    # The paper prints no time per epoch, so those on the fewest and the most ranks follow from the
    # gains there, and those between have the shape of NT3's.
    rest_s = _rest_s(inputs, reading)
    first_s, last_s = (
        max(0.0, _left_s(inputs, gain, reading) - rest_s) / inputs.weak_epochs
        for gain in sorted(inputs.weak_gains, reverse=True)
    )
    shape = [_nt3_epoch_s(inputs.nt3, num, reading) for num in (1, num_ranks, inputs.most_ranks)]
    return first_s + (last_s - first_s) * (shape[1] - shape[0]) / (shape[2] - shape[0])


def _nt3_epoch_s(inputs: PaperInputs, num_ranks: int, reading: Reading) -> float:
    printed = dict(inputs.epochs_s or {})
    if reading.last_epoch == "most":
        printed[inputs.at_least] += ROUNDED_UP * printed[1]
    counts = sorted(printed)
    if num_ranks not in printed and num_ranks < counts[-1]:
        if reading.between == "fewer":
            num_ranks = max(each for each in counts if each < num_ranks)
        elif reading.between == "more":
            num_ranks = min(each for each in counts if each > num_ranks)
    if num_ranks > counts[-1]:
        # As between the last two.
        (x0, x1), (y0, y1) = counts[-2:], (printed[each] for each in counts[-2:])
        return y1 + (y1 - y0) * log2(num_ranks / x1) / log2(x1 / x0)
    xs: Sequence[float] = [log2(each) for each in counts]
    return float(np.interp(log2(num_ranks), xs, [printed[each] for each in counts]))


def check_inputs(inputs: PaperInputs) -> None:
    """Checks that the published values have what the model needs.

    Raises:
        ModelError: Something is missing.
    """
    nt3 = inputs.nt3 or inputs
    missing = [
        name
        for name, there in {
            "broadcast overheads": nt3.broadcasts_s,
            "times per epoch": nt3.epochs_s,
            "the time of loading in a job": nt3.loading_in_job_s,
        }.items()
        if not there
    ]
    if missing:
        raise ModelError(f"the published values have no {', '.join(missing)} of NT3 on Summit")
