"""Tables of which the summaries of records consist."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

Column = str | Callable[[Any], str]


def table_of(
    title: str, rows: Iterable[Any], columns: Mapping[str, Column], num_words: int = 1
) -> Table:
    """Returns a table with a row for each of some objects.

    A column is a function of the object, or the path of an attribute and its format, such as
    "time.mean_s:.3f". If a part of the path is None, the cell is empty.
    """
    table = empty_table(title, *columns, num_words=num_words)
    for row in rows:
        table.add_row(*(_cell(row, column) for column in columns.values()))
    return table


def _cell(value: Any, column: Column) -> str:
    if not isinstance(column, str):
        return column(value)
    path, _, form = column.partition(":")
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return "" if value is None else format(value, form)


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
