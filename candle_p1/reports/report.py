"""A report: everything that it says, made from the records, before it is written to files."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from candle_p1.reports.exports.extrap import extrap_files
from candle_p1.reports.exports.tidy import tidy, to_csv
from candle_p1.reports.figures.registry import draw_figures
from candle_p1.reports.findings.registry import find
from candle_p1.reports.notes import notes_on, notes_on_all
from candle_p1.reports.points import MODES, describe, group
from candle_p1.reports.table import ReportTable
from candle_p1.reports.tables import make_tables
from candle_p1.reports.words import file_name
from candle_p1.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from candle_p1.reports.drawing import Drawing
    from candle_p1.reports.findings.registry import Statement
    from candle_p1.reports.points import Experiment
    from candle_p1.reports.runs import Runs


@dataclass(frozen=True)
class ReportSection:
    """The part of a report on one experiment.

    Attributes:
        slug: The beginning of the names of its files, and its anchor on the page.
        notes: What a reader has to know.
        statements: What the records show.
        missing: The titles of figures that could not be drawn, with the reasons.
    """

    experiment: Experiment
    slug: str
    notes: Sequence[str]
    statements: Sequence[Statement]
    figures: Sequence[Drawing]
    missing: Sequence[tuple[str, str]]
    tables: Sequence[ReportTable]

    @property
    def title(self) -> str:
        """Benchmark, mode, and whether the steps are limited."""
        return section_title(self.experiment)

    @property
    def headlines(self) -> list[Statement]:
        """The findings of the summary."""
        return [each for each in self.statements if each.finder.is_headline and each.sentences]

    @property
    def details(self) -> list[Statement]:
        """The other findings."""
        return [each for each in self.statements if not each.finder.is_headline and each.sentences]

    @property
    def open(self) -> list[Statement]:
        """The kinds of statements about which there is, in part or as a whole, no conclusion."""
        return [each for each in self.statements if each.unsure or each.lacking]

    @property
    def common(self) -> str:
        """The settings that all of its runs share, in words."""
        return describe(self.experiment.common)


@dataclass(frozen=True)
class Report:
    """A report.

    Attributes:
        notes: On all runs together.
        problems: The records that cannot be read, with the reasons.
        exports: Files for other programs, by their paths within the report.
    """

    notes: Sequence[str]
    sections: Sequence[ReportSection]
    runs: ReportTable
    problems: ReportTable
    exports: dict[str, str | bytes]


def make_report(runs: Runs, starting: Callable[[str], None] = lambda _title: None) -> Report:
    """Returns the report of some runs.

    Args:
        runs: What it is made from.
        starting: Is called with the title of each section before it is made.
    """
    sections: list[ReportSection] = []
    experiments = group(runs.runs)
    for experiment in experiments:
        slug = free_slug(experiment, {section.slug for section in sections})
        starting(section_title(experiment))
        has_times = bool(experiment.runs)
        figures, missing = draw_figures(experiment, slug)
        statements = find(experiment) if has_times else []
        tables = make_tables(experiment, slug)
        notes = notes_on(experiment)
        sections.append(
            ReportSection(experiment, slug, notes, statements, figures, missing, tables)
        )
    table = tidy(runs.runs)
    exports: dict[str, str | bytes] = {"runs.csv": to_csv(table)}
    if find_spec("pyarrow"):
        exports["runs.parquet"] = table.to_parquet(None, engine="pyarrow", index=False)
    exports |= {f"extrap/{name}": text for name, text in extrap_files(experiments).items()}
    return Report(
        notes_on_all(runs), sections, _table_of_runs(runs), _table_of_problems(runs), exports
    )


def free_slug(experiment: Experiment, taken: Collection[str]) -> str:
    """Returns the beginning of the names of a section's files, which no other section has."""
    stem = f"{file_name(experiment.benchmark)}-{experiment.mode}"
    slugs = (stem, *(f"{stem}-{i}" for i in range(2, len(taken) + 2)))
    return next(each for each in slugs if each not in taken)


def section_title(experiment: Experiment) -> str:
    """Returns benchmark, mode, and whether the steps are limited."""
    limited = f" ({describe(dict(experiment.limits))})" if experiment.limits else ""
    return f"{experiment.benchmark.upper()}, {MODES[experiment.mode]}{limited}"


def _table_of_runs(runs: Runs) -> ReportTable:
    headings = (
        "record", "benchmark", "ranks", "seed", "status", "total (s)", "started", "remark",
    )  # fmt: skip
    rows = tuple(
        (
            run.place,
            run.benchmark,
            run.num_ranks,
            str(run.seed),
            run.status,
            run.total_s,
            run.started[:19],
            run.remark,
        )
        for run in runs.runs
    )
    return ReportTable("runs", "All runs", headings, rows)


def _table_of_problems(runs: Runs) -> ReportTable:
    rows = tuple((printable(str(path)), reason) for path, reason in runs.problems.items())
    return ReportTable("unreadable", "Records that cannot be read", ("record", "reason"), rows)
