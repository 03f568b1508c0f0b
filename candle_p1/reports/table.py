"""A table of a report, as HTML cells, Markdown and CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from candle_p1.reports.statistics import Estimate
from candle_p1.reports.words import cell, number

if TYPE_CHECKING:
    from collections.abc import Sequence

    Cell = str | int | float | Estimate | None

LEGEND = (
    "(a to b): 95 % interval; [a to b]: the range of fewer than 6 runs, or, with its confidence,"
    " the widest interval that few runs give; neither: one run; -: not known"
)
ABSENT = "-"


@dataclass(frozen=True)
class ReportTable:
    """A table.

    Attributes:
        slug: Its file's name, without ending.
        title: What it shows.
        headings: Of the columns, with units.
        rows: Of cells, as many as headings. None is not known.
        paper: What it corresponds to in the paper; "" is nothing.
        notes: Sentences beneath.
    """

    slug: str
    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    paper: str = ""
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
        """Returns whether a column holds words, which stand to the left, and not numbers."""
        return all(row[column] is None or isinstance(row[column], str) for row in self.rows)

    def without_empty_columns(self) -> ReportTable:
        """Returns the table without the columns in which nothing is known."""
        kept = [
            i
            for i in range(len(self.headings))
            if any(row[i] not in (None, "") for row in self.rows)
        ]
        headings = tuple(self.headings[i] for i in kept)
        rows = tuple(tuple(row[i] for i in kept) for row in self.rows)
        return ReportTable(self.slug, self.title, headings, rows, self.paper, self.notes)

    def to_markdown(self) -> str:
        """Returns the table as Markdown, with title and notes."""
        lines = [_markdown_row(self.headings)]
        lines.append(
            "|" + "|".join("---" if i == 0 else "---:" for i in range(len(self.headings))) + "|"
        )
        lines += [_markdown_row(row) for row in self.texts]
        title = f"**{self.title}**" + (f" ({self.paper})" if self.paper else "")
        notes = [*self.notes, *([LEGEND] if self.has_estimates else [])]
        return "\n".join([title, "", *lines, "", *(f"{note}  " for note in notes)]).rstrip() + "\n"

    def to_csv(self) -> str:
        """Returns the table as CSV; an estimate has columns for its interval and confidence."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        wide = [
            any(isinstance(row[i], Estimate) for row in self.rows)
            for i in range(len(self.headings))
        ]
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


ENDS = ("low", "high", "confidence", "runs")


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
