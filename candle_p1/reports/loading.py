"""Loading times of single files, by loader: what the paper's Tables 3 and 4 have."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from candle_p1.reports.points import THREADS, describe
from candle_p1.statistics import estimate_median

if TYPE_CHECKING:
    from collections.abc import Sequence

    from candle_p1.reports.points import Experiment, Series
    from candle_p1.statistics import Estimate

ABOUT_LOADING = ("loader", "load_threads", THREADS, "data", "size")
"""Settings that bear on loading; runs that differ in others alone count together."""

MB = 1e6


@dataclass(frozen=True)
class FileLoad:
    """One file, one loader, one number of ranks.

    Attributes:
        role: train, test, ….
        file_mb: The file's size, in MB of 10^6 bytes.
        method: The loader, and what else differs among the runs and bears on loading.
        loader: The loader alone.
        num_ranks: Their number.
        seconds: The slowest rank's times, in s.
        estimate: Their median.
    """

    role: str
    file_mb: float
    method: str
    loader: str
    num_ranks: int
    seconds: tuple[float, ...]
    estimate: Estimate


def file_loads(experiment: Experiment, series: Sequence[Series]) -> list[FileLoad]:
    """Returns the loads of every file, the largest first, by loader and number of ranks."""
    names = [name for name in experiment.varied if name in ABOUT_LOADING]
    times: dict[tuple[str, str, str, int], dict[str, float]] = defaultdict(dict)
    sizes: dict[tuple[str, str], int] = {}
    for each in series:
        method = describe({name: each.settings[name] for name in names if name in each.settings})
        for point in each.timed:
            for run in point.runs:
                data = run.record["data"]
                for role, file in data["files"].items():
                    if "load" in file:
                        key = (role, method or f"loader {data['loader']}", data["loader"])
                        times[(*key, point.num_ranks)][str(run.path)] = file["load"]["max_s"]
                        sizes[key[:2]] = file["file_bytes"]
    loads = [
        FileLoad(
            role,
            sizes[role, method] / MB,
            method,
            loader,
            num_ranks,
            tuple(seconds.values()),
            estimate_median(list(seconds.values())),
        )
        for (role, method, loader, num_ranks), seconds in times.items()
    ]
    return sorted(
        loads,
        key=lambda load: (
            -load.file_mb,
            load.role,
            load.loader != "original",
            load.method,
            load.num_ranks,
        ),
    )


def largest_files(loads: Sequence[FileLoad], num: int) -> list[str]:
    """Returns the roles of the largest files, the largest first."""
    return list(dict.fromkeys(load.role for load in loads))[:num]
