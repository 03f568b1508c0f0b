"""Compares the loaders of a benchmark's files, as the paper's Tables 3 and 4 do.

Every measurement is a job of its own: fresh processes, which import what the method needs and then
meet at a barrier. The jobs of a method are

- one that is not counted, if the method has to prepare something first;
- one whose memory is sampled, which takes time, so that this job is not timed;
- one timed job for each repeat. The repeats take place in rounds of all methods, every second
  round in reverse order, so that a steady drift of the machine affects all methods alike.

All jobs must read the same values; otherwise no result is reported.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from candle_p1.bench.file_cache import PREPARATIONS
from candle_p1.bench.job import Job, Measurement, OnStart, run
from candle_p1.bench.memory import growth, peak_of_sum_bytes
from candle_p1.benchmark import find_benchmark
from candle_p1.data.cache import list_caches
from candle_p1.data.csv import LIBRARIES, READERS, installed_readers
from candle_p1.data.reader import loading
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.errors import DataError, ParameterError, SetupError, did_you_mean
from candle_p1.files import files_at
from candle_p1.reports.published import machines, published_loading, source
from candle_p1.reports.statistics import summarize

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from candle_p1.bench.memory import MemorySamples
    from candle_p1.data.reader import FileSet

BASELINES = ("original", "chunked")
"""The paper's methods, to which the others are compared."""
CACHED = "cached"
"""The method whose first load creates what later ones read."""


def choose_methods(text: str | None) -> list[str]:
    """Returns the methods in a comma-separated list; None selects all that are installed.

    Raises:
        ParameterError: A method is unknown.
        SetupError: A method needs a library that is not installed.
    """
    installed = installed_readers()
    if text is None:
        return installed
    names = list(dict.fromkeys(map(str.strip, text.split(","))))
    for name in names:
        if name not in READERS:
            near = did_you_mean(name, READERS)
            known = ", ".join(READERS)
            raise ParameterError(f"--methods: there is no {name!r}{near}; choose from {known}")
        if name not in installed:
            raise SetupError(
                f"{name} needs {LIBRARIES[name]}, which is not installed: install"
                " candle-p1[readers], or omit it from --methods"
            )
    return names


@dataclass(frozen=True)
class LoadJob(Job):
    """A job that loads the files of a benchmark once.

    Attributes:
        method: The loader.
        threads: Threads of each rank, for loaders that use threads; 0 is its share of the cores.
        purpose: "preparation", "memory" or "time".
        repeat: The number of a timed job, from 1; 0 for the others.
    """

    worker: ClassVar[str] = "candle_p1.bench.load_worker"
    own_flags: ClassVar[Mapping[str, str]] = {
        "loader": "use --methods",
        "load_threads": "use --threads",
    }

    method: str
    threads: int = 0
    purpose: str = "time"
    repeat: int = 0

    @property
    def name(self) -> str:
        """The loader."""
        return self.method

    @property
    def settings(self) -> dict[str, Any]:
        """The loader and its threads."""
        return {"loader": self.method, "load_threads": self.threads}

    def __str__(self) -> str:
        return f"{self.method}, {self.purpose}" + (f" {self.repeat}" if self.repeat else "")


@dataclass(frozen=True)
class LoadOutcome:
    """What a rank has measured.

    Attributes:
        elapsed_s: The time from the barrier to the end of loading.
        file_s: The time of each table, by role.
        threads: The number of threads that this rank may use.
        matrix_bytes: The size of the matrices that this rank has loaded.
        digests: Digests of the tables as they were read, by role.
        memory: Memory samples that begin before the barrier; empty if none were taken.
        bytes_read: Bytes read by system calls; None if the kernel does not count them.
        storage_bytes_read: Bytes read from storage; None likewise.
    """

    elapsed_s: float
    file_s: dict[str, float]
    threads: int
    matrix_bytes: int
    digests: dict[str, str]
    memory: MemorySamples
    bytes_read: int | None
    storage_bytes_read: int | None


Measured = list[tuple[LoadJob, list[LoadOutcome]]]
"""The jobs in their order, with the outcomes of their ranks."""


@dataclass(frozen=True)
class LoadComparison(Measurement):
    """What is compared, and under which conditions.

    Attributes:
        methods: Loaders, see `choose_methods`.
        num_repeats: Timed jobs of each method.
        file_cache: The state of the file cache before every job, "warm" or "cold".
    """

    job: LoadJob
    methods: Sequence[str] = ()
    num_repeats: int = 6
    file_cache: str = "warm"

    def schedule(self) -> list[LoadJob]:
        """Returns the jobs in their order."""
        jobs = []
        if CACHED in self.methods:
            jobs = [replace(self.job, method=CACHED, purpose="preparation")]
        jobs += [replace(self.job, method=each, purpose="memory") for each in self.methods]
        for repeat in range(1, self.num_repeats + 1):
            in_order = self.methods if repeat % 2 else self.methods[::-1]
            jobs += [replace(self.job, method=each, repeat=repeat) for each in in_order]
        return jobs

    def results(self, files: FileSet, on_start: OnStart) -> dict[str, Any]:
        """Runs all jobs; see Measurement."""
        jobs = self.schedule()
        measured: Measured = []
        for number, job in enumerate(jobs):
            on_start(number, len(jobs), str(job))
            paths = [file for path in files.paths.values() for file in files_at(path)]
            self._prepare_file_cache(job.method, paths)
            measured.append((job, run(job, self.num_ranks)))
            _check_same_values(measured[0], measured[-1], files.paths)
        return self._results(measured, files)

    def _prepare_file_cache(self, method: str, paths: Sequence[Path]) -> None:
        """Warms or cools the files that a method reads, including those it has prepared."""
        if method == CACHED:
            paths = [*paths, *self._caches_of(paths)]
        try:
            PREPARATIONS[self.file_cache](paths)
        except OSError as error:
            raise DataError(f"cannot read the file: {error.strerror}", error.filename) from error

    def _caches_of(self, paths: Sequence[Path]) -> list[Path]:
        """Returns the files in which the loader `cached` keeps the content of others."""
        params = replace(self.job, method=CACHED).bind(find_benchmark(self.job.benchmark))
        settings = loading(params, SerialCommunicator(), 1).cache
        sources = {str(path.resolve()) for path in paths}
        return [
            cache.path
            for directory in (settings.path, settings.stage_directory)
            for cache in (list_caches(directory) if directory else ())
            if cache.source and cache.source["path"] in sources
        ]

    def _results(self, measured: Measured, files: FileSet) -> dict[str, Any]:
        file_bytes = {
            role: sum(file.stat().st_size for file in files_at(path))
            for role, path in files.paths.items()
        }
        conditions = {
            "file_bytes": sum(file_bytes.values()),
            "num_ranks": self.num_ranks,
            "file_cache": self.file_cache,
        }
        results = [_result(method, measured) | conditions for method in self.methods]
        medians = {result["method"]: result["median_s"] for result in results}
        for result in results:
            result["speedup"] = {
                name: medians[name] / result["median_s"] for name in BASELINES if name in medians
            }
        digests = measured[0][1][0].digests
        return {
            "files": {
                role: {
                    "path": str(path),
                    "file_bytes": file_bytes[role],
                    "values_sha256": digests.get(role),
                }
                for role, path in files.paths.items()
            },
            "results": results,
            "jobs": [asdict(job) | {"elapsed_s": _elapsed_s(ranks)} for job, ranks in measured],
            "published": {
                "source": source(),
                "tables": published_tables(find_benchmark(self.job.benchmark).name),
            },
        }


def _check_same_values(
    first: tuple[LoadJob, list[LoadOutcome]],
    other: tuple[LoadJob, list[LoadOutcome]],
    paths: Mapping[str, Path],
) -> None:
    """Raises DataError if a rank of a job read different values from rank 0 of the first job."""
    expected = first[1][0].digests
    for rank, outcome in enumerate(other[1]):
        for role, path in paths.items():
            if outcome.digests.get(role) != expected.get(role):
                raise DataError(
                    f"{other[0].method} (rank {rank}) and {first[0].method}"
                    " (rank 0) read different values, so their times are not compared",
                    path,
                )


def _result(method: str, measured: Measured) -> dict[str, Any]:
    """Returns the combined result of all jobs of a method."""
    own = [(job, ranks) for job, ranks in measured if job.method == method]
    timed = [ranks for job, ranks in own if job.purpose == "time"]
    (sampled,) = (ranks for job, ranks in own if job.purpose == "memory")
    grown = [growth(rank.memory) for rank in sampled if rank.memory]
    return {
        "method": method,
        **summarize([_elapsed_s(ranks) for ranks in timed]),
        "per_rank_s": [[rank.elapsed_s for rank in ranks] for ranks in timed],
        "per_file_median_s": {
            role: statistics.median(max(rank.file_s[role] for rank in ranks) for ranks in timed)
            for role in timed[0][0].file_s
        },
        "peak_rank_bytes": max(peak_of_sum_bytes([rank]) for rank in grown) if grown else None,
        "peak_bytes": peak_of_sum_bytes(grown) if grown else None,
        "threads": max(rank.threads for rank in sampled),
        "matrix_bytes": max(rank.matrix_bytes for rank in sampled),
        "bytes_read": _median_sum(timed, "bytes_read"),
        "storage_bytes_read": _median_sum(timed, "storage_bytes_read"),
    }


def _elapsed_s(ranks: Iterable[LoadOutcome]) -> float:
    """Returns the time of a job, which is that of its slowest rank."""
    return max(rank.elapsed_s for rank in ranks)


def _median_sum(timed: Iterable[Iterable[LoadOutcome]], name: str) -> int | None:
    """Returns the median over jobs of the sum over ranks; None if a value is missing."""
    jobs = [[getattr(rank, name) for rank in ranks] for ranks in timed]
    if any(None in ranks for ranks in jobs):
        return None
    return statistics.median_low(map(sum, jobs))


def published_tables(benchmark: str) -> list[dict[str, Any]]:
    """Returns the values of the paper's Tables 3 and 4 for a benchmark; [] if there are none.

    Each entry has the number of its ``table``, the ``machine`` and its ``node``, and ``files``: for
    each role ("train", "test") the size ``file_mb`` as printed in the paper, in MB, and the times
    of the methods, ``original_s`` and ``chunked_s``.
    """
    tables: dict[int, dict[str, Any]] = {}
    for cell in published_loading(benchmark):
        facts = {"machine": cell.machine, "node": machines()[cell.machine], "files": {}}
        table = tables.setdefault(cell.table, {"table": cell.table, **facts})
        file = table["files"].setdefault(cell.role, {"file_mb": cell.file_mb})
        file[f"{cell.loader}_s"] = cell.seconds
    return list(tables.values())
