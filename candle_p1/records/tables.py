"""Tables of which the summaries of records consist."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text


def table_of(
    title: str,
    rows: Iterable[tuple[Any, ...]],
    columns: Mapping[str, Callable[..., str]],
    num_words: int = 1,
) -> Table:
    """Returns a table whose cells are the columns' functions applied to each row."""
    table = empty_table(title, *columns, num_words=num_words)
    for row in rows:
        table.add_row(*(cell(*row) for cell in columns.values()))
    return table


def empty_table(title: str, *headings: str, num_words: int = 1) -> Table:
    """Returns a table without rows; its first `num_words` columns are text, the others numbers."""
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)  # no markup
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i < num_words else "right", overflow="fold")
    return table


def quantity(value: float | None) -> str:
    """Returns an energy or a power as text."""
    return "absent" if value is None else f"{value:,.1f}"


def number_or_words(value: float | None) -> str:
    """Returns a figure of merit as text; None stands for one that is not a number."""
    return "not a number" if value is None else f"{value:.4f}"


def as_cells(table: Table) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Returns the headings and the rows of a table, as text."""
    headings = [str(column.header) for column in table.columns]
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
    return headings, list(zip(*cells, strict=True))
