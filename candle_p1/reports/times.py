"""Loading times of single files, by loader, as in the paper's Tables 3 and 4."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from candle_p1.reports.experiments import (
    MIN_IN_RATIO,
    RANKS_PER_NODE,
    THREADS,
    Experiment,
    Series,
    describe,
)
from candle_p1.reports.statistics import Estimate, estimate_median

ABOUT_FILES = ("data", "size", THREADS, RANKS_PER_NODE)
"""Settings in which loads have to agree to be compared."""

ABOUT_LOADING = ("loader", "load_threads", "staged", *ABOUT_FILES)
"""Settings that affect loading; runs that differ only in others are counted together."""

MB = 1e6


@dataclass(frozen=True)
class FileLoad:
    """The loads of one file by one loader on one number of ranks.

    Attributes:
        role: train, test, ….
        method: The loader, and other settings that affect loading and vary, in words.
        alike: The settings of ABOUT_FILES that vary, in words.
        seconds: The times of the slowest rank.
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
