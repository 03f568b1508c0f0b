"""A report: everything it says, put together from the records, before it becomes files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from candle_p1.reports.exports.files import make_exports
from candle_p1.reports.figures.registry import draw_figures
from candle_p1.reports.findings.registry import find
from candle_p1.reports.notes import notes_on, notes_on_all
from candle_p1.reports.points import MODES, describe, group
from candle_p1.reports.table import ReportTable
from candle_p1.reports.tables import make_tables

if TYPE_CHECKING:
    from collections.abc import Callable

    from candle_p1.reports.drawing import Drawing
    from candle_p1.reports.exports.files import Export
    from candle_p1.reports.findings.statement import Statement
    from candle_p1.reports.missing import Missing
    from candle_p1.reports.points import Experiment
    from candle_p1.reports.runs import Runs


@dataclass(frozen=True)
class Section:
    """What a report says of one experiment.

    Attributes:
        slug: Of its files, and its place on the page.
        title: Benchmark and mode.
        machine: What it was taken on, in words.
        common: The settings that all of its runs share, in words.
        notes: What a reader has to know.
        statements: What the records show.
        figures: As drawn.
        missing: What could not be drawn.
        tables: Those with rows.
    """

    slug: str
    title: str
    machine: str
    common: str
    notes: tuple[str, ...]
    statements: tuple[Statement, ...]
    figures: tuple[Drawing, ...]
    missing: tuple[Missing, ...]
    tables: tuple[ReportTable, ...]

    @property
    def table_slugs(self) -> set[str]:
        """The slugs of its tables."""
        return {table.slug for table in self.tables}

    @property
    def refused(self) -> list[Statement]:
        """The statements for the summary of which nothing could be said."""
        return [each for each in self.statements if each.is_headline and not each.sentences]


@dataclass(frozen=True)
class Report:
    """A report.

    Attributes:
        notes: On all runs together.
        sections: By experiment.
        runs: The table of all runs.
        problems: The records that cannot be read, with the reason.
        exports: For other programs.
    """

    notes: tuple[str, ...]
    sections: tuple[Section, ...]
    runs: ReportTable
    problems: ReportTable
    exports: tuple[Export, ...] = ()

    @property
    def num_figures(self) -> int:
        """The number of figures."""
        return sum(len(section.figures) for section in self.sections)


def make_report(runs: Runs, starting: Callable[[str], None] = lambda _title: None) -> Report:
    """Returns the report of some runs.

    Args:
        runs: As they were found.
        starting: Is told the title of each section before it is made.
    """
    sections: list[Section] = []
    experiments = group(runs.runs)
    for experiment in experiments:
        slug = f"{experiment.benchmark}-{experiment.mode}"
        same = sum(section.slug.startswith(slug) for section in sections)
        starting(_title(experiment))
        sections.append(_section(experiment, slug + (f"-{same + 1}" if same else "")))
    return Report(
        tuple(notes_on_all(runs)),
        tuple(sections),
        _table_of_runs(runs),
        _table_of_problems(runs),
        make_exports(runs.runs, experiments),
    )


def _section(experiment: Experiment, slug: str) -> Section:
    has_times = bool(experiment.runs)
    figures, missing = draw_figures(experiment, slug) if has_times else ([], [])
    return Section(
        slug,
        _title(experiment),
        str(experiment.machine) if experiment.machine else "unknown: no run got far enough to say",
        describe(experiment.common),
        tuple(notes_on(experiment)),
        tuple(find(experiment)) if has_times else (),
        tuple(figures),
        tuple(missing),
        tuple(make_tables(experiment, slug)),
    )


def _title(experiment: Experiment) -> str:
    return f"{experiment.benchmark.upper()}, {MODES[experiment.mode]}"


def _table_of_runs(runs: Runs) -> ReportTable:
    headings = (
        "record",
        "benchmark",
        "workers",
        "seed",
        "status",
        "total (s)",
        "started",
        "remark",
    )
    rows = tuple(
        (
            str(run.path),
            run.benchmark,
            run.num_ranks,
            str(run.seed),
            run.status,
            run.total_s,
            run.started[:19],
            run.disturbed or run.failure or "",
        )
        for run in runs.runs
    )
    return ReportTable("runs", "All runs", headings, rows)


def _table_of_problems(runs: Runs) -> ReportTable:
    rows = tuple((str(problem.path), problem.reason) for problem in runs.problems)
    return ReportTable("unreadable", "Records that cannot be read", ("record", "why"), rows)
