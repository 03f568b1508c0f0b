"""A table of a report, as text, Markdown and CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from candle_p1.reports.statistics import Estimate
from candle_p1.reports.words import cell, csv_text, markdown_text, number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    Cell = str | int | float | Estimate | None

LEGEND = (
    "(a to b): 95 % interval. [a to b]: the range of fewer than 6 runs or, with its confidence, the"
    " widest interval that few runs allow. Neither: a single run. -: unknown."
)
ABSENT = "-"
ENDS = ("low", "high", "confidence", "runs")
"""The columns that a CSV file has for each column of estimates."""


@dataclass(frozen=True)
class ReportTable:
    """A table.

    Attributes:
        slug: The name of its files, without their endings.
        headings: Of the columns, with units.
        rows: Cells, as many as headings; None is unknown.
        notes: Sentences beneath it.
    """

    slug: str
    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

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
        return all(row[column] is None or isinstance(row[column], str) for row in self.rows)

    def without_empty_columns(self) -> ReportTable:
        """Returns the table without the columns in which nothing is known."""
        columns = zip(self.headings, *self.rows, strict=True)
        kept = [each for each in columns if any(cell not in (None, "") for cell in each[1:])]
        headings, *rows = zip(*kept, strict=True) if kept else [()]
        return replace(self, headings=headings, rows=tuple(rows))

    def to_rich(self) -> Table:
        """Returns the table for a terminal, without notes."""
        from candle_p1.records.tables import empty_table

        num_words = next((i for i in range(len(self.headings)) if not self.is_words(i)), 1)
        table = empty_table(self.title, *self.headings, num_words=num_words)
        for row in self.texts:
            table.add_row(*row)
        return table

    def to_markdown(self) -> str:
        """Returns the table as Markdown, with title and notes."""
        ruler = "|".join(["---", *["---:"] * (len(self.headings) - 1)])
        rows = [_markdown_row(self.headings), f"|{ruler}|", *map(_markdown_row, self.texts)]
        notes = [*self.notes, *([LEGEND] if self.has_estimates else [])]
        beneath = (f"{markdown_text(note)}  " for note in notes)
        lines = [f"**{markdown_text(self.title)}**", "", *rows, "", *beneath]
        return "\n".join(lines).rstrip() + "\n"

    def to_csv(self) -> str:
        """Returns the table as CSV; an estimate has columns for its interval and confidence."""
        columns: list[tuple[object, ...]] = []
        for heading, *column in zip(self.headings, *self.rows, strict=True):
            if any(isinstance(value, Estimate) for value in column):
                headings = (heading, *(f"{heading}, {end}" for end in ENDS))
                columns += zip(headings, *map(_csv_cells, column), strict=True)
            else:
                columns.append((heading, *column))
        text = io.StringIO()
        rows = zip(*columns, strict=True)
        csv.writer(text, lineterminator="\n").writerows(map(_csv_text, row) for row in rows)
        return text.getvalue()


def _csv_cells(value: object) -> tuple[object, ...]:
    if not isinstance(value, Estimate):
        return value, *[None] * len(ENDS)
    runs = "+".join(map(str, value.num))
    return value.value, value.low, value.high, round(value.confidence, 4), runs


def _csv_text(value: object) -> object:
    return csv_text(value) if isinstance(value, str) else value


def _text(value: Cell) -> str:
    if value is None:
        return ABSENT
    if isinstance(value, Estimate):
        return cell(value)
    if isinstance(value, float):
        return number(value)
    return f"{value:,}" if isinstance(value, int) else value


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(markdown_text, cells)) + " |"
