"""Tables and numbers, as all measurements show them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from candle_p1.reports.statistics import MIN_VALUES
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Mapping

MB = 1e6


def plain_table(*columns: str) -> Table:
    """Returns a table without rows, whose first column is text and whose others are numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return table


def digits(value: float) -> str:
    """Returns a number with three digits, or with all digits before its decimal point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def ms(seconds: float) -> str:
    """Returns a time in ms."""
    return digits(seconds / 1e-3)


def spread(result: Mapping[str, Any]) -> str:
    """Returns the kind of spread that a result has, for the heading of a column."""
    return "range" if result["ci95_s"] is None else "95 % interval"


def too_few(result: Mapping[str, Any], noun: str) -> str:
    """Explains why a result has a range instead of an interval."""
    return (
        f"{count(result['repeats'], noun)}: a 95 % interval of the median needs at least"
        f" {MIN_VALUES}, so the range is shown"
    )
