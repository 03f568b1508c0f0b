"""Compares the methods of loading a benchmark's files, as the paper's Tables 3 and 4 do.

Every measurement is a job of its own: fresh processes, which import what the method needs and then
meet at a barrier. The jobs of a method are

- one that is not counted, where a method has to prepare something first;
- one whose memory is sampled. The samples cost time, so this one is not timed;
- as many timed ones as there are repeats, in rounds through all methods, every second round in
  reverse order: a steady drift of the machine hits all alike.

All jobs must read the same values, or none is reported.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from candle_p1.bench.file_cache import PREPARATIONS
from candle_p1.bench.job import run
from candle_p1.bench.load_job import LoadJob, LoadOutcome, bind
from candle_p1.bench.measurement import Measurement, Starting, unheard
from candle_p1.bench.memory import growth, peak_bytes, peak_of_sum_bytes
from candle_p1.benchmark import find_benchmark
from candle_p1.data.cache import list_caches
from candle_p1.data.csv import LIBRARIES, READERS, installed_readers
from candle_p1.data.reader import loading
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.errors import DataError, ParameterError, SetupError, did_you_mean
from candle_p1.records import environment
from candle_p1.records.record import utc_now
from candle_p1.reports.published import machines, published_loading, source
from candle_p1.reports.statistics import summarize

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from candle_p1.benchmark import Benchmark
    from candle_p1.data.reader import FileSet
    from candle_p1.parameters.parameter_set import ParameterSet

BASELINES = ("original", "chunked")
"""The paper's methods, to which the others are compared."""
PREPARED_BY_A_LOAD = frozenset({"cached"})
"""Methods whose first load makes what later ones read."""


def choose_methods(text: str | None) -> list[str]:
    """Returns the methods that a list separated by commas names; all that are installed of None.

    Raises:
        ParameterError: One is unknown, or none is named.
        SetupError: One needs a library that is not installed.
    """
    installed = installed_readers()
    if text is None:
        return installed
    names = list(dict.fromkeys(name for name in map(str.strip, text.split(",")) if name))
    if not names:
        raise ParameterError(f"--methods names none: choose among {', '.join(READERS)}")
    for name in names:
        if name not in READERS:
            raise ParameterError(
                f"there is no method {name!r}{did_you_mean(name, READERS)}: choose among"
                f" {', '.join(READERS)}"
            )
        if name not in installed:
            raise SetupError(
                f"{name} needs {LIBRARIES[name]}, which is not installed: install"
                " candle-p1[readers], or leave it out of --methods"
            )
    return names


@dataclass(frozen=True)
class Step:
    """A job of a comparison.

    Attributes:
        method: The loader.
        purpose: "preparation", "memory" or "time".
        repeat: Of the timed ones, from 1; 0 of the others.
    """

    method: str
    purpose: str
    repeat: int = 0

    def __str__(self) -> str:
        return f"{self.method}, {self.purpose}" + (f" {self.repeat}" if self.repeat else "")


Measured = list[tuple[Step, list[LoadOutcome]]]
"""Jobs with what their ranks have measured, in their order."""


def schedule(methods: Sequence[str], num_repeats: int) -> list[Step]:
    """Returns the jobs of a comparison in their order."""
    steps = [Step(method, "preparation") for method in methods if method in PREPARED_BY_A_LOAD]
    steps += [Step(method, "memory") for method in methods]
    for repeat in range(1, num_repeats + 1):
        in_order = methods if repeat % 2 else methods[::-1]
        steps += [Step(method, "time", repeat) for method in in_order]
    return steps


@dataclass(frozen=True)
class Comparison(Measurement):
    """What is compared, and under which conditions.

    Attributes:
        methods: Loaders, see `choose_methods`.
        threads: Of each rank, for loaders that have threads; 0 is its share of the cores.
        num_repeats: Timed jobs of each method.
        file_cache: "warm" or "cold", before every job.
    """

    job = LoadJob

    methods: Sequence[str] = ()
    threads: int = 0
    num_repeats: int = 6
    file_cache: str = "warm"

    def bind(self, benchmark: Benchmark) -> ParameterSet:
        """Returns the parameters of the first method."""
        return bind(benchmark, self.flags, self.methods[0], self.threads)

    def measure(self, files: FileSet, starting: Starting = unheard) -> dict[str, Any]:
        """Runs all jobs; see Measurement.

        Raises:
            CandleError: A job cannot load, or reads other values than the first; the files cannot
                be dropped from the file cache.
            RuntimeError: A job has failed otherwise.
        """
        started, steps = utc_now(), schedule(self.methods, self.num_repeats)
        measured: Measured = []
        for number, step in enumerate(steps):
            starting(number, len(steps), str(step))
            self._prepare_file_cache(step.method, list(files.paths.values()))
            sampled = step.purpose == "memory"
            job = LoadJob(self.benchmark, self.flags, step.method, self.threads, sampled)
            outcomes = run(job, self.num_ranks)
            measured.append((step, [LoadOutcome(**outcome) for outcome in outcomes]))
            _check_same_values(measured[0], measured[-1], files.paths)
        return self._report(measured, files) | {"started": started}

    def _prepare_file_cache(self, method: str, paths: Sequence[Path]) -> None:
        """Warms or cools the files that a method reads, those it has prepared among them."""
        if method in PREPARED_BY_A_LOAD:
            paths = [*paths, *self._caches_of(paths)]
        try:
            PREPARATIONS[self.file_cache](paths)
        except OSError as error:
            raise DataError(f"cannot read the file: {error.strerror}", error.filename) from error

    def _caches_of(self, paths: Sequence[Path]) -> list[Path]:
        """Returns the files in which the loader cached keeps what it made of others."""
        params = bind(find_benchmark(self.benchmark), self.flags, "cached", self.threads)
        settings = loading(params, SerialCommunicator(), 1).cache
        sources = {str(path.resolve()) for path in paths}
        return [
            cache.path
            for directory in (settings.path, settings.stage_directory)
            for cache in (list_caches(directory) if directory else ())
            if cache.source and cache.source["path"] in sources
        ]

    def _report(self, measured: Measured, files: FileSet) -> dict[str, Any]:
        file_bytes = {role: path.stat().st_size for role, path in files.paths.items()}
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
        name = find_benchmark(self.benchmark).name
        return {
            "benchmark": name,
            "command": sys.argv,
            "synthetic": files.synthetic,
            "files": {
                role: {
                    "path": str(path),
                    "file_bytes": file_bytes[role],
                    "values_sha256": measured[0][1][0].digests.get(role),
                }
                for role, path in files.paths.items()
            },
            "results": results,
            "jobs": [asdict(step) | {"elapsed_s": _elapsed_s(ranks)} for step, ranks in measured],
            "machine": environment.capture(),
            "published": {"source": source(), "tables": published_tables(name)},
        }


def _check_same_values(
    first: tuple[Step, list[LoadOutcome]],
    other: tuple[Step, list[LoadOutcome]],
    paths: Mapping[str, Path],
) -> None:
    """Raises DataError if a rank of a job has read other values than rank 0 of the first job."""
    expected = first[1][0].digests
    for rank, outcome in enumerate(other[1]):
        for role, path in paths.items():
            if outcome.digests.get(role) != expected.get(role):
                raise DataError(
                    f"{other[0].method} (rank {rank}) has read other values than"
                    f" {first[0].method} (rank 0): no speed of a wrong result is shown",
                    path,
                )


def _result(method: str, measured: Measured) -> dict[str, Any]:
    """Returns what the jobs of a method say together."""
    jobs: dict[str, list[list[LoadOutcome]]] = {"preparation": [], "memory": [], "time": []}
    for step, ranks in measured:
        if step.method == method:
            jobs[step.purpose].append(ranks)
    timed, (sampled,) = jobs["time"], jobs["memory"]
    grown = [growth(rank.memory) for rank in sampled if rank.memory]
    return {
        "method": method,
        **summarize([_elapsed_s(ranks) for ranks in timed]),
        "per_rank_s": [[rank.elapsed_s for rank in ranks] for ranks in timed],
        "per_file_median_s": {
            role: statistics.median(max(rank.file_s[role] for rank in ranks) for ranks in timed)
            for role in timed[0][0].file_s
        },
        "peak_rank_bytes": max(map(peak_bytes, grown)) if grown else None,
        "peak_bytes": peak_of_sum_bytes(grown) if grown else None,
        "threads": max(rank.threads for rank in sampled),
        "matrix_bytes": max(rank.matrix_bytes for rank in sampled),
        "bytes_read": _typical([[rank.bytes_read for rank in ranks] for ranks in timed]),
        "storage_bytes_read": _typical(
            [[rank.storage_bytes_read for rank in ranks] for ranks in timed]
        ),
    }


def _elapsed_s(ranks: Iterable[LoadOutcome]) -> float:
    """Returns the time of a job: that of its slowest rank, for all start at one barrier."""
    return max(rank.elapsed_s for rank in ranks)


def _typical(bytes_of_jobs: Iterable[Sequence[int | None]]) -> int | None:
    """Returns the median over jobs of the sum over ranks; None if a rank has none."""
    of_jobs = [list(ranks) for ranks in bytes_of_jobs]
    if any(None in ranks for ranks in of_jobs):
        return None
    return statistics.median_low([sum(filter(None, ranks)) for ranks in of_jobs])


def published_tables(benchmark: str) -> list[dict[str, Any]]:
    """Returns what the paper's Tables 3 and 4 say of a benchmark; [] if nothing.

    Each entry has the number of its ``table``, the ``machine`` and its ``node``, and ``files``: by
    role ("train", "test") the size ``file_mb`` as the paper writes it, in MB, and the seconds of a
    method, ``original_s`` and ``chunked_s``.
    """
    tables: dict[int, dict[str, Any]] = {}
    for cell in published_loading(benchmark):
        table = tables.setdefault(
            cell.table,
            {
                "table": cell.table,
                "machine": cell.machine,
                "node": machines()[cell.machine],
                "files": {},
            },
        )
        file = table["files"].setdefault(cell.role, {"file_mb": cell.file_mb})
        file[f"{cell.loader}_s"] = cell.seconds
    return list(tables.values())
