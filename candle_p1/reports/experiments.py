"""The columns of the table of runs that are shown, with names and units."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas as pd

from candle_p1.reports.frame import (
    BATCH,
    DATA,
    ENGINE,
    HOROVOD,
    LIMITS,
    PARTS,
    STRONG,
    WEAK,
    Run,
    load_frame,
)
from candle_p1.reports.statistics import Estimate, estimate_median, file_name

NOT_EVALUATED = "no run evaluated its model (--eval_bool False)"


@dataclass(frozen=True)
class Quantity:
    """A column of numbers, its name in sentences, and its unit, if it has one."""

    name: str
    title: str
    unit: str = ""

    @property
    def heading(self) -> str:
        """The title with the unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title


def phase_time(phase: str) -> Quantity:
    """Returns the time of a phase on its slowest rank."""
    return Quantity(f"phase_{phase}_s", f"phase {phase}", "s")


TOTAL = Quantity("total_s", "total time", "s")
LOAD = Quantity("phase_load_s", "data loading", "s")
TRAIN = Quantity("phase_train_s", "training", "s")
BROADCAST = Quantity("broadcast_overhead_s", "broadcast overhead", "s")
WAIT = Quantity("broadcast_wait_s", "waiting for the slowest loader", "s")
TRANSFER = Quantity("broadcast_transfer_s", "transfer of the weights", "s")
EPOCH = Quantity("epoch_s", "time per epoch", "s")
FIRST_STEP = Quantity("first_step_s", "first step", "s")
SAMPLES = Quantity("samples_per_s", "training rate", "samples/s")
COMMUNICATION = Quantity("communication_share", "communication's share of training")
LOAD_BALANCE = Quantity("load_balance", "load balance")
COMMUNICATION_EFFICIENCY = Quantity("communication_efficiency", "communication efficiency")
PARALLEL_EFFICIENCY = Quantity("parallel_efficiency", "POP efficiency")
ENERGY = Quantity("energy_j", "energy", "J")
POWER = Quantity("power_w", "mean power", "W")
"""These two are sums over all devices of the job."""

GPU_POWER = Quantity("power_per_gpu_w", "mean power per GPU", "W")
GPU_ENERGY = Quantity("energy_per_gpu_j", "energy per GPU", "J")
NODE_POWER = Quantity("power_per_node_w", "mean power per node", "W")
NODE_ENERGY = Quantity("energy_per_node_j", "energy per node", "J")
POWER_AND_ENERGY = ((GPU_POWER, GPU_ENERGY), (NODE_POWER, NODE_ENERGY))
"""As the paper states them: per GPU on Summit, per node on Theta."""

FIGURES_OF_MERIT = {"accuracy": True, "loss": False}
"""What models are judged by, in order of preference, and whether more is better."""


def known(runs: pd.DataFrame, column: Quantity | str) -> list[Any]:
    """Returns the values of a column, of the runs that have one."""
    name = column if isinstance(column, str) else column.name
    return runs[name].dropna().tolist() if name in runs else []


def time_parts(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the parts of the time of each run, in s: a column for each of PARTS, NaN if unknown.

    The parts of a run add up to its total.
    """
    return pd.DataFrame(list(runs["parts"]), columns=list(PARTS), dtype=float)


def merit(runs: pd.DataFrame) -> str | None:
    """Returns the name of the figure by which the runs' models are judged; None without one."""
    names = {name for names in runs["merits"] for name in names}
    return next((name for name in FIGURES_OF_MERIT if name in names), min(names, default=None))


def num_diverged(runs: pd.DataFrame, name: str) -> int:
    """Returns how many runs recorded a figure of merit that is not a number."""
    return sum(name in names for names in runs["merits"]) - len(known(runs, f"test_{name}"))


def more_is_better(name: str) -> bool:
    """Returns whether more of a figure of merit is better."""
    return FIGURES_OF_MERIT.get(name, True)


def quality_on_test(name: str) -> Quantity:
    """Returns a figure of merit of the trained model on the test set."""
    return Quantity(f"test_{name}", f"test {name}")


def qualities(name: str) -> tuple[Quantity, Quantity]:
    """Returns a figure of merit on the training samples in the last epoch, and on the test set.

    The paper's is that on the training samples.
    """
    return Quantity(f"training_{name}", f"training {name}"), quality_on_test(name)


def naive(name: str) -> Quantity:
    """Returns a figure of merit of the naive predictor on the test set."""
    return Quantity(f"naive_{name}", f"naive predictor's {name}")


def covered(runs: pd.DataFrame) -> list[str]:
    """Returns the parts of the machine that energies cover, in words: one entry if all agree."""
    parts = set(runs.loc[runs["energy_j"].notna(), "energy_covers"])
    return sorted(" and ".join(each) or "unknown parts" for each in parts)


def energy_kinds(runs: pd.DataFrame) -> set[str]:
    """Returns how the energies were obtained: measured, estimated, simulated."""
    return set(runs.loc[runs["energy_j"].notna(), "energy_kind"])


def labelled(quantity: Quantity, runs: pd.DataFrame) -> Quantity:
    """Returns an energy or a power with a title that says where it is not measured."""
    title, parts = quantity.title, covered(runs)
    if quantity in (NODE_POWER, NODE_ENERGY) and len(parts) == 1 and parts != ["node"]:
        title = f"{title}, {parts[0]}"
    kinds = energy_kinds(runs)
    others = sorted(kinds - {"measured"})
    if others:
        partly = "partly " if len(kinds) > 1 else ""
        title = f"{title} ({partly}{' and '.join(others)})"
    return replace(quantity, title=title)


def comparable_energy(runs: pd.DataFrame) -> Sequence[tuple[Quantity, Quantity]]:
    """Returns power and energy, per GPU or else per node.

    None if they were not measured, or cover different parts of the machine in the runs.
    """
    if len(covered(runs)) != 1:
        return []
    per_gpu = len(known(runs, GPU_ENERGY)) >= len(known(runs, ENERGY))
    power, energy = POWER_AND_ENERGY[0 if per_gpu else 1]
    return [(labelled(power, runs), labelled(energy, runs))]


MODES = {
    STRONG: "strong scaling: ranks share the work",
    WEAK: "weak scaling: every rank trains the same number of epochs",
    BATCH: "batch scaling: the batch size grows with the number of ranks",
}
THREADS, RANKS_PER_NODE, JIT = "threads", "ranks_per_node", "jit_compile"
"""Settings: the threads of a rank, the ranks of a node, and whether XLA compiled the training."""

UNKNOWN = "unknown"
MIN_IN_RATIO = 1e-9
"""The resolution of recorded times, in s: nothing is as short as that."""

SHOWN_FIRST = (
    "loader", "batch_size", "batch_scaling", "epochs_scaling", "epochs", "lr_scaling", *LIMITS
)  # fmt: skip
"""Settings that come first in the name of a series, in this order; the others follow by name."""


@dataclass(frozen=True, eq=False)
class Point:
    """A number of ranks and all of its repeated runs, by start: rows of the table of runs."""

    num_ranks: int
    all_runs: pd.DataFrame

    @cached_property
    def runs(self) -> pd.DataFrame:
        """The runs with valid times."""
        return timed(self.all_runs)

    @property
    def num_unfinished(self) -> int:
        """How many runs failed, were interrupted or are still running."""
        return int((self.all_runs["status"] != "ok").sum())

    def values(self, column: Quantity | str) -> list[Any]:
        """Returns the known values of a column."""
        return known(self.runs, column)

    def positive(self, column: Quantity | str) -> list[float]:
        """Returns the known values of a time or an energy, of which ratios can be formed."""
        return [value for value in self.values(column) if value > MIN_IN_RATIO]

    def estimate(self, column: Quantity | str) -> Estimate | None:
        """Returns the median of a column with its interval; None where no run has it."""
        values = self.values(column)
        return estimate_median(values) if values else None


@dataclass(frozen=True, eq=False)
class Series:
    """Runs with the same settings, of those in which series differ, by number of ranks."""

    settings: Mapping[str, Any]
    points: tuple[Point, ...]

    @cached_property
    def name(self) -> str:
        """The settings in words; "all runs" where there is only one series.

        Synthetic data of different sizes are different data, so the size is not named again.
        """
        hidden = "size" if DATA in self.settings else None
        return describe({k: v for k, v in self.settings.items() if k != hidden}) or "all runs"

    @cached_property
    def timed(self) -> list[Point]:
        """The points that have times."""
        return [point for point in self.points if len(point.runs)]

    def at(self, num_ranks: int) -> Point | None:
        """Returns the point with times on a number of ranks, if there is one."""
        return next((point for point in self.timed if point.num_ranks == num_ranks), None)


@dataclass(frozen=True, eq=False)
class Experiment:
    """One benchmark on one machine, if it is known, in one of MODES, with some limits of the steps.

    Its runs, which are rows of the table of runs, by start, share the settings in `common`. There
    is at least one series; a run on one rank may be in several. The slug begins the names of its
    files, unlike those of the other experiments.
    """

    benchmark: str
    mode: str
    limits: tuple[tuple[str, int], ...]
    machine: str | None
    slug: str
    all_runs: pd.DataFrame
    common: Mapping[str, Any]
    series: tuple[Series, ...]

    @cached_property
    def runs(self) -> pd.DataFrame:
        """The runs with valid times."""
        return timed(self.all_runs)

    @cached_property
    def rank_counts(self) -> tuple[int, ...]:
        """The numbers of ranks that have times."""
        return tuple(sorted(set(self.runs["num_ranks"])))

    @cached_property
    def loaders(self) -> frozenset[str]:
        """The loaders of the runs that have times."""
        return frozenset(self.runs["loader"])

    @cached_property
    def varied(self) -> tuple[str, ...]:
        """The settings in which its series differ."""
        return _in_order({name for series in self.series for name in series.settings})

    @property
    def where(self) -> str:
        """The machine, as a sentence."""
        return f"On {self.machine or 'an unknown machine'}."

    @property
    def title(self) -> str:
        """Benchmark, mode, and whether the steps are limited."""
        limited = f" ({describe(dict(self.limits))})" if self.limits else ""
        return f"{self.benchmark.upper()}, {MODES[self.mode]}{limited}"


def timed(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the runs with valid times: they finished, in one part, and nothing perturbed them."""
    return runs[runs["is_timed"].astype(bool)]


def describe(settings: Mapping[str, Any]) -> str:
    """Returns settings in words, for example ``loader original, batch_size 40``."""
    words = {
        name: " ".join(map(str, value)) if isinstance(value, tuple) else value
        for name, value in settings.items()
    }
    return ", ".join(f"{name} {words[name]}" for name in _in_order(words))


def by_value(value: Any) -> tuple[bool, float, str]:
    """Returns a sorting key for the values of a setting: numbers by size, then words."""
    return (False, value, "") if isinstance(value, (int, float)) else (True, 0.0, str(value))


def group(runs: Iterable[Run]) -> list[Experiment]:
    """Returns the experiments, by benchmark, mode, limits and machine.

    A run that ended before it recorded its machine is included if it can only belong to one. Where
    the scaling of the batch size alone is varied, runs without it belong to batch scaling.
    """
    frame = load_frame(runs)
    if frame.empty:
        return []
    base = frame["settings"].map(lambda each: _key(each, "batch_scaling", ENGINE, HOROVOD))
    base = frame["benchmark"] + base.map(repr)
    frame.loc[base.isin(set(base[frame["mode"] == BATCH])), "mode"] = BATCH
    found: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
    for _, kind in frame.groupby(["benchmark", "mode", frame["limits"].map(repr)], sort=False):
        machines = set(kind["machine"].dropna())
        only = machines.pop() if len(machines) == 1 else None
        for i, run in kind.iterrows():
            key = (run["benchmark"], run["mode"], run["limits"], run["machine"] or only)
            found[key].append(i)
    order, stems = list(MODES), list[str]()
    experiments = []
    for key in sorted(found, key=lambda key: (key[0], order.index(key[1]), key[2], str(key[3]))):
        stems.append(f"{file_name(key[0])}-{key[1]}")
        num = stems.count(stems[-1])
        slug = stems[-1] + f"-{num}" * (num > 1)
        experiments.append(_experiment(frame.loc[found[key]], *key, slug))
    return experiments


def varying(settings: Iterable[tuple[str, Any, Any]]) -> set[str]:
    """Returns the names that have several values for one key, of names, keys and values."""
    values: dict[Any, set[str]] = defaultdict(set)
    for name, key, value in settings:
        values[name, key].add(repr(value))
    return {name for (name, _), found in values.items() if len(found) > 1}


def _experiment(frame: pd.DataFrame, *kind: Any) -> Experiment:
    runs = list(frame["run"])
    # A rank's share of the cores falls with the number of ranks, which does not make a series;
    # different numbers of threads on the same number of ranks do. The same holds for ranks per
    # node, and for whether XLA compiled the training step.
    placement = varying(
        (name, (run["num_ranks"], _key(run["settings"])), run[name])
        for run in runs
        for name in (THREADS, JIT, RANKS_PER_NODE)
        if run[name] is not None
    )
    settings_of = [
        run["settings"] | {name: run[name] for name in placement if run[name] is not None}
        for run in runs
    ]
    varied = varying((n, None, v) for settings in settings_of for n, v in settings.items())
    common = {n: v for settings in settings_of for n, v in settings.items() if n not in varied}
    own_settings = [{n: v for n, v in settings.items() if n in varied} for settings in settings_of]
    complete = {_key(own): own for own in own_settings if len(own) == len(varied)}
    members: dict[Any, list[int]] = defaultdict(list)
    named: dict[Any, Mapping[str, Any]] = {}
    for i, (run, own) in enumerate(zip(runs, own_settings, strict=True)):
        # A single rank has no settings of communication, and a run that failed early lacks others:
        # such a run belongs to every series that it does not contradict.
        fits = [key for key, settings in complete.items() if settings.items() >= own.items()]
        is_base = run["status"] == "ok" and run["num_ranks"] == 1
        if _key(own) in complete or not (is_base or len(fits) == 1):
            fits = []
        for key in fits or [_key(own)]:
            missing = {} if run["status"] == "ok" else dict.fromkeys(varied, UNKNOWN)
            named[key] = complete.get(key) or missing | own
            members[key].append(i)
    series = []
    for key, rows in members.items():
        by_ranks = [runs for _, runs in frame.iloc[rows].groupby("num_ranks")]
        points = tuple(Point(runs["num_ranks"].iloc[0], runs) for runs in by_ranks)
        series.append(Series(named[key], points))
    series.sort(key=_sortable)
    return Experiment(*(*kind, frame, common, tuple(series)))


def _in_order(names: Iterable[str]) -> tuple[str, ...]:
    first = {name: i for i, name in enumerate(SHOWN_FIRST)}
    return tuple(sorted(names, key=lambda name: (first.get(name, len(first)), name)))


def _sortable(series: Series) -> tuple[Any, ...]:
    """Returns a sorting key: the original loader first, numbers in their order."""
    settings = series.settings
    loader = settings.get("loader")
    values = [by_value(settings[name]) for name in _in_order(settings) if name != "loader"]
    return (loader != "original", str(loader), values)


def _key(settings: Mapping[str, Any], *without: str) -> Any:
    """Returns a key of settings, but those whose names begin with some words."""
    kept = (each for each in settings.items() if not (without and each[0].startswith(without)))
    return tuple(sorted((name, repr(value)) for name, value in kept))
