"""Measures how reading scales with ranks: the same load on several numbers of ranks, side by side.

A file system that answers slowly is imitated by a source that takes a given time for every block
more, so that the time of a load tells whether ranks read at the same time, on any number of cores.
Without a delay and with a cold file cache, the storage itself is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from candle_p1.bench import harness
from candle_p1.bench.harness import MB, Job, Measured, Result, megabytes, option
from candle_p1.bench.load import LoadTask
from candle_p1.bench.node_state import prepare_files
from candle_p1.bench.task import Outcome
from candle_p1.data.reader import FileSet, Reader, loading
from candle_p1.data.source import Source
from candle_p1.distributed.comm import Communicator
from candle_p1.files import files_at
from candle_p1.instrument.reading import summarize_reading
from candle_p1.parameters.parameter_set import ParameterSet
from candle_p1.records.types import FileReading
from candle_p1.text import count

LOADER = "parallel"
MAX_SHOWN_RANKS = 16


@dataclass(frozen=True, kw_only=True)
class ReadTask(LoadTask):
    """Loads the files of a benchmark once, from a source that may be slow."""

    own_flags: ClassVar[Mapping[str, str]] = {
        "loader": f"it is {LOADER}; candle-p1 bench load compares loaders",
        "load_threads": "use --threads",
    }

    method: str = LOADER
    delay_s: float = 0.0  # what reading each block takes longer
    num_blocks: int = 0  # of the largest file; 0: as in a run

    def open_reader(
        self, params: ParameterSet, files: FileSet, comm: Communicator, threads: int
    ) -> Reader:
        settings = loading(params, comm, threads)
        if self.delay_s:
            settings = replace(settings, source=slow_source(self.delay_s))
        if self.num_blocks:
            paths = [file for path in files.paths.values() for file in files_at(path)]
            largest_bytes = max(path.stat().st_size for path in paths)
            settings = replace(settings, block_bytes=max(1, -(-largest_bytes // self.num_blocks)))
        return Reader(files, settings)


def slow_source(delay_s: float) -> type[Source]:
    """Returns what reads a file, and takes a time more for every block."""

    class SlowSource(Source):
        def read(self, into: memoryview, start: int) -> None:
            """Reads, after a while."""
            time.sleep(delay_s)
            super().read(into, start)

    return SlowSource


@dataclass(kw_only=True)
class Read(harness.BenchmarkComparison):
    """Measure how the reading of BENCHMARK's files scales with ranks.

    Every load is a separate job; --delay simulates slow storage. All jobs divide
    the files into the same blocks, and must read the same values.
    """

    examples: ClassVar[Sequence[str]] = (
        "candle-p1 bench read nt3 --np 1,4 --delay 0.2",
        "candle-p1 bench read nt3 --np 1,2,4 --delay 0 --cold --size full",
    )

    num_ranks: Any = option(
        "1,4", "Numbers of ranks; times are divided by that of the first one.", "--np", is_list=True
    )
    delay_s: float = option(
        0.2, "Extra time that reading each block takes, in s.", "--delay", within=(0, 60)
    )
    num_blocks: int = option(
        16,
        "Blocks of the largest file; 0: their size is that of a run.",
        "--blocks",
        within=(0, 10**5),
    )
    threads: int = harness.count_option(
        1, "Threads of a rank, each with blocks of its own.", "--threads"
    )
    num_repeats: int = harness.rounds_option(3, "Loads with each number of ranks", "--repeats")
    cold: bool = option(False, "Drop the files from the file cache before a load.")

    def jobs(self) -> list[Job]:
        more = {"delay_s": self.delay_s, "num_blocks": self.num_blocks, "threads": self.threads}
        jobs = [
            replace(self.job(count(number, "rank"), ReadTask, **more), num_ranks=number)
            for number in self.num_ranks
        ]
        return harness.rounds(jobs, self.num_repeats)

    def run(self, job: Job) -> list[Outcome]:
        prepare_files("cold" if self.cold else "warm", self.paths())
        return super().run(job)

    def report(self, measured: Measured) -> dict[str, Any]:
        results = super().report(measured)["results"]
        for result in results:
            result["ratio"] = result["median_s"] / results[0]["median_s"]
        return {
            "files": self.file_bytes(),
            "delay_s": self.delay_s,
            "num_blocks": self.num_blocks,
            "threads": self.threads,
            "file_cache": "cold" if self.cold else "warm",
            "results": results,
        }

    def result(self, variant: str, measured: Measured) -> Result:
        jobs = measured.of(variant)
        readings = [_readings(job) for job in jobs]
        together = [facts for reading in readings for facts in reading.values()]
        num_ranks, union_s = len(jobs[0]), sum(facts.union_s for facts in together)
        busy_s = sum(facts.busy.mean_s * num_ranks for facts in together)
        return {
            "num_ranks": num_ranks,
            **harness.times(jobs),
            "mean_ranks": busy_s / union_s if union_s else None,
            "reading": {role: each.model_dump(mode="json") for role, each in readings[-1].items()},
            "per_rank": {role: _per_rank(each) for role, each in readings[-1].items()},
        }

    def render(self, report: harness.Report) -> harness.Parts:
        results, blocks = report["results"], report["num_blocks"]
        first = results[0]
        size = f"of 1/{blocks} of the largest file" if blocks else "as in a run"
        delay = f", {report['delay_s']:g} s extra per block" if report["delay_s"] else ""
        yield (
            f"{report['benchmark']}: reading {megabytes(sum(report['files'].values()))} MB in"
            f" blocks {size}{delay}, file cache {report['file_cache']},"
            f" {count(report['threads'], 'thread')} per rank, {count(first['repeats'], 'repeat')}"
        )
        columns: harness.Columns = {
            "ranks": "num_ranks",
            "median\n(s)": "median_s",
            "{spread}\n(s)": harness.interval,
            f"time over that of\n{count(first['num_ranks'], 'rank')}": "ratio",
            "reading at\na time": "mean_ranks",
        }
        yield harness.table(results, columns)
        most = max(results, key=lambda result: result["num_ranks"])
        role = max(most["reading"], key=lambda role: report["files"][role], default=None)
        if role is not None and most["num_ranks"] > 1:
            yield f"when the ranks read {role}, in s, in the last job with the most"
            yield from _ranks(most["per_rank"][role])
        yield from harness.remarks(report)


VERB = Read


def _readings(job: Sequence[Outcome]) -> dict[str, FileReading]:
    found = {
        role: summarize_reading([outcome["reads"][role] for outcome in job], 0.0)
        for role in job[0]["reads"]
    }
    return {role: facts for role, facts in found.items() if facts is not None}


def _per_rank(facts: FileReading) -> dict[str, list[float | None]]:
    """Returns the raw values of each rank; None for a rank that has not read."""
    names = {"begin_s": "begin", "end_s": "end", "busy_s": "busy", "num_bytes": "read"}
    found = {name: getattr(facts, of).values for name, of in names.items()}
    return {
        name: [None if each != each else each for each in values.tolist()]
        for name, values in found.items()
        if values is not None
    }


def _ranks(values: Mapping[str, Sequence[Any]]) -> harness.Parts:
    rows = [
        {"rank": rank, **dict(zip(values, of_rank, strict=True))}
        for rank, of_rank in enumerate(zip(*values.values(), strict=True))
    ]

    def seconds(key: str) -> Callable[[Mapping[str, Any]], str]:
        return lambda row: "none" if row[key] is None else f"{row[key]:.3f}"

    columns: harness.Columns = {
        "rank": "rank",
        "first read": seconds("begin_s"),
        "last read ended": seconds("end_s"),
        "reading": seconds("busy_s"),
        "MB": ("num_bytes", MB),
    }
    found = harness.table(rows[:MAX_SHOWN_RANKS], columns)
    if len(rows) > MAX_SHOWN_RANKS:
        found.add_row("…")
    yield found
