"""Tables with a row for each point: where time and energy go, and how good the models are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import harmonic_mean
from typing import TYPE_CHECKING

from candle_p1.reports.columns import (
    BROADCAST,
    COMMUNICATION,
    COMMUNICATION_EFFICIENCY,
    ENERGY,
    EPOCH,
    FIRST_STEP,
    LOAD,
    LOAD_BALANCE,
    PARALLEL_EFFICIENCY,
    POWER_AND_ENERGY,
    SAMPLES,
    TOTAL,
    TRAIN,
    TRANSFER,
    WAIT,
    Quantity,
    known,
    labelled,
    merit,
    naive,
    qualities,
    time_parts,
)
from candle_p1.reports.experiments import (
    MIN_IN_RATIO,
    RANKS_PER_NODE,
    THREADS,
    Experiment,
    Point,
    Series,
    describe,
)
from candle_p1.reports.frame import PARTS
from candle_p1.reports.published import all_published, published_loading
from candle_p1.reports.statistics import Estimate, estimate_median
from candle_p1.reports.words import listed

if TYPE_CHECKING:
    from candle_p1.reports.render import Cell, Content

    Column = Quantity | tuple[str, Callable[[Point], Cell]]
    """A quantity, or a heading and what its column shows of a point."""


ABOUT_FILES = ("data", "size", THREADS, RANKS_PER_NODE)
"""Settings in which loads have to agree to be compared."""

ABOUT_LOADING = ("loader", "load_threads", "staged", *ABOUT_FILES)
"""Settings that affect loading; runs that differ only in others are counted together."""

MB = 1e6


def times_table(experiment: Experiment) -> Content:
    """Returns medians of times for every point, with the number of runs."""
    columns: list[Column] = [("runs", lambda point: len(point.runs))]
    if (experiment.all_runs["status"] != "ok").any():
        columns.append(("not finished", lambda point: point.num_unfinished))
    columns += [TOTAL, LOAD, BROADCAST, WAIT, TRANSFER, TRAIN]
    note = (
        "Medians of the slowest rank. The broadcast overhead is the paper's: from the first rank"
        " that is ready to broadcast to the end of the broadcast, that is, waiting for the slowest"
        " loader and the transfer of the weights."
    )
    points = _points(experiment, lambda p: len(p.runs) or p.num_unfinished)
    return *_of_points(points, columns), [note]


def training_table(experiment: Experiment) -> Content:
    """Returns the time per epoch, the first step and the rate of training."""
    rate = (SAMPLES.heading, _mean_rate)
    columns: list[Column] = [("epochs per rank", _epochs), EPOCH, FIRST_STEP, rate]
    note = (
        "Medians of the slowest rank; for the rate, the harmonic mean. The time per epoch excludes"
        " validation and the first step of the run, which is a warm-up and has a column of its own;"
        " the rate includes all steps."
    )
    return *_of_points(_points(experiment), columns), [note]


def shares_table(experiment: Experiment) -> Content:
    """Returns the parts' shares of the total time."""

    def share_of(part: str) -> Callable[[Point], Cell]:
        def percent(point: Point) -> Cell:
            parts = time_parts(point.runs)
            return _median((100 * (parts[part] / parts.sum(axis=1))).dropna())

        return percent

    columns = [(f"{part} (%)", share_of(part)) for part in PARTS]
    return *_of_points(_points(experiment), columns), []


def quality_table(experiment: Experiment) -> Content:
    """Returns the figure of merit on training and test samples, and the naive predictor's."""
    name = merit(experiment.runs)
    if not name:
        return [], [], []
    columns: list[Column] = [
        ("epochs per rank", _epochs),
        ("batch size", lambda point: point.runs["run"].iloc[0]["plan_batch_size"]),
        *qualities(name),
        naive(name),
    ]
    return *_of_points(_points(experiment), columns), []


def power_table(experiment: Experiment) -> Content:
    """Returns time per epoch, mean power and energy: the paper's Tables 2, 5 and 6."""
    runs = experiment.runs
    columns = (EPOCH, *(labelled(each, runs) for pair in POWER_AND_ENERGY for each in pair))
    points = list(_points(experiment, lambda point: point.values(ENERGY)))
    rates = {hz for _, point in points for hz in point.values("power_hz") if hz}
    note = (
        "Per GPU: means over all GPUs. Per node: means over the nodes, the devices of a node added"
        f" up. Power was read at {listed([f'{hz:g}' for hz in sorted(rates)])} Hz (--power_hz)."
    )
    of_paper = [str(each) for each in all_published() if each.quantity == "power_rate"]
    return *_of_points(points, columns), [note, *of_paper]


def efficiency_table(experiment: Experiment) -> Content:
    """Returns communication's share and POP's efficiencies, where there are several ranks."""

    def percent(point: Point) -> Cell:
        return _median(100 * value for value in point.values(COMMUNICATION))

    columns: list[Column] = [
        ("communication in training (%)", percent),
        *(LOAD_BALANCE, COMMUNICATION_EFFICIENCY, PARALLEL_EFFICIENCY),
    ]
    points = _points(experiment, lambda point: point.num_ranks > 1 and len(point.runs))
    return *_of_points(points, columns), []


def loading_table(experiment: Experiment) -> Content:
    """Returns the time to load each file, by loader, followed by the paper's Tables 3 and 4."""
    rows: list[tuple[Cell, ...]] = [
        (load.role, load.file_mb, load.method, load.num_ranks, load.estimate, "measured")
        for load in file_loads(experiment, experiment.series)
    ]
    for each in published_loading(experiment.benchmark) if rows else ():
        of_paper = f"published: {each.machine}, Table {each.table}"
        method = f"loader {each.loader}"
        rows.append((each.role, each.file_mb, method, None, each.seconds, of_paper))
    return ("file", "MB", "loader", "ranks", "time (s)", "source"), rows, []


@dataclass(frozen=True)
class FileLoad:
    """The loads of one file by one loader on one number of ranks.

    Attributes:
        role: train, test, ….
        file_mb: The file's size, in MB of 10^6 bytes.
        method: The loader, and other settings that affect loading and vary, in words.
        loader: The loader alone.
        alike: The settings of ABOUT_FILES that vary, in words.
        num_ranks: The number of ranks.
        seconds: The times of the slowest rank, in s.
    """

    role: str
    file_mb: float
    method: str
    loader: str
    alike: str
    num_ranks: int
    seconds: tuple[float, ...]

    @property
    def estimate(self) -> Estimate:
        """The median time."""
        return estimate_median(self.seconds)


def file_loads(experiment: Experiment, series: Sequence[Series]) -> list[FileLoad]:
    """Returns the loads of every file, the largest first, by loader and number of ranks."""
    names = [name for name in experiment.varied if name in ABOUT_LOADING]
    times: dict[tuple[str, str, str, str, int], dict[int, float]] = defaultdict(dict)
    sizes: dict[tuple[str, str], int] = {}
    for each in series:
        own = {name: each.settings[name] for name in names if name in each.settings}
        alike = describe({name: own[name] for name in own if name in ABOUT_FILES})
        for run in (run for point in each.timed for run in point.runs["run"]):
            method = describe(own) or f"loader {run['loader']}"
            for role, file in run.record.data.files.items() if run.record.data else ():
                if file.load is not None and file.load.max_s > MIN_IN_RATIO:
                    key = (role, method, run["loader"], alike, run["num_ranks"])
                    times[key][id(run)] = file.load.max_s
                    sizes[role, method] = file.file_bytes
    loads = [
        FileLoad(role, sizes[role, method] / MB, method, loader, alike, num, tuple(each.values()))
        for (role, method, loader, alike, num), each in times.items()
    ]
    return sorted(
        loads, key=lambda e: (-e.file_mb, e.role, e.loader != "original", e.method, e.num_ranks)
    )


def largest_files(loads: Sequence[FileLoad], num: int) -> list[tuple[str, float]]:
    """Returns roles and sizes in MB of the largest files, the largest first."""
    return list(dict.fromkeys((load.role, load.file_mb) for load in loads))[:num]


def _points(
    experiment: Experiment, which: Callable[[Point], object] = lambda point: len(point.runs)
) -> Iterable[tuple[Series, Point]]:
    return ((each, point) for each in experiment.series for point in each.points if which(point))


def _of_points(
    points: Iterable[tuple[Series, Point]], columns: Iterable[Column]
) -> tuple[Sequence[str], Sequence[tuple[Cell, ...]]]:
    """Returns headings, and a row per point."""
    columns = list(columns)
    headings = (each.heading if isinstance(each, Quantity) else each[0] for each in columns)
    rows = [
        (
            *(series.name, point.num_ranks),
            *(point.estimate(c) if isinstance(c, Quantity) else c[1](point) for c in columns),
        )
        for series, point in points
    ]
    return ("series", "ranks", *headings), rows


def _median(values: Iterable[float]) -> Cell:
    found = list(values)
    return estimate_median(found) if found else None


def _mean_rate(point: Point) -> Cell:
    """Returns all work over all time."""
    rates = point.values(SAMPLES)
    return harmonic_mean(rates) if rates else None


def _epochs(point: Point) -> Cell:
    """Returns the epochs of each rank, as "3 to 7" where some runs were stopped early."""
    found = sorted(set(known(point.runs, "epochs_per_rank")))
    if len(found) > 1:
        return f"{found[0]} to {found[-1]}"
    return found[0] if found else None
