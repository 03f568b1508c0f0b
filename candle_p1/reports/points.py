"""Runs in groups: experiments, their series, and the points of a series.

An experiment is what one figure can show: one benchmark on one machine in one mode of scaling, and
either with whole epochs or with the same limits of the steps. Its series are named by the settings
that differ among its runs. A point of a series is a number of ranks with its repeated runs.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from candle_p1.reports.runs import DATA, ENGINE, LIMITS
from candle_p1.reports.statistics import estimate_median

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from candle_p1.reports.runs import Hardware, RecordedRun
    from candle_p1.reports.statistics import Estimate

STRONG, WEAK, BATCH = "strong", "weak", "batch"
MODES = {
    STRONG: "strong scaling: ranks share the work",
    WEAK: "weak scaling: every rank trains the same number of epochs",
    BATCH: "batch scaling: the batch size grows with the number of ranks",
}
THREADS, RANKS_PER_NODE = "threads", "ranks_per_node"
"""The names of the settings for the threads of a rank and the ranks of a node."""

JIT = "jit_compile"
"""The name of the setting for whether XLA compiled the training step."""

UNKNOWN = "unknown"
MIN_IN_RATIO = 1e-9
"""The resolution of recorded times, in s: nothing is as short as that."""

SHOWN_FIRST = (
    "loader", "batch_size", "batch_scaling", "epochs_scaling", "epochs", "lr_scaling", *LIMITS
)  # fmt: skip
"""Settings that come first in the name of a series, in this order; the others follow by name."""


@dataclass(frozen=True, eq=False)
class Point:
    """A number of ranks and its repeated runs.

    Attributes:
        num_ranks: The number of ranks.
        all_runs: All of its runs, by start.
    """

    num_ranks: int
    all_runs: tuple[RecordedRun, ...]

    @cached_property
    def runs(self) -> tuple[RecordedRun, ...]:
        """The runs with valid times."""
        return tuple(run for run in self.all_runs if run.is_timed)

    @property
    def unfinished(self) -> tuple[RecordedRun, ...]:
        """The runs that failed, were interrupted or are still running."""
        return tuple(run for run in self.all_runs if run.status != "ok")

    def values(self, quantity: Callable[[RecordedRun], float | None]) -> list[float]:
        """Returns the known values of a quantity."""
        return [value for run in self.runs if (value := quantity(run)) is not None]

    def positive(self, quantity: Callable[[RecordedRun], float | None]) -> list[float]:
        """Returns the known values of a time or an energy, of which ratios can be formed."""
        return [value for value in self.values(quantity) if value > MIN_IN_RATIO]

    def estimate(self, quantity: Callable[[RecordedRun], float | None]) -> Estimate | None:
        """Returns the median of a quantity with its interval; None where no run has it."""
        values = self.values(quantity)
        return estimate_median(values) if values else None


@dataclass(frozen=True, eq=False)
class Series:
    """Runs with the same settings on several numbers of ranks.

    Attributes:
        settings: The settings in which series of the experiment differ.
        points: By number of ranks.
    """

    settings: Mapping[str, Any]
    points: tuple[Point, ...]

    @cached_property
    def name(self) -> str:
        """The settings in words; "all runs" where there is only one series.

        Synthetic data of different sizes are different data, so the size is not named again.
        """
        named = dict(self.settings)
        if DATA in named:
            named.pop("size", None)
        return describe(named) or "all runs"

    @property
    def timed(self) -> list[Point]:
        """The points that have times."""
        return [point for point in self.points if point.runs]

    def at(self, num_ranks: int) -> Point | None:
        """Returns the point with times on a number of ranks, if there is one."""
        return next((point for point in self.timed if point.num_ranks == num_ranks), None)


@dataclass(frozen=True, eq=False)
class Experiment:
    """One benchmark on one machine in one mode.

    Attributes:
        benchmark: Its name.
        mode: A key of MODES.
        limits: The limits of the steps of its runs, see RecordedRun.limits.
        machine: None where no run got far enough to record it.
        common: The settings that all of its runs share.
        series: At least one.
    """

    benchmark: str
    mode: str
    limits: tuple[tuple[str, int], ...]
    machine: Hardware | None
    common: Mapping[str, Any]
    series: tuple[Series, ...]

    @cached_property
    def all_runs(self) -> tuple[RecordedRun, ...]:
        """All runs, each once: a run on one rank may be in several series."""
        points = [point for series in self.series for point in series.points]
        return tuple({run.path: run for point in points for run in point.all_runs}.values())

    @cached_property
    def runs(self) -> tuple[RecordedRun, ...]:
        """The runs with valid times, each once."""
        return tuple(run for run in self.all_runs if run.is_timed)

    @cached_property
    def rank_counts(self) -> tuple[int, ...]:
        """The numbers of ranks that have times."""
        return tuple(sorted({point.num_ranks for each in self.series for point in each.timed}))

    @cached_property
    def loaders(self) -> frozenset[str]:
        """The loaders of the runs that have times."""
        return frozenset(run.loader for run in self.runs)

    @cached_property
    def varied(self) -> tuple[str, ...]:
        """The settings in which its series differ."""
        return _in_order({name for series in self.series for name in series.settings})


def group(runs: Iterable[RecordedRun]) -> list[Experiment]:
    """Returns the experiments, by benchmark, mode, limits and machine.

    A run that ended before it recorded its machine is included if it can only belong to one.
    """
    kinds = _kinds(list(runs))
    machines = defaultdict(set)
    for run, kind in kinds.items():
        if run.machine is not None:
            machines[kind].add(run.machine)
    grouped: dict[tuple[Any, ...], list[RecordedRun]] = defaultdict(list)
    for run, kind in kinds.items():
        machine, known = run.machine, machines[kind]
        if machine is None and len(known) == 1:
            (machine,) = known
        grouped[(*kind, machine)].append(run)
    order = list(MODES)
    keys = sorted(grouped, key=lambda key: (key[0], order.index(key[1]), key[2], str(key[3])))
    return [_experiment(grouped[key], *key) for key in keys]


def _kinds(runs: Sequence[RecordedRun]) -> dict[RecordedRun, tuple[Any, ...]]:
    """Returns benchmark, mode and limits of each run.

    Where the scaling of the batch size alone is varied, runs without it belong to batch scaling.
    """
    modes = {run: mode_of(run) for run in runs}
    scaled = {_without_batch_scaling(run) for run in runs if modes[run] == BATCH}
    return {
        run: (run.benchmark, BATCH if _without_batch_scaling(run) in scaled else mode, run.limits)
        for run, mode in modes.items()
    }


def _without_batch_scaling(run: RecordedRun) -> tuple[Any, ...]:
    # A single rank need not have recorded an engine, of which it makes no use.
    others = ("batch_scaling", ENGINE)
    settings = {name: v for name, v in run.settings.items() if name not in others}
    return run.benchmark, _key(settings)


def mode_of(run: RecordedRun) -> str:
    """Returns a key of MODES.

    At the batch-step level, ranks share the samples of an epoch, which is also strong scaling.
    """
    settings = run.settings
    if settings.get("batch_scaling", "none") != "none":
        return BATCH
    shared = ("strong", "strong_ceil")
    level = settings.get("data_parallel", "epoch")
    return STRONG if settings.get("epochs_scaling") in shared or level != "epoch" else WEAK


def describe(settings: Mapping[str, Any]) -> str:
    """Returns settings in words, for example ``loader original, batch_size 40``."""
    words = {
        name: " ".join(map(str, value)) if isinstance(value, tuple) else value
        for name, value in settings.items()
    }
    return ", ".join(f"{name} {words[name]}" for name in _in_order(words))


def _placement(run: RecordedRun) -> dict[str, float]:
    """Returns how the ranks were placed on nodes and cores, and compiled, as far as it is known."""
    threads, nodes = run.threads, run.num_nodes
    placement: dict[str, float] = {} if threads is None else {THREADS: threads}
    if run.jit_compile is not None:
        placement[JIT] = run.jit_compile
    if nodes:
        ranks = run.num_ranks / nodes
        placement[RANKS_PER_NODE] = int(ranks) if ranks.is_integer() else ranks
    return placement


def _varied_placement(runs: Sequence[RecordedRun]) -> set[str]:
    """Returns how the placement differs among runs that are otherwise alike.

    A rank's share of the cores falls with the number of ranks, which does not make a series;
    different numbers of threads on the same number of ranks do. The same holds for ranks per node,
    and for whether XLA compiled the training step, which may depend on the number of ranks, too.
    """
    seen: dict[Any, set[float]] = defaultdict(set)
    for run in runs:
        for name, value in _placement(run).items():
            seen[name, run.num_ranks, _key(run.settings), _key(run.horovod_settings)].add(value)
    return {name for (name, *_), values in seen.items() if len(values) > 1}


def _experiment(
    runs: Sequence[RecordedRun],
    benchmark: str,
    mode: str,
    limits: tuple[tuple[str, int], ...],
    machine: Hardware | None,
) -> Experiment:
    placement = _varied_placement(runs)
    all_settings = {run: {**run.settings, **run.horovod_settings} for run in runs}
    for run, settings in all_settings.items():
        settings |= {name: v for name, v in _placement(run).items() if name in placement}
    values = defaultdict(set)
    for settings in all_settings.values():
        for name, value in settings.items():
            values[name].add(_hashable(value))
    varied = {name for name in values if len(values[name]) > 1}
    common = {
        name: value
        for settings in all_settings.values()
        for name, value in settings.items()
        if name not in varied
    }
    own_settings = {
        run: {name: value for name, value in settings.items() if name in varied}
        for run, settings in all_settings.items()
    }
    complete = {_key(own): own for own in own_settings.values() if len(own) == len(varied)}
    members: dict[Any, list[RecordedRun]] = defaultdict(list)
    named: dict[Any, Mapping[str, Any]] = {}
    for run, own in own_settings.items():
        # A single rank has no settings of communication, and a run that failed early lacks others:
        # such a run belongs to every series that it does not contradict.
        fits = [key for key, settings in complete.items() if settings.items() >= own.items()]
        is_base = run.status == "ok" and run.num_ranks == 1
        if _key(own) in complete or not (is_base or len(fits) == 1):
            fits = []
        for key in fits or [_key(own)]:
            unknown = {} if run.status == "ok" else dict.fromkeys(varied, UNKNOWN)
            named[key] = complete.get(key) or unknown | own
            members[key].append(run)
    series = [Series(named[key], _points(members[key])) for key in members]
    series.sort(key=_sortable)
    return Experiment(benchmark, mode, limits, machine, common, tuple(series))


def _points(runs: Sequence[RecordedRun]) -> tuple[Point, ...]:
    counts = sorted({run.num_ranks for run in runs})
    return tuple(Point(num, tuple(run for run in runs if run.num_ranks == num)) for num in counts)


def _in_order(names: Iterable[str]) -> tuple[str, ...]:
    first = {name: i for i, name in enumerate(SHOWN_FIRST)}
    return tuple(sorted(names, key=lambda name: (first.get(name, len(first)), name)))


def _sortable(series: Series) -> tuple[Any, ...]:
    """Returns a sorting key: the original loader first, numbers in their order."""
    settings = series.settings
    loader = settings.get("loader")
    values = [by_value(settings[name]) for name in _in_order(settings) if name != "loader"]
    return (loader != "original", str(loader), values)


def by_value(value: Any) -> tuple[bool, float, str]:
    """Returns a sorting key for the values of a setting: numbers by size, then words."""
    return (False, value, "") if isinstance(value, (int, float)) else (True, 0.0, str(value))


def _key(settings: Mapping[str, Any]) -> Any:
    return tuple(sorted((name, _hashable(value)) for name, value in settings.items()))


def _hashable(value: Any) -> Any:
    """Returns a key that distinguishes values: 1 and True differ, lists become text."""
    return (type(value).__name__, repr(value))
