"""Forecasts: time, energy, efficiency and gains at sizes that need not have run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from candle_p1.errors import ModelError, ParameterError
from candle_p1.modelling.paper import PaperModel
from candle_p1.modelling.samples import PREDICTION_CONFIDENCE, TimeSamples, ValueInterval

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from candle_p1.modelling.changes import Changes
    from candle_p1.modelling.model import RunModel
    from candle_p1.modelling.paper import PaperInputs
    from candle_p1.modelling.shape import ShapeRule

    Array = NDArray[np.float64]

EFFICIENT = 0.70
"""What a scale holds whose scaling efficiency is said to be enough."""

MOST_RANKS = 10**6


class ForecastSource(Protocol):
    """What predicts the times of a series of runs."""

    @property
    def confidence(self) -> float | None:
        """That of its intervals; None if they are spans of readings."""

    @property
    def is_strong(self) -> bool:
        """Whether ideal scaling divides the time by the ranks."""

    @property
    def has_ideal(self) -> bool:
        """Whether there is ideal scaling: not where batches grow with the ranks."""

    @property
    def base_ranks(self) -> int:
        """The number of ranks that efficiencies compare with."""

    def can_run(self, num_ranks: int) -> bool:
        """Returns whether there can be such a run."""

    def samples(self, num_ranks: int) -> TimeSamples:
        """Returns the times of runs on some ranks."""


@dataclass(frozen=True)
class RecordSource:
    """Predicts by a model that was fitted to records.

    Attributes:
        model: The model.
        rule: The shapes of its runs.
        changes: What is changed.
    """

    model: RunModel
    rule: ShapeRule
    changes: Changes

    confidence = PREDICTION_CONFIDENCE

    @property
    def is_strong(self) -> bool:
        """Whether ranks share the work."""
        return self.changes.apply_to(self.rule).is_strong

    @property
    def has_ideal(self) -> bool:
        """Whether batches stay as they are."""
        return self.rule.batch_scaling == "none"

    @property
    def base_ranks(self) -> int:
        """The smallest number of ranks that was measured."""
        return self.model.rank_counts[0]

    @property
    def reading_share(self) -> float | None:
        """The share of loading that is waiting for files; None where nobody knows."""
        shares = [each.reading_share for each in self.model.observations]
        known = [share for share in shares if share is not None]
        return float(np.mean(known)) if known else None

    def can_run(self, num_ranks: int) -> bool:
        """Returns whether the ranks can share the epochs."""
        return self.changes.apply_to(self.rule).can_run(num_ranks)

    def samples(self, num_ranks: int) -> TimeSamples:
        """Returns the times of single runs."""
        shape = self.changes.apply_to(self.rule).at(num_ranks)
        return self.changes.apply_to_times(self.model.predict(shape), self.reading_share)


class PaperSource:
    """Predicts the paper's runs on Summit from what the paper prints.

    Args:
        inputs: What it prints.
        mode: strong or weak.
        loader: original or chunked.
        changes: What is changed.

    Raises:
        ParameterError: The paper prints nothing about what is changed.
    """

    confidence = None
    base_ranks = 1
    has_ideal = True

    def __init__(self, inputs: PaperInputs, mode: str, loader: str, changes: Changes) -> None:
        if changes.batch_size is not None:
            raise ParameterError(
                "--set batch_size: the paper prints no times for other batch sizes; give runs with"
                " --from"
            )
        self._loader = loader
        self._model = PaperModel(
            inputs,
            mode,
            epochs=changes.epochs,
            epochs_per_rank=changes.epochs_per_rank,
            file_system=changes.file_system,
            network=changes.network,
        )

    @property
    def is_strong(self) -> bool:
        """Whether ranks share the epochs."""
        return self._model.is_strong

    def can_run(self, num_ranks: int) -> bool:
        """Returns whether the ranks can share the epochs."""
        return self._model.can_run(num_ranks)

    def samples(self, num_ranks: int) -> TimeSamples:
        """Returns the times of a run, one for each reading."""
        return self._model.samples(self._loader, num_ranks)


@dataclass(frozen=True)
class ForecastPoint:
    """A forecast for one series on some ranks.

    Attributes:
        series: The name of the series.
        num_ranks: The number of ranks.
        can_run: Whether the ranks can have equal numbers of epochs.
        time_s: The time of a run, in s.
        energy_j: Its energy, in J; None where no power is known.
        efficiency: The scaling efficiency, against the smallest number of ranks; None where
            batches grow with the ranks, for which there is no ideal.
        gain: By how much its time is less than that of the base series, in percent; None for that.
        energy_gain: Likewise for the energy.
        shares: The share of each phase in the time.
        extrapolation: By which factor the ranks are outside those that are known.
    """

    series: str
    num_ranks: int
    can_run: bool
    time_s: ValueInterval
    energy_j: ValueInterval | None
    efficiency: ValueInterval | None
    gain: ValueInterval | None
    energy_gain: ValueInterval | None
    shares: Mapping[str, float]
    extrapolation: float

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON."""
        found: dict[str, Any] = {
            "series": self.series,
            "ranks": self.num_ranks,
            "can_run": self.can_run,
            "extrapolation": self.extrapolation,
            "shares": dict(self.shares),
        }
        intervals = {
            "time_s": self.time_s,
            "energy_j": self.energy_j,
            "efficiency": self.efficiency,
            "gain_percent": self.gain,
            "energy_gain_percent": self.energy_gain,
        }
        return found | {name: _as_json(each) for name, each in intervals.items()}


@dataclass(frozen=True)
class BestScale:
    """The numbers of ranks that are best for something, of those that were searched.

    Attributes:
        series: The name of the series.
        searched: The numbers of ranks that were searched.
        efficient: The largest one with an efficiency of EFFICIENT, with its interval; None where
            there is no ideal.
        least_energy: That of the least energy; None where no power is known.
        least_energy_delay: That of the least product of energy and time, likewise.
    """

    series: str
    searched: Sequence[int]
    efficient: ValueInterval | None
    least_energy: ValueInterval | None
    least_energy_delay: ValueInterval | None

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON."""
        return {
            "series": self.series,
            "searched": list(self.searched),
            "efficient_ranks": _as_json(self.efficient),
            "least_energy_ranks": _as_json(self.least_energy),
            "least_energy_delay_ranks": _as_json(self.least_energy_delay),
        }


def _as_json(interval: ValueInterval | None) -> dict[str, float] | None:
    return interval.to_dict() if interval else None


@dataclass(frozen=True)
class Forecast:
    """What is predicted.

    Attributes:
        base: The series that gains are relative to; "" where there is only one.
        points: By series and number of ranks.
        best: The best scale of each series.
        confidence: That of the intervals; None for spans of readings.
    """

    base: str
    points: Sequence[ForecastPoint]
    best: Sequence[BestScale]
    confidence: float | None


def forecast(
    sources: Mapping[str, ForecastSource], ranks: Sequence[int], base: str = ""
) -> Forecast:
    """Returns what sources predict.

    Args:
        sources: By the names of their series; at least one.
        ranks: The numbers of ranks.
        base: The series that gains are relative to.
    """
    if not sources:
        raise ModelError("there is nothing to predict from")
    points = []
    for name, source in sources.items():
        for num_ranks in ranks:
            compared = sources.get(base) if name != base else None
            points.append(_point(name, source, num_ranks, compared))
    best = [_best(name, source, ranks) for name, source in sources.items()]
    return Forecast(base, points, best, next(iter(sources.values())).confidence)


def _point(
    name: str, source: ForecastSource, num_ranks: int, base: ForecastSource | None
) -> ForecastPoint:
    found = source.samples(num_ranks)
    total_s, confidence = found.total_s, source.confidence

    def of(samples: Array) -> ValueInterval:
        return ValueInterval.of(samples, confidence)

    times = {name: _middle(each, confidence) for name, each in found.phases_s.items()}
    whole_s = sum(times.values())
    gain = energy_gain = None
    if base is not None:
        other = base.samples(num_ranks)
        gain = of(100 * (1 - total_s / other.total_s))
        if other.energy_j is not None and found.energy_j is not None:
            energy_gain = of(100 * (1 - found.energy_j / other.energy_j))
    return ForecastPoint(
        name,
        num_ranks,
        source.can_run(num_ranks),
        of(total_s),
        None if found.energy_j is None else of(found.energy_j),
        of(_efficiency(source, found)) if source.has_ideal else None,
        gain,
        energy_gain,
        {phase: seconds / whole_s for phase, seconds in times.items()},
        found.extrapolation,
    )


def _middle(samples: Array, confidence: float | None) -> float:
    return float(samples[0] if confidence is None else np.median(samples))


def _efficiency(source: ForecastSource, found: TimeSamples) -> Array:
    """Returns T(base) / T(P), divided by P / base where the ranks share the work."""
    factor = found.num_ranks / source.base_ranks if source.is_strong else 1.0
    efficiency: Array = source.samples(source.base_ranks).total_s / found.total_s / factor
    return efficiency


def _best(name: str, source: ForecastSource, ranks: Sequence[int]) -> BestScale:
    searched = [each for each in _grid(max(ranks), ranks) if each >= source.base_ranks]
    searched = [each for each in searched if source.can_run(each)] or [source.base_ranks]
    found = [source.samples(each) for each in searched]
    counts = np.array(searched, np.float64)
    efficient = None
    if source.has_ideal:
        enough = np.stack([_efficiency(source, each) >= EFFICIENT for each in found])
        largest = np.where(enough, counts[:, None], searched[0]).max(axis=0)
        efficient = _counted(largest, source.confidence)
    energies = [each.energy_j for each in found if each.energy_j is not None]
    least = least_product = None
    if len(energies) == len(found):
        energy_j = np.stack(energies)
        total_s = np.stack([each.total_s for each in found])
        least = _counted(counts[energy_j.argmin(axis=0)], source.confidence)
        least_product = _counted(counts[(energy_j * total_s).argmin(axis=0)], source.confidence)
    return BestScale(name, searched, efficient, least, least_product)


def _counted(samples: Array, confidence: float | None) -> ValueInterval:
    """Returns an interval whose ends are numbers of ranks that were searched."""
    if confidence is None:
        return ValueInterval.of(samples, None)
    tail = 50 * (1 - confidence)
    ends = np.percentile(samples, [tail, 50, 100 - tail], method="inverted_cdf")
    return ValueInterval(float(ends[1]), float(ends[0]), float(ends[2]), confidence)


def _grid(most: int, also: Iterable[int]) -> list[int]:
    """Returns 1, 2, 3, 4, 6, 8, 12, … and some others, up to the largest of them."""
    found = set(also)
    power = 1
    while power <= most:
        found |= {each for each in (power, 3 * power) if each <= most}
        power *= 2
    return sorted(found)


def what_if(
    source_of: Callable[[Changes], Mapping[str, ForecastSource]],
    rows: Mapping[str, Changes],
    ranks: Sequence[int],
) -> list[tuple[str, ForecastPoint]]:
    """Returns the rows of a what-if table: what is changed, and a forecast.

    Args:
        source_of: Returns the sources with changes.
        rows: The changes, by their names.
        ranks: The numbers of ranks.
    """
    return [
        (name, point)
        for name, changes in rows.items()
        for point in forecast(source_of(changes), ranks).points
    ]


def parse_ranks(text: str, flag: str = "--ranks") -> list[int]:
    """Returns the numbers of ranks of a list such as ``1,2,4``, ascending.

    Args:
        text: The list.
        flag: The option that has it, for messages.

    Raises:
        ParameterError: It is not a list of possible numbers.
    """
    try:
        ranks = sorted({int(each) for each in text.split(",")})
    except ValueError as error:
        raise ParameterError(f"{flag} {text}: give numbers, such as 1,2,4") from error
    if not 1 <= ranks[0] <= ranks[-1] <= MOST_RANKS:
        raise ParameterError(f"{flag} {text}: a number of ranks is from 1 to {MOST_RANKS:,}")
    return ranks
