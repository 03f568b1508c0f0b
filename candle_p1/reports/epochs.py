"""Accuracy or loss by the epochs that each rank trains, and where it becomes worse."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from candle_p1.parameters.catalog import role_of
from candle_p1.parameters.parameter import Role
from candle_p1.reports.points import RANKS_PER_NODE, THREADS, describe
from candle_p1.reports.runs import HOROVOD
from candle_p1.reports.statistics import estimate_difference

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from candle_p1.reports.points import Experiment
    from candle_p1.reports.quantities import Quantity
    from candle_p1.reports.runs import RecordedRun
    from candle_p1.reports.statistics import Estimate

NOT_ABOUT_QUALITY = ("staged", THREADS, RANKS_PER_NODE)
"""Settings, besides parameters for speed, in which runs may differ and still learn the same."""

MATERIAL = 0.05
"""The change of an accuracy, or of a loss relative to its value, that counts as a fall."""


@dataclass(frozen=True)
class EpochGroup:
    """Runs that differ only in epochs per rank, ranks, and what does not affect quality.

    Attributes:
        name: What distinguishes them from other groups; "" where there is only one group.
        by_epochs: Values of a quantity by epochs per rank, and within that by number of ranks.
    """

    name: str
    by_epochs: Mapping[int, Mapping[int, list[float]]]

    def values(self, epochs: int) -> list[float]:
        """Returns the values for a number of epochs per rank, over all numbers of ranks."""
        return [value for values in self.by_epochs[epochs].values() for value in values]


def about_quality(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that affect what a run learns."""
    return {
        name: value
        for name, value in settings.items()
        if role_of(name) is not Role.SPEED
        and name not in NOT_ABOUT_QUALITY
        and not name.startswith(HOROVOD)
    }


def of_each_seed(runs: Iterable[RecordedRun], quantity: Quantity) -> list[float]:
    """Returns one value per seed for runs that learn the same, the median where there are several.

    Runs with the same seed have the same initial weights and orders of samples, so their values
    differ only by rounding: they are not independent repeats.
    """
    values: dict[Any, list[float]] = defaultdict(list)
    for run in {run.path: run for run in runs}.values():
        value = quantity.of(run)
        if value is not None:
            values[run.path if run.seed is None else run.seed].append(value)
    return [median(same) for same in values.values()]


def epoch_groups(experiment: Experiment, quantity: Quantity) -> list[EpochGroup]:
    """Returns the groups of an experiment, each by ascending epochs per rank."""
    found: dict[str, dict[int, dict[int, list[RecordedRun]]]] = {}
    for series in experiment.series:
        settings = about_quality(series.settings)
        name = describe({key: value for key, value in settings.items() if key != "epochs"})
        for point in series.timed:
            for run in point.runs:
                if quantity.of(run) is not None and run.epochs_per_rank is not None:
                    by_ranks = found.setdefault(name, {}).setdefault(run.epochs_per_rank, {})
                    by_ranks.setdefault(run.num_ranks, []).append(run)
    return [
        EpochGroup(
            name,
            {
                epochs: {
                    num_ranks: of_each_seed(runs, quantity)
                    for num_ranks, runs in by_epochs[epochs].items()
                }
                for epochs in sorted(by_epochs)
            },
        )
        for name, by_epochs in found.items()
    ]


@dataclass(frozen=True)
class Fall:
    """How quality at a number of epochs per rank compares with that at enough of them.

    Attributes:
        epochs: Epochs per rank.
        difference: The value there minus that at enough epochs.
        material: Whether it is worse by MATERIAL or more and the 95 % interval excludes 0.
        excluded: Whether the 95 % interval rules out that it is worse by MATERIAL or more.
    """

    epochs: int
    difference: Estimate
    material: bool
    excluded: bool


def falls(group: EpochGroup, enough: int, more_is_better: bool) -> list[Fall]:
    """Returns how quality compares at each number of epochs below `enough`, the largest first.

    Returns:
        [] where no run trained `enough` epochs per rank or more, or none trained fewer.
    """
    reference = [v for epochs in group.by_epochs if epochs >= enough for v in group.values(epochs)]
    if not reference:
        return []
    counts = MATERIAL if more_is_better else MATERIAL * median(reference)
    found = []
    for epochs in sorted(group.by_epochs, reverse=True):
        if epochs < enough:
            difference = estimate_difference(group.values(epochs), reference)
            worsening = difference.map(lambda v: -v) if more_is_better else difference
            material = difference.excludes(0) and worsening.value >= counts
            excluded = difference.is_confident and worsening.high < counts
            found.append(Fall(epochs, difference, material, excluded))
    return found
