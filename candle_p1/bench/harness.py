"""Comparisons by measurement: jobs in fresh processes, in rounds, compared only where they agree.

A verb of ``candle-p1 bench`` is one module of this package, whose `VERB` is a subclass of
Comparison. The fields of the class are the options of the command, and its docstring is the help;
CONTRIBUTING.md has an example.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from rich.table import Table

from candle_p1.bench.task import BenchmarkTask, OtherEnvironment, Outcome, run
from candle_p1.benchmark import find_benchmark
from candle_p1.cluster.launchers import check_alone, on_this_machine
from candle_p1.data.reader import FileSet
from candle_p1.errors import DataError, ParameterError, did_you_mean
from candle_p1.files import files_at
from candle_p1.records import environment
from candle_p1.records.record import utc_now
from candle_p1.records.tables import as_cells, empty_table
from candle_p1.reports.statistics import MIN_VALUES, median_interval, summarize
from candle_p1.text import count
from candle_p1.training.setup import locate_files

MB, GIGA = 1e6, 1e9
TIME, MEMORY = "time", "memory"
"""Purposes of jobs: those whose times are compared, and those whose memory is sampled."""

Result = dict[str, Any]
Report = Mapping[str, Any]
Parts = Iterator[str | Table]
Columns = Mapping[str, str | tuple[str, float] | Callable[[Any], Any]]
OnStart = Callable[[int, int, str], None]
"""Called before each job with the number of jobs done, that of all jobs, and the job's name."""
OnResult = Callable[[str, Report], None]
"""Called where results come one by one: with a line about one, and the report so far."""
Progress = Callable[[str, int, int], None]
"""Called while files are made; see candle_p1.training.setup.locate_files."""


def option(default: Any, text: str, flag: str | None = None, **more: Any) -> Any:
    """Returns a field of a Comparison that is an option of its command; see candle_p1.cli.bench.

    ``more`` is ``choices``; ``within``, the least and the largest number; ``is_list`` for positive
    integers; ``is_file`` for a file to write; ``is_readable`` for one to read; ``is_directory``;
    ``is_argument``; ``complete``, what to complete; or what `click.Option` takes.
    """
    return field(default=default, metadata={"help": text, "flag": flag, **more})


def count_option(default: int | None, text: str, flag: str) -> Any:
    """Returns an option that takes a positive integer, as large as one can wait for."""
    return option(default, text, flag, within=(1, 100_000))


def rounds_option(default: int, text: str, flag: str = "--rounds", of: str = "") -> Any:
    """Returns the option for the number of rounds, whose help says how many an interval needs."""
    needs = f"a 95 % interval of the median needs at least {MIN_VALUES}{of}."
    return count_option(default, f"{text}; {needs}", flag)


def choose_names(text: str, known: Iterable[str], flag: str) -> list[str]:
    """Returns the names of a comma-separated list, each once.

    Raises:
        ParameterError: One of them is not known.
    """
    names = list(dict.fromkeys(word.strip() for word in text.split(",")))
    for name in names:
        if name not in known:
            near = did_you_mean(name, known)
            raise ParameterError(f"{flag}: {name!r} is none of {', '.join(known)}{near}")
    return names


@dataclass(frozen=True)
class Job:
    """A job of a comparison: what each rank does for a variant, on ranks of this machine."""

    variant: str
    task: Any
    num_ranks: int = 1
    purpose: str = TIME  # another one for a job that is not timed
    round: int = 0  # from 1; 0 for a job that is in no round
    other: OtherEnvironment | None = None  # None: in this one

    def changed(self, purpose: str = TIME, **task: Any) -> Job:
        """Returns a job of another purpose, with some attributes of the task changed."""
        return replace(self, purpose=purpose, task=replace(self.task, **task))

    def __str__(self) -> str:
        return f"{self.variant}, {self.purpose}" + (f" {self.round}" if self.round else "")


def rounds(jobs: Sequence[Job], num_rounds: int) -> list[Job]:
    """Returns jobs in rounds, every second one reversed, so that a drift affects all alike."""
    return [
        replace(job, round=number)
        for number in range(1, num_rounds + 1)
        for job in (jobs if number % 2 else jobs[::-1])
    ]


def sampled(jobs: Sequence[Job]) -> list[Job]:
    """Returns further jobs, of tasks with `samples_memory`, whose memory is sampled."""
    return [job.changed(MEMORY, samples_memory=True) for job in jobs]


class Measured(list[tuple[Job, list[Outcome]]]):
    """The jobs in their order, with the outcome of each rank."""

    def of(self, variant: str, purpose: str = TIME) -> list[list[Outcome]]:
        """Returns the outcomes of the jobs of a variant."""
        return [o for job, o in self if (job.variant, job.purpose) == (variant, purpose)]

    def add(self, job: Job, outcomes: list[Outcome]) -> None:
        """Adds a job; raises DataError if its ``checked`` values are not those of the first one."""
        self.append((job, outcomes))
        known = [(j.variant, o[0]["checked"]) for j, o in self if "checked" in o[0]]
        first, expected = known[0] if known else ("", {})
        for rank, outcome in enumerate(outcomes):
            found: Any = outcome.get("checked", expected)
            for what, value in expected.items():
                if found.get(what) != value:
                    raise DataError(
                        f"{job.variant} (rank {rank}) and {first} (rank 0) have different values,"
                        " so their times are not compared",
                        what,
                    )


@dataclass(kw_only=True)
class Comparison:
    """What is compared, and under which conditions: the fields are options of the command."""

    examples: ClassVar[Sequence[str]] = ()
    on_result: OnResult = field(default=lambda line, report: None, init=False)

    def jobs(self) -> list[Job]:
        """Returns the jobs in their order; raises CandleError if an option is wrong."""
        raise NotImplementedError

    def prepare(self, progress: Progress | None = None) -> list[str]:
        """Checks the options and makes what is missing; returns what to know in advance.

        Raises:
            CandleError: An option is wrong, or ranks cannot be started.
        """
        check_alone()
        return on_this_machine(max(job.num_ranks for job in self.jobs()), []).notes

    def run(self, job: Job) -> list[Outcome]:
        """Runs a job, after what has to be prepared for it; returns the outcome of each rank."""
        python = job.other.python if job.other else sys.executable
        return run(job.task, job.num_ranks, job.variant, python)

    def measure(self, on_start: OnStart) -> dict[str, Any] | None:
        """Runs all jobs; returns what ``--json`` writes: the conditions, and ``results``.

        Where a launcher starts this command on several ranks, others than rank 0 return None.

        Raises:
            CandleError: A job cannot do its work, or its results must not be compared.
            RuntimeError: A job failed in another way.
        """
        started, measured, jobs = utc_now(), Measured(), self.jobs()
        for done, job in enumerate(jobs):
            on_start(done, len(jobs), str(job))
            measured.add(job, self.run(job))
        return self.report(measured) | self.conditions() | envelope(started)

    def conditions(self) -> dict[str, Any]:
        """Returns what else the report says, whatever was measured."""
        return {}

    def report(self, measured: Measured) -> dict[str, Any]:
        """Returns what was measured: ``results``, one of each variant."""
        variants = dict.fromkeys(job.variant for job, _ in measured if job.purpose == TIME)
        return {"results": [self.result(variant, measured) for variant in variants]}

    def result(self, variant: str, measured: Measured) -> Result:
        """Returns the result of a variant, whose jobs take as long as their slowest ranks."""
        return {"variant": variant, **times(measured.of(variant))}

    def render(self, report: Report) -> Parts:
        """Yields the lines and tables that show a report."""
        columns: Columns = {
            "variant": "variant",
            "median (s)": "median_s",
            "{spread} (s)": interval,
        }
        yield table(report["results"], columns)
        yield from remarks(report)

    def markdown(self, report: Report) -> str:
        """Returns a page with what `render` shows, the command, the date and the machine."""
        made = report["machine"]
        versions = {"Python": made["python"], **made["packages"]}
        machine = (
            f"{made['cpu']}, {made['num_cores']} of {count(made['node_cores'], 'core')},"
            f" {made['memory_bytes'] / 2**30:.0f} GiB of memory, {made['system']}"
        )
        parts = [
            f"# {shlex.join(['candle-p1', *report['command'][1:]])}",
            f"Measured on {report['started'][:10]}: {machine}.",
            ", ".join(f"{name} {version}" for name, version in versions.items()),
            *(part if isinstance(part, str) else _markdown(part) for part in self.render(report)),
        ]
        return "\n\n".join(parts) + "\n"

    def draw(self, report: Report) -> Iterator[str]:
        """Writes the pictures that the options ask for; yields a line for each."""
        yield from ()


@dataclass(kw_only=True)
class BenchmarkComparison(Comparison):
    """A comparison of tasks of one benchmark, whose files are known after `prepare`."""

    benchmark: str
    flags: Sequence[str] = ()
    num_ranks: Any = count_option(1, "Ranks, all on this machine.", "--np")
    files: FileSet = field(default_factory=lambda: FileSet.at({}), init=False)

    def job(self, variant: str, kind: type[BenchmarkTask], /, **more: Any) -> Job:
        """Returns a job of a variant on all ranks, whose task has further attributes."""
        task = kind(benchmark=self.benchmark, flags=self.flags, **more)
        return Job(variant, task, self.num_ranks)

    def prepare(self, progress: Progress | None = None) -> list[str]:
        notes, task = super().prepare(progress), self.jobs()[0].task
        benchmark = find_benchmark(self.benchmark)
        self.files = locate_files(benchmark, task.bind(benchmark), progress)
        return notes

    def conditions(self) -> dict[str, Any]:
        name = find_benchmark(self.benchmark).name
        return {"benchmark": name, "synthetic": self.files.synthetic}

    def paths(self) -> list[Path]:
        """Returns the benchmark's files; of a directory, those in it."""
        return [file for path in self.files.paths.values() for file in files_at(path)]

    def file_bytes(self) -> dict[str, int]:
        """Returns the size of each of the benchmark's files, by role."""
        return {
            role: sum(file.stat().st_size for file in files_at(path))
            for role, path in self.files.paths.items()
        }


def envelope(started: str) -> dict[str, Any]:
    """Returns what every report says of how it was made."""
    return {"command": sys.argv, "started": started, "machine": environment.capture()}


def elapsed_s(ranks: Sequence[Outcome]) -> float:
    """Returns the time of a job, which is that of its slowest rank."""
    return float(max(rank["elapsed_s"] for rank in ranks))


def times(jobs: Sequence[Sequence[Outcome]]) -> Result:
    """Returns median, interval and range of the times of jobs."""
    return summarize([elapsed_s(ranks) for ranks in jobs])


def spread_of(values: Sequence[float], name: str) -> dict[str, Any]:
    """Returns the ``ci95_NAME`` of a median, None for too few values, and ``range_NAME``."""
    ends = median_interval(values)
    return {
        f"ci95_{name}": list(ends) if ends else None,
        f"range_{name}": [min(values), max(values)],
    }


def interval(result: Report, name: str = "s", unit: float = 1.0) -> str:
    """Returns the 95 % interval of a result, or the range of too few values, as text."""
    ends = result[f"ci95_{name}"] or result[f"range_{name}"]
    return " to ".join(number(end / unit) for end in ends)


def spread(result: Report) -> str:
    """Returns what `interval` shows."""
    return "95 % interval" if result.get("ci95_s") else "range"


def remarks(report: Report, noun: str = "repeat") -> Iterator[str]:
    """Yields why there is a range instead of an interval, and whether data are synthetic."""
    first = report["results"][0]
    if first["ci95_s"] is None:
        yield (
            f"{count(first['repeats'], noun)}: a 95 % interval of the median needs at least"
            f" {MIN_VALUES}, so the range is shown"
        )
    if report.get("synthetic"):
        yield "the data are synthetic"


def number(value: float) -> str:
    """Returns a number with three digits, or with all digits before its decimal point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def ms(seconds: float) -> str:
    """Returns a time in ms."""
    return number(seconds / 1e-3)


def megabytes(num_bytes: int | None) -> str | None:
    """Returns a size in MB; None if it was not measured."""
    return None if num_bytes is None else number(num_bytes / MB)


def table(rows: Sequence[Report], columns: Columns, title: str = "") -> Table:
    """Returns a table of one or more results.

    A column has under its heading, in which "{spread}" stands for what `interval` shows, a key of
    the results, a key with a unit to divide by, or a function of a result. Numbers have three
    digits, integers all, and None is "not measured".
    """
    headings = (heading.replace("{spread}", spread(rows[0])) for heading in columns)
    found = empty_table(title, *headings)
    for row in rows:
        found.add_row(*(_cell(row, of) for of in columns.values()))
    return found


def _cell(row: Report, of: str | tuple[str, float] | Callable[[Any], Any]) -> str:
    key, unit = of if isinstance(of, tuple) else (of, None)
    value = key(row) if callable(key) else row[key]
    if value is None:
        return "not measured"
    value = value / unit if unit else value
    return number(value) if isinstance(value, float) else str(value)


def _markdown(shown: Table) -> str:
    headings, rows = as_cells(shown)
    rule = ["---:" if column.justify == "right" else "---" for column in shown.columns]
    escaped = ([cell.replace("|", r"\|") for cell in cells] for cells in (headings, rule, *rows))
    lines = (f"| {' | '.join(cells)} |".replace("\n", " ") for cells in escaped)
    return "\n".join((*([f"{shown.title}\n"] if shown.title else []), *lines))
