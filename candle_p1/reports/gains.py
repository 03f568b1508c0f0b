"""How much faster or cheaper runs get: with more ranks, with other loaders, and by the file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from operator import mul, neg
from statistics import median
from typing import Any, NamedTuple

import pandas as pd

from candle_p1.parameters.catalog import role_of
from candle_p1.parameters.parameter import Role
from candle_p1.reports import experiments as ex
from candle_p1.reports import statistics as stat
from candle_p1.reports.experiments import Experiment, Quantity, Series, describe
from candle_p1.reports.frame import HOROVOD, STRONG, WEAK, Run
from candle_p1.reports.published import (
    METHOD_LOADER,
    ORIGINAL_LOADER,
    PAPER_LOADERS,
    published_loading,
)
from candle_p1.reports.render import Cell, Content
from candle_p1.reports.statistics import Estimate, contents, listed
from candle_p1.text import count

BASES = {"loader": PAPER_LOADERS, "kernels": ("plain",)}
"""The settings of the paper, by name, in its order. A series that has them is the base of every
series that differs from it only in later ones, or in ones that the paper does not have."""

NO_METHOD_PAIR = (
    f"no two series differ only in the loader, one with {ORIGINAL_LOADER} and one with"
    f" {METHOD_LOADER}"
)
NO_OTHER_PAIR = (
    "no series with another loader or with fast kernels differs only in these from one with the"
    f" loader {ORIGINAL_LOADER} or {METHOD_LOADER}, or with plain kernels"
)
ABOUT_LOADING = ("loader", "load_threads", "staged", "data", "size", ex.THREADS, ex.RANKS_PER_NODE)
"""Settings that affect loading; runs that differ only in others are counted together."""

MB = 1e6
SIGNIFICANT, WORSE = "significant", "worse"


class Pair(NamedTuple):
    """Two series to compare: one with the settings of the paper, and one that may be faster."""

    base: Series
    other: Series

    @property
    def base_settings(self) -> str:
        """The loader and kernels of the base, as far as they differ among the series, in words."""
        settings = self.base.settings
        return describe({name: settings[name] for name in BASES if name in settings})

    @property
    def is_method(self) -> bool:
        """Whether this is the paper's own comparison: its way of loading against the original."""
        before, after = self.base.settings, self.other.settings
        loaders = before.get("loader"), after.get("loader")
        alike = before.get("kernels") == after.get("kernels")
        return loaders == PAPER_LOADERS and alike


@dataclass(frozen=True)
class Improvement:
    """What a series gains over its base, 100 (base - other) / base.

    That is on a number of ranks or, where that is None, over all of them, by pairs of runs with the
    same number of ranks and the same seed.
    """

    num_ranks: int | None
    percent: Estimate

    @property
    def verdict(self) -> str:
        """SIGNIFICANT or WORSE if a 95 % interval excludes 0, else NOT_SIGNIFICANT or TOO_FEW."""
        return self.percent.claim(0, higher=SIGNIFICANT, lower=WORSE)


def compiled_apart(runs: Iterable[Run]) -> str | None:
    """Returns which runs XLA compiled and which it did not, in words; None if all are alike."""
    runs = list(runs)
    of_kind = [[r["num_ranks"] for r in runs if r["jit_compile"] is kind] for kind in (True, False)]
    if not all(of_kind):
        return None
    ranks = [sorted(set(each)) for each in of_kind]
    if set(ranks[0]) & set(ranks[1]):
        which, rest = count(len(of_kind[0]), "run"), count(len(of_kind[1]), "other")
    else:
        which, rest = (f"the runs on {listed(each)} rank{'s' * (each != [1])}" for each in ranks)
    return f"XLA compiled the training step (jit_compile) of {which}, and not of {rest}"


def pairs(experiment: Experiment, kinds: Collection[bool] = (True, False)) -> list[Pair]:
    """Returns the series to compare: those of the paper's method (True), of others, or of both."""
    both = (Pair(*each) for each in product(experiment.series, repeat=2) if _is_pair(*each))
    return [pair for pair in both if pair.is_method in kinds]


def _is_pair(base: Series, other: Series) -> bool:
    before, after = base.settings, other.settings
    different = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    for name in different:
        bases, value = BASES.get(name, ()), before.get(name)
        if value not in bases or after.get(name) in bases[: bases.index(value)]:
            return False  # it is no base, or the other one comes before it
    return bool(different)


def improvements(base: Series, optimised: Series, quantity: Quantity) -> list[Improvement]:
    """Returns the improvement on each number of ranks that both have, then that over all."""
    found = []
    for point in base.timed:
        other = optimised.at(point.num_ranks)
        before, after = point.positive(quantity), other.positive(quantity) if other else []
        if before and after:
            found.append((point.num_ranks, stat.estimate_ratio(after, before)))
    of_base, of_other = _by_repeat(base, quantity), _by_repeat(optimised, quantity)
    ratios = [
        new / old
        for key in of_base.keys() & of_other.keys()
        for new, old in zip(of_other[key], of_base[key], strict=False)
    ]
    over_all = [(None, stat.estimate_median(ratios))] if ratios else []
    return [
        Improvement(num_ranks, ratio.map(lambda factor: 100 * (1 - factor)))
        for num_ranks, ratio in (*found, *over_all)
    ]


def _by_repeat(series: Series, quantity: Quantity) -> dict[tuple[int, int | None], list[float]]:
    """Returns the values by ranks and seed, in order of start."""
    values = defaultdict(list)
    for point in series.timed:
        for run in point.runs["run"]:
            value = run[quantity.name]
            if value is not None and value > ex.MIN_IN_RATIO:
                values[point.num_ranks, run["seed"]].append(value)
    return values


def loading_table(experiment: Experiment) -> Content:
    """Returns the time to load each file on the slowest rank, then the paper's Tables 3 and 4.

    The largest file comes first. A loader has the other settings of ABOUT_LOADING that vary.
    """
    names = [name for name in experiment.varied if name in ABOUT_LOADING]
    times: dict[tuple[str, str, str, int], dict[int, float]] = defaultdict(dict)
    sizes: dict[tuple[str, str], int] = {}
    for each in experiment.series:
        own = describe({name: each.settings[name] for name in names if name in each.settings})
        for run in (run for point in each.timed for run in point.runs["run"]):
            method = own or f"loader {run['loader']}"
            for role, file in run.record.data.files.items() if run.record.data else ():
                if file.load is not None and file.load.max_s > ex.MIN_IN_RATIO:
                    key = (role, method, run["loader"], run["num_ranks"])
                    times[key][id(run)] = file.load.max_s
                    sizes[role, method] = file.file_bytes

    def place(key: tuple[str, str, str, int]) -> tuple[Any, ...]:
        role, method, loader, num_ranks = key
        return (-sizes[role, method], role, loader != ORIGINAL_LOADER, method, num_ranks)

    rows: list[tuple[Cell, ...]] = []
    for key in sorted(times, key=place):
        role, method, _, num_ranks = key
        estimate = stat.estimate_median(list(times[key].values()))
        rows.append((role, sizes[role, method] / MB, method, num_ranks, estimate, "measured"))
    for cell in published_loading(experiment.benchmark) if rows else ():
        of_paper = f"published: {cell.machine}, Table {cell.table}"
        loader = f"loader {cell.loader}"
        rows.append((cell.role, cell.file_mb, loader, None, cell.seconds, of_paper))
    return ("file", "MB", "loader", "ranks", "time (s)", "source"), rows, []


def scaling_table(experiment: Experiment) -> Content:
    """Returns how much faster points are than the base of their series, that on the fewest ranks.

    Under strong scaling, the efficiency is the speed-up divided by the ratio of the numbers of
    ranks, under weak scaling T(base) / T(P), because the work grows with the ranks. There is none
    where the batch size grows as well, for which there is no ideal.
    """
    gain = "speed-up" if experiment.mode == STRONG else "T(base) / T(P)"
    headings = (
        "series", "quantity", "ranks", "base: ranks", "base: time (s)", gain, "scaling efficiency",
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    apart: set[str] = set()
    for series, quantity in product(experiment.series, (ex.TOTAL, ex.TRAIN)):
        known = [point for point in series.timed if point.positive(quantity)]
        for base, point in ((known[0], each) for each in known[1:]):
            base_s = base.positive(quantity)
            ratio = stat.estimate_ratio(base_s, point.positive(quantity))
            factor = point.num_ranks / base.num_ranks if experiment.mode == STRONG else 1.0
            has_ideal = experiment.mode in (STRONG, WEAK)
            efficiency = ratio.map(partial(mul, 1 / factor)) if has_ideal else None
            times = (base.num_ranks, median(base_s), ratio, efficiency)
            rows.append((series.name, quantity.title, point.num_ranks, *times))
            if which := compiled_apart([*base.runs["run"], *point.runs["run"]]):
                apart.add(f"{series.name}: {which}.")
    note = contents()["efficiency"].get(experiment.mode)
    return headings, rows, [*filter(None, [note]), *sorted(apart)]


def gains_table(experiment: Experiment, *, of_method: bool) -> Content:
    """Returns improvements in percent, on each number of ranks and over all."""
    compared = pairs(experiment, {of_method})
    measured = ex.comparable_energy(experiment.runs)
    power_of = {energy: power for power, energy in measured}

    def rows(pair: Pair) -> Iterator[tuple[Cell, ...]]:
        for quantity in (ex.TOTAL, *power_of, ex.LOAD, ex.BROADCAST):
            power = power_of.get(quantity)
            powers = improvements(*pair, power) if power else []
            changes = {each.num_ranks: each.percent.map(neg) for each in powers}
            for each in improvements(*pair, quantity):
                ranks = "all, paired" if each.num_ranks is None else f"{each.num_ranks:,}"
                yield (
                    *(quantity.title, pair.other.name, pair.base.name, ranks),
                    *(each.percent, each.verdict, changes.get(each.num_ranks)),
                )

    change = f"change of {measured[0][0].title} (%)" if measured else ""
    headings = ("quantity", "series", "base", "ranks", "improvement (%)", "claim", change)
    return headings, [row for pair in compared for row in rows(pair)], []


NOT_ABOUT_QUALITY = ("staged", ex.THREADS, ex.RANKS_PER_NODE)
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
        difference = stat.estimate_difference(group.values(epochs), reference)
        worsening = difference.map(lambda v: -v) if more_is_better else difference
        is_drop = difference.excludes(0) and worsening.value >= threshold
        is_excluded = difference.is_confident and worsening.high < threshold
        found.append(AccuracyDrop(epochs, difference, is_drop, is_excluded))
    return found
