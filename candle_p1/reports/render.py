"""Pages: what they say, described once, and that as HTML, CSV and tables on a screen."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from candle_p1.errors import ParameterError
from candle_p1.files import write_atomically
from candle_p1.records.tables import as_cells, empty_table
from candle_p1.reports.drawing import Drawing
from candle_p1.reports.statistics import Estimate, cell, contents, csv_text, number

if TYPE_CHECKING:
    from rich.table import Table

Cell = str | int | float | Estimate | None
Content = tuple[Sequence[str], Sequence[tuple[Cell, ...]], Sequence[str]]
"""The headings, rows and notes of a table."""

PAGE_NAME = "index.html"
NUMBER = re.compile(r"[-+]?[\d.,]+ ?%?")
"""Text that is aligned like a number."""

ENDS = ("low", "high", "confidence", "runs")
"""The columns that a CSV file has for each column of estimates."""


@dataclass(frozen=True)
class ReportTable:
    """A table; its slug is the name of its files, its notes are sentences beneath it."""

    slug: str
    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()

    @classmethod
    def from_rich(cls, table: Table) -> ReportTable:
        """Returns a table of the terminal."""
        return cls("", str(table.title), *as_cells(table))

    @property
    def texts(self) -> list[list[str]]:
        """The cells as text."""
        return [[_text(cell) for cell in row] for row in self.rows]

    @property
    def has_estimates(self) -> bool:
        """Whether its legend has to be shown."""
        return any(isinstance(cell, Estimate) for row in self.rows for cell in row)

    def is_words(self, column: int) -> bool:
        """Returns whether a column holds words, which are aligned left, and not numbers."""
        cells = [row[column] for row in self.rows if row[column] not in (None, "")]
        numbers = all(isinstance(each, str) and NUMBER.fullmatch(each) for each in cells)
        return all(isinstance(each, str) for each in cells) and not (cells and numbers)

    def without_empty_columns(self) -> ReportTable:
        """Returns the table without the columns in which nothing is known."""
        columns = zip(self.headings, *self.rows, strict=True)
        kept = [each for each in columns if any(cell not in (None, "") for cell in each[1:])]
        headings, *rows = zip(*kept, strict=True) if kept else [()]
        return replace(self, headings=headings, rows=tuple(rows))

    def to_rich(self) -> Table:
        """Returns the table for a terminal, without notes."""
        table = empty_table(self.title, *self.headings)
        for i, column in enumerate(table.columns):
            column.justify = "left" if self.is_words(i) else "right"
        for row in self.texts:
            table.add_row(*row)
        return table

    def to_csv(self) -> str:
        """Returns the table as CSV; an estimate has columns for its interval and confidence."""
        columns: list[Sequence[object]] = []
        for heading, *column in zip(self.headings, *self.rows, strict=True):
            if any(isinstance(value, Estimate) for value in column):
                headings = (heading, *(f"{heading}, {end}" for end in ENDS))
                columns += zip(headings, *map(_csv_cells, column), strict=True)
            else:
                columns.append((heading, *column))
        text = io.StringIO()
        rows = zip(*columns, strict=True)
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([csv_text(v) if isinstance(v, str) else v for v in row] for row in rows)
        return text.getvalue()


class Statement(NamedTuple):
    """What is said about one thing; sentences of the paper begin with "published"."""

    title: str
    sentences: Sequence[str]
    link: str = ""


@dataclass(frozen=True)
class Section:
    """A page or a part of it: what it says, draws and tabulates about one thing.

    The slug is its anchor on the page; it and the title may be "". The lead are sentences beneath
    the title, and the notes are in a box. `missing` has what is not drawn, with the reasons. Of a
    folded section, only the title is shown until it is clicked.
    """

    slug: str
    title: str
    lead: Sequence[str] = ()
    notes: Sequence[str] = ()
    statements: Sequence[Statement] = ()
    figures: Sequence[Drawing] = ()
    missing: Sequence[tuple[str, str]] = ()
    tables: Sequence[ReportTable] = ()
    sections: Sequence[Section] = ()
    is_folded: bool = False

    @property
    def all_sections(self) -> list[Section]:
        """It and all of its parts."""
        return [self, *(each for section in self.sections for each in section.all_sections)]


def page_of(
    title: str,
    parts: Iterable[str | Table],
    figures: Sequence[Drawing],
    *,
    notes: Sequence[str] = (),
    missing: Sequence[tuple[str, str]] = (),
) -> Section:
    """Returns a page of what a command prints, with figures before its first table."""
    lines: list[str] = []
    tables: list[ReportTable] = []
    for part in parts:
        if not isinstance(part, str):
            tables.append(ReportTable.from_rich(part))
        elif tables:
            tables[-1] = replace(tables[-1], notes=(*tables[-1].notes, part))
        else:
            lines.append(part)
    return Section("", title, lines, notes, (), figures, missing, tables)


def render_page(page: Section) -> str:
    """Returns a page as HTML, which needs no other file and no network."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = files("candle_p1.reports").joinpath("page.html").read_text(encoding="utf-8")
    return environment.from_string(template).render(page=page, legend=contents()["legend"])


def write_page(page: Section, directory: Path, exports: Mapping[str, str | bytes]) -> Path:
    """Writes index.html, figures/*.png and *.svg, tables/*.csv; returns the page's path.

    Exports are further files, by their paths. Files of an earlier page with other names are kept.

    Raises:
        ParameterError: The directory cannot be created or written to.
    """
    found = dict(exports)
    for section in page.all_sections:
        for figure in section.figures:
            found[f"figures/{figure.slug}.svg"] = figure.svg
            found[f"figures/{figure.slug}.png"] = figure.png
        for table in section.tables:
            found[f"tables/{table.slug}.csv"] = table.to_csv()
    found[PAGE_NAME] = render_page(page)
    try:
        for name, content in found.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
    except OSError as error:
        where = error.filename or directory
        raise ParameterError(f"-o {directory}: cannot write {where}: {error.strerror}") from error
    return directory / PAGE_NAME


def _csv_cells(value: object) -> tuple[object, ...]:
    if not isinstance(value, Estimate):
        return value, *[None] * len(ENDS)
    runs = "+".join(map(str, value.num))
    return value.value, value.low, value.high, round(value.confidence, 4), runs


def _text(value: Cell) -> str:
    if value is None:
        return "-"
    if isinstance(value, Estimate):
        return cell(value)
    if isinstance(value, float):
        return number(value)
    return f"{value:,}" if isinstance(value, int) else value
