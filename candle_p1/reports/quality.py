"""Accuracy or loss by the epochs that each rank trains, and where it becomes worse."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import pandas as pd

from candle_p1.parameters.catalog import role_of
from candle_p1.parameters.parameter import Role
from candle_p1.reports.columns import Quantity
from candle_p1.reports.experiments import RANKS_PER_NODE, THREADS, Experiment, describe
from candle_p1.reports.frame import HOROVOD
from candle_p1.reports.statistics import Estimate, estimate_difference

NOT_ABOUT_QUALITY = ("staged", THREADS, RANKS_PER_NODE)
"""Settings, besides parameters for speed, in which runs may differ and still learn the same."""

DROP_THRESHOLD = 0.05
"""The change of an accuracy, or of a loss relative to its value, that counts as a drop."""


@dataclass(frozen=True)
class EpochGroup:
    """Runs that differ only in epochs per rank, ranks, and what does not affect quality.

    `name` distinguishes them from other groups, if there are any; `by_epochs` has the values of a
    quantity by epochs per rank, and within that by number of ranks.
    """

    name: str
    by_epochs: Mapping[int, Mapping[int, list[float]]]

    def values(self, epochs: int) -> list[float]:
        """Returns the values for a number of epochs per rank, over all numbers of ranks."""
        return [value for values in self.by_epochs[epochs].values() for value in values]


@dataclass(frozen=True)
class AccuracyDrop:
    """How quality at a number of epochs per rank compares with that at enough of them.

    Attributes:
        difference: The value there minus that at enough epochs.
        is_drop: Whether it is worse by DROP_THRESHOLD or more and the 95 % interval excludes 0.
        is_excluded: Whether the 95 % interval rules out that it is worse by so much.
    """

    epochs: int
    difference: Estimate
    is_drop: bool
    is_excluded: bool


def about_quality(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that affect what a run learns."""
    return {
        name: value
        for name, value in settings.items()
        if role_of(name) is not Role.SPEED
        and name not in NOT_ABOUT_QUALITY
        and not name.startswith(HOROVOD)
    }


def of_each_seed(runs: pd.DataFrame, quantity: Quantity) -> list[float]:
    """Returns one value per seed for runs that learn the same, the median where there are several.

    Runs with the same seed have the same initial weights and orders of samples, so their values
    differ only by rounding: they are not independent repeats.
    """
    if quantity.name not in runs:
        return []
    found = runs[runs[quantity.name].notna()]
    once = found[~found.index.duplicated()]
    seeds = once["seed"].where(once["seed"].notna(), [f"run {i}" for i in once.index])
    return [median(same) for _, same in once[quantity.name].groupby(seeds, sort=False)]


def epoch_groups(experiment: Experiment, quantity: Quantity) -> list[EpochGroup]:
    """Returns the groups of an experiment, each by ascending epochs per rank."""
    members: dict[str, list[pd.DataFrame]] = defaultdict(list)
    for series in experiment.series:
        settings = about_quality(series.settings)
        name = describe({key: value for key, value in settings.items() if key != "epochs"})
        members[name] += [point.runs for point in series.timed]
    groups = []
    for name, frames in members.items():
        runs = pd.concat(frames) if frames else experiment.runs.iloc[:0]
        if quantity.name not in runs:
            continue
        runs = runs[runs[quantity.name].notna() & runs["epochs_per_rank"].notna()]
        by_epochs: dict[Any, dict[Any, list[float]]] = {}
        for key, same in runs.groupby(["epochs_per_rank", "num_ranks"], sort=False):
            epochs, ranks = key
            by_epochs.setdefault(epochs, {})[ranks] = of_each_seed(same, quantity)
        if by_epochs:
            groups.append(EpochGroup(name, dict(sorted(by_epochs.items()))))
    return groups


def accuracy_drops(group: EpochGroup, enough: int, more_is_better: bool) -> list[AccuracyDrop]:
    """Returns how quality compares at each number of epochs below `enough`, the largest first.

    Returns:
        [] where no run trained `enough` epochs per rank or more, or none trained fewer.
    """
    reference = [v for epochs in group.by_epochs if epochs >= enough for v in group.values(epochs)]
    if not reference:
        return []
    threshold = DROP_THRESHOLD if more_is_better else DROP_THRESHOLD * median(reference)
    found = []
    for epochs in sorted((each for each in group.by_epochs if each < enough), reverse=True):
        difference = estimate_difference(group.values(epochs), reference)
        worsening = difference.map(lambda v: -v) if more_is_better else difference
        is_drop = difference.excludes(0) and worsening.value >= threshold
        is_excluded = difference.is_confident and worsening.high < threshold
        found.append(AccuracyDrop(epochs, difference, is_drop, is_excluded))
    return found
