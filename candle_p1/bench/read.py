"""Measures how reading scales with ranks: the same load on several numbers of ranks, side by side.

A file system that answers slowly is imitated by a source that takes a given time for every block
more. Then the time of a load is mainly that of its reads, and tells whether ranks read at the same
time, on a machine with any number of cores. Without a delay and with a cold file cache, the storage
itself is measured.

Every load is a job of its own. All jobs divide the files into the same blocks, and read the same
values; otherwise no result is reported.

What the machine itself costs, whose ranks have the same memory and caches, is measured by ranks
that share nothing: each loads its own part of the files, without a message to the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from candle_p1.bench.file_cache import PREPARATIONS
from candle_p1.bench.job import Job, Measurement, OnStart, run
from candle_p1.errors import DataError, ParameterError
from candle_p1.files import files_at
from candle_p1.instrument.reading import summarize_reading
from candle_p1.reports.statistics import summarize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from candle_p1.data.reader import FileSet
    from candle_p1.records.types import ReadingFacts

LOADER = "parallel"
MAX_RANKS = 1024
LEAST_DIVIDED_BYTES = 1 << 20
"""What is smaller takes no time, and its lines may be looked up by those of other files."""


def choose_ranks(text: str, flag: str = "--np", most: int = MAX_RANKS) -> list[int]:
    """Returns the numbers of ranks in a comma-separated list, each once, in its order.

    Args:
        text: The list.
        flag: The flag that it is the value of.
        most: The largest number.

    Raises:
        ParameterError: One of them is not a number of ranks.
    """
    numbers = []
    for word in text.split(","):
        if not word.strip().isascii() or not word.strip().isdigit():
            raise ParameterError(
                f"{flag}: {word.strip()!r} is not a number of ranks, as in {flag} 1,4"
            )
        numbers.append(int(word))
        if not 1 <= numbers[-1] <= most:
            raise ParameterError(f"{flag}: {word.strip()} is not between 1 and {most}")
    return list(dict.fromkeys(numbers))


def is_divided(path: Path) -> bool:
    """Returns whether ranks that share nothing load a part of this file each."""
    return path.is_file() and path.stat().st_size >= LEAST_DIVIDED_BYTES


@dataclass(frozen=True)
class ReadJob(Job):
    """A job that loads the files of a benchmark once.

    Attributes:
        delay_s: Extra time that reading each block takes.
        num_blocks: Into how many blocks the largest file is divided; 0: as in a run.
        threads: Threads of each rank.
        apart: Whether each rank loads its part of the files, by itself.
    """

    worker: ClassVar[str] = "candle_p1.bench.read_worker"
    own_flags: ClassVar[Mapping[str, str]] = {
        "loader": f"it is {LOADER}; candle-p1 bench load compares loaders",
        "load_threads": "use --threads",
    }

    delay_s: float = 0.0
    num_blocks: int = 1
    threads: int = 1
    apart: bool = False

    @property
    def name(self) -> str:
        """What is measured."""
        return "reading"

    @property
    def settings(self) -> dict[str, Any]:
        """The loader and its threads."""
        return {"loader": LOADER, "load_threads": self.threads}


@dataclass(frozen=True)
class ReadOutcome:
    """What a rank has measured.

    Attributes:
        elapsed_s: The time from the barrier to the end of loading.
        reads: Its reads, by role; see `candle_p1.instrument.reading.ReadLog.since_zero`.
        digests: Digests of the tables as they were read, by role.
    """

    elapsed_s: float
    reads: dict[str, NDArray[np.float64]]
    digests: dict[str, str]


@dataclass(frozen=True)
class ReadComparison(Measurement):
    """What is compared, and under which conditions.

    Attributes:
        ranks: The numbers of ranks, of which `num_ranks` is the largest; times are divided by that
            of the first.
        num_repeats: Jobs of each number of ranks.
        file_cache: The state of the file cache before every job, "warm" or "cold".
        apart: Whether ranks that share nothing are measured, too.
    """

    job: ReadJob
    ranks: Sequence[int] = (1,)
    num_repeats: int = 3
    file_cache: str = "warm"
    apart: bool = False

    def results(self, files: FileSet, on_start: OnStart) -> dict[str, Any]:
        """Runs all jobs, in rounds of all numbers of ranks; see Measurement.

        Raises:
            CandleError: See Measurement; or ranks would have no parts of the files.
        """
        if self.apart and not any(map(is_divided, files.paths.values())):
            raise ParameterError(
                f"--apart divides files of {LEAST_DIVIDED_BYTES >> 20} MiB and more, and there is"
                " none: give --size full, or larger files"
            )
        paths = [file for path in files.paths.values() for file in files_at(path)]
        kinds = [(number, False) for number in self.ranks]
        kinds += [(number, True) for number in self.ranks if self.apart and number > 1]
        jobs = kinds * self.num_repeats
        measured: dict[tuple[int, bool], list[list[ReadOutcome]]] = {kind: [] for kind in kinds}
        for done, (num_ranks, apart) in enumerate(jobs):
            on_start(done, len(jobs), f"{num_ranks} ranks" + ", apart" * apart)
            try:
                PREPARATIONS[self.file_cache](paths)
            except OSError as error:
                raise DataError(
                    f"cannot read the file: {error.strerror}", error.filename
                ) from error
            outcomes = run(replace(self.job, apart=apart), num_ranks)
            measured[num_ranks, apart].append(outcomes)
            if not apart:
                _check_same_values(measured[kinds[0]][0][0], outcomes, files)
        results = [_result(number, measured[number, False]) for number in self.ranks]
        for result in results:
            first_s, jobs_apart = results[0]["median_s"], measured.get((result["num_ranks"], True))
            result["ratio"] = result["median_s"] / first_s
            result["apart"] = None
            if jobs_apart is not None:
                times = _times(jobs_apart)
                result["apart"] = {**times, "ratio": times["median_s"] / first_s}
        return {
            "files": {
                role: sum(file.stat().st_size for file in files_at(path))
                for role, path in files.paths.items()
            },
            "delay_s": self.job.delay_s,
            "num_blocks": self.job.num_blocks,
            "threads": self.job.threads,
            "file_cache": self.file_cache,
            "results": results,
        }


def _check_same_values(first: ReadOutcome, others: Sequence[ReadOutcome], files: FileSet) -> None:
    for rank, outcome in enumerate(others):
        for role, path in files.paths.items():
            if outcome.digests.get(role) != first.digests.get(role):
                raise DataError(
                    f"rank {rank} of {len(others)} read other values than the first job, so the"
                    " times are not compared",
                    path,
                )


def _times(jobs: Sequence[Sequence[ReadOutcome]]) -> dict[str, Any]:
    """Returns the times of jobs, of which each takes as long as its slowest rank."""
    return summarize([max(outcome.elapsed_s for outcome in job) for job in jobs])


def _result(num_ranks: int, jobs: Sequence[Sequence[ReadOutcome]]) -> dict[str, Any]:
    """Returns the result of all jobs with a number of ranks."""
    readings = [_readings(job) for job in jobs]
    together = [each for reading in readings for each in reading.values()]
    union_s = sum(each.union_s for each in together)
    busy_s = sum(each.busy.mean_s * num_ranks for each in together)
    return {
        "num_ranks": num_ranks,
        **_times(jobs),
        "mean_ranks": busy_s / union_s if union_s else None,
        "reading": {role: facts.model_dump(mode="json") for role, facts in readings[-1].items()},
        "per_rank": {role: _per_rank(facts) for role, facts in readings[-1].items()},
    }


def _readings(job: Sequence[ReadOutcome]) -> dict[str, ReadingFacts]:
    """Returns, as the record of a run does, when the ranks read each table, from its beginning."""
    found = {
        role: summarize_reading([outcome.reads[role] for outcome in job], 0.0)
        for role in job[0].reads
    }
    return {role: facts for role, facts in found.items() if facts is not None}


def _per_rank(facts: ReadingFacts) -> dict[str, list[float | None]]:
    """Returns the raw values of each rank; None for a rank that has not read."""
    spreads = {
        "begin_s": facts.begin,
        "end_s": facts.end,
        "busy_s": facts.busy,
        "num_bytes": facts.read,
    }
    values = {name: spread.values for name, spread in spreads.items()}
    return {
        name: [None if each != each else each for each in found.tolist()]
        for name, found in values.items()
        if found is not None
    }
