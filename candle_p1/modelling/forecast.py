"""Forecasts: time, energy, efficiency and gains at sizes that need not have run, and what if.

What if: a faster file system or network, other epochs or batches (``--set NAME=VALUE``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, isfinite
from typing import Any

import numpy as np

from candle_p1.errors import ParameterError, did_you_mean
from candle_p1.modelling.laws import EXPOSED, LOAD, TRANSFER, WAIT
from candle_p1.modelling.model import RunModel
from candle_p1.modelling.observations import ShapeRule
from candle_p1.modelling.samples import (
    PREDICTION_CONFIDENCE,
    Array,
    TimeSamples,
    interval_of,
)

EFFICIENT = 0.70
"""What a scale holds whose scaling efficiency is said to be enough."""

MOST = 10**6
"""No factor and no number of ranks, epochs or samples is larger."""

FACTORS = ("file_system", "network")
COUNTS = ("epochs", "epochs_per_rank", "batch_size")
"""What may be set: factors, which are 1 by default, and whole numbers."""


@dataclass(frozen=True)
class Changes:
    """What is changed; by default nothing."""

    file_system: float = 1.0  # how many times as fast files are read
    network: float = 1.0  # how many times as fast ranks communicate
    epochs: int | None = None  # of all ranks together where they share them, else of each
    epochs_per_rank: int | None = None  # of each rank, whether they are shared or not
    batch_size: int | None = None  # before it is scaled with the ranks

    @classmethod
    def parse(cls, words: Iterable[str]) -> Changes:
        """Returns the changes that ``--set`` names, such as ``network=2``.

        Raises:
            ParameterError: A name is unknown, or a value is not possible.
        """
        found: dict[str, Any] = {}
        for word in words:
            name, _, text = word.partition("=")
            known = (*FACTORS, *COUNTS)
            if name not in known:
                near = did_you_mean(name, known)
                raise ParameterError(f"--set {word}: choose one of {', '.join(known)}{near}")
            if name in found:
                raise ParameterError(f"--set {name} is given twice")
            try:
                value = float(text) if name in FACTORS else int(text)
            except ValueError as error:
                kind = "a factor, such as 2 or 0.5" if name in FACTORS else "a whole number"
                raise ParameterError(f"--set {word}: {name} takes {kind}") from error
            if not (isfinite(value) and 0 < value <= MOST):
                raise ParameterError(f"--set {word}: {name} is more than 0, and at most {MOST:,}")
            found[name] = value
        if found.keys() >= {"epochs", "epochs_per_rank"}:
            raise ParameterError("--set epochs and --set epochs_per_rank: give only one of them")
        return cls(**found)

    def __str__(self) -> str:
        factors = {name: value for name in FACTORS if (value := getattr(self, name)) != 1}
        told = [f"{name} {value:g} times as fast" for name, value in factors.items()]
        told += [f"{name} {value:,}" for name in COUNTS if (value := getattr(self, name))]
        return ", ".join(told).replace("_", " ") or "as it is"

    def apply_to(self, rule: ShapeRule) -> ShapeRule:
        """Returns the shapes of runs with other epochs and batches."""
        changes: dict[str, Any] = {}
        base = rule.base
        if self.batch_size is not None:
            steps = ceil(base.steps_per_epoch * base.batch_size / self.batch_size)
            base = replace(base, batch_size=self.batch_size, steps_per_epoch=steps)
            changes["base_batch_size"] = self.batch_size
        if self.epochs is not None:
            changes["epochs"] = self.epochs
        if self.epochs_per_rank is not None:
            changes |= {"epochs": self.epochs_per_rank, "epochs_scaling": "weak"}
        return replace(rule, base=base, plan=rule.plan.model_copy(update=changes))

    def apply_to_times(self, samples: TimeSamples, reading_share: float | None) -> TimeSamples:
        """Returns times with another file system and network.

        The reading share is that of loading in which ranks wait for the file system. None: unknown;
        sampled uniformly between 0 and 1.
        """
        if self.file_system == 1 and self.network == 1:
            return samples
        shares: Any = reading_share
        if shares is None:
            shares = np.random.default_rng(0).random(len(samples.total_s))
        slower = 1 - shares + shares / self.file_system
        # Ranks wait for the loading of others, too.
        factors = {
            LOAD: slower,
            WAIT: slower,
            EXPOSED: 1 / self.network,
            TRANSFER: 1 / self.network,
        }
        times = {name: times_s * factors.get(name, 1) for name, times_s in samples.phases_s.items()}
        return replace(samples, phases_s=times)


@dataclass(frozen=True)
class ForecastSource:
    """What predicts the times of a series of runs."""

    samples: Callable[[int], TimeSamples]  # returns the times of single runs on some ranks
    can_run: Callable[[int], bool]  # returns whether there can be such a run
    is_strong: bool  # whether ideal scaling divides the time by the ranks
    base_ranks: int = 1  # the number of ranks that efficiencies compare with
    has_ideal: bool = True  # whether there is ideal scaling: not where batches grow with the ranks
    # that of its intervals; None if they are spans of readings
    confidence: float | None = PREDICTION_CONFIDENCE

    def efficiency(self, found: TimeSamples) -> Array:
        """Returns T(base) / T(P), divided by P / base where the ranks share the work."""
        factor = found.num_ranks / self.base_ranks if self.is_strong else 1.0
        efficiency: Array = self.samples(self.base_ranks).total_s / found.total_s / factor
        return efficiency


def model_source(model: RunModel, rule: ShapeRule, changes: Changes) -> ForecastSource:
    """Returns what predicts by a model that was fitted to records."""
    shapes = changes.apply_to(rule)
    shares = [o.reading_share for o in model.observations if o.reading_share is not None]
    reading_share = float(np.mean(shares)) if shares else None
    return ForecastSource(
        lambda num: changes.apply_to_times(model.predict(shapes.at(num)), reading_share),
        shapes.can_run,
        shapes.is_strong,
        model.rank_counts[0],
        rule.plan.batch_scaling == "none",
    )


def forecast(
    sources: Mapping[str, ForecastSource], ranks: Sequence[int], base: str = ""
) -> list[dict[str, Any]]:
    """Returns what is predicted for each series, by its name, and each number of ranks.

    Gains are relative to the series `base`; "" for none.

    Returns:
        ``series``, ``ranks``, ``can_run`` (whether ranks can have equal numbers of epochs),
        ``extrapolation``, ``shares`` of the phases in the time; and with intervals ``time_s``,
        ``energy_j``, the scaling ``efficiency``, ``gain_percent``, ``energy_gain_percent``. These
        are None where no power is known, batches grow with the ranks, or there is no base.
    """
    found = []
    for name, source in sources.items():
        other = sources[base] if base and name != base else None
        found += [{"series": name} | _point(source, num, other) for num in ranks]
    return found


def _point(source: ForecastSource, num_ranks: int, base: ForecastSource | None) -> dict[str, Any]:
    found = source.samples(num_ranks)
    energy_j, gain, energy_gain = found.energy_j, None, None
    if base:
        other = base.samples(num_ranks)
        gain = 100 * (1 - found.total_s / other.total_s)
        if energy_j is not None and other.energy_j is not None:
            energy_gain = 100 * (1 - energy_j / other.energy_j)
    samples = {
        "time_s": found.total_s,
        "energy_j": energy_j,
        "efficiency": source.efficiency(found) if source.has_ideal else None,
        "gain_percent": gain,
        "energy_gain_percent": energy_gain,
    }
    phases_s = {
        phase: interval_of(each, source.confidence)["value"]
        for phase, each in found.phases_s.items()
    }
    intervals = {
        name: None if each is None else interval_of(each, source.confidence)
        for name, each in samples.items()
    }
    return {
        "ranks": num_ranks,
        **intervals,
        "extrapolation": found.extrapolation,
        "can_run": source.can_run(num_ranks),
        "shares": {phase: each / sum(phases_s.values()) for phase, each in phases_s.items()},
    }


def best_scale(name: str, source: ForecastSource, ranks: Sequence[int]) -> dict[str, Any]:
    """Returns which of 1, 2, 3, 4, 6, 8, 12, … and some other numbers of ranks are best.

    Returns:
        ``series``, ``searched``, and with intervals ``efficient_ranks``, the largest number with an
        efficiency of EFFICIENT, ``least_energy_ranks`` and ``least_energy_delay_ranks``, those of
        the least energy and the least product of energy and time; None as in `forecast`.
    """
    grid = {each << i for i in range(MOST.bit_length()) for each in (1, 3)}
    grid = {each for each in grid if each <= max(ranks)} | set(ranks)
    searched = [num for num in sorted(grid) if num >= source.base_ranks and source.can_run(num)]
    searched = searched or [source.base_ranks]
    found = [source.samples(each) for each in searched]
    counts = np.array(searched, np.float64)

    def of(samples: Array) -> dict[str, int]:  # whose ends are numbers that were searched
        found = interval_of(samples, source.confidence, "inverted_cdf")
        return {name: round(found[name]) for name in ("value", "low", "high")}

    efficient = least = least_product = None
    if source.has_ideal:
        enough = np.stack([source.efficiency(each) >= EFFICIENT for each in found])
        efficient = of(np.where(enough, counts[:, None], searched[0]).max(axis=0))
    energies = [each.energy_j for each in found if each.energy_j is not None]
    if energies:
        energy_j, total_s = np.stack(energies), np.stack([each.total_s for each in found])
        least = of(counts[energy_j.argmin(axis=0)])
        least_product = of(counts[(energy_j * total_s).argmin(axis=0)])
    return {
        "series": name,
        "searched": searched,
        "efficient_ranks": efficient,
        "least_energy_ranks": least,
        "least_energy_delay_ranks": least_product,
    }
