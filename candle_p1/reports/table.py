"""A table of a report, as text, Markdown and CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from candle_p1.reports.statistics import Estimate
from candle_p1.reports.words import cell, number

if TYPE_CHECKING:
    from collections.abc import Sequence

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

    def to_markdown(self) -> str:
        """Returns the table as Markdown, with title and notes."""
        ruler = "|".join(["---", *["---:"] * (len(self.headings) - 1)])
        rows = [_markdown_row(self.headings), f"|{ruler}|", *map(_markdown_row, self.texts)]
        notes = [*self.notes, *([LEGEND] if self.has_estimates else [])]
        lines = [f"**{self.title}**", "", *rows, "", *(f"{note}  " for note in notes)]
        return "\n".join(lines).rstrip() + "\n"

    def to_csv(self) -> str:
        """Returns the table as CSV; an estimate has columns for its interval and confidence."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        columns = [[row[i] for row in self.rows] for i in range(len(self.headings))]
        wide = [any(isinstance(cell, Estimate) for cell in column) for column in columns]
        headings: list[str] = []
        for heading, is_wide in zip(self.headings, wide, strict=True):
            headings += [heading, *(f"{heading}, {end}" for end in ENDS if is_wide)]
        writer.writerow(headings)
        for row in self.rows:
            cells: list[object] = []
            for value, is_wide in zip(row, wide, strict=True):
                cells += _csv_cells(value, is_wide)
            writer.writerow(cells)
        return text.getvalue()


def _csv_cells(value: Cell, is_wide: bool) -> list[object]:
    if isinstance(value, Estimate):
        runs = "+".join(map(str, value.num))
        return [value.value, value.low, value.high, round(value.confidence, 4), runs]
    return ["" if value is None else value, *([""] * len(ENDS) if is_wide else [])]


def _text(value: Cell) -> str:
    if value is None:
        return ABSENT
    if isinstance(value, Estimate):
        return cell(value)
    if isinstance(value, float):
        return number(value)
    return f"{value:,}" if isinstance(value, int) else value


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |"
