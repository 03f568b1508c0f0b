"""A comparison as tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from candle_p1.reports.statistics import estimate_median
from candle_p1.reports.words import cell
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from candle_p1.reports.compare import Pairing, Row, RunComparison

LEGEND = (
    "Medians, and B / A, or B - A for quality. (a to b): 95 % interval. [a to b]: the range of"
    " fewer than 6 runs, or the interval that few runs allow, with its confidence."
)


def tables(comparison: RunComparison) -> Iterator[str | Table]:
    """Yields the warnings, the numbers and the differences."""
    for name, side in (("A", comparison.a), ("B", comparison.b)):
        yield f"{name}: {side.name}, {count(len(side.timed), 'run')}"
    yield from (f"warning: {warning}" for warning in comparison.warnings)
    for pairing in comparison.pairings:
        yield _numbers(pairing)
    yield LEGEND
    if not comparison.differences:
        yield "no difference in parameters, plan, machine or versions"
        return
    table = Table(
        "kind", "name", "A", "B", box=box.SIMPLE, title="differences", title_justify="left"
    )
    for each in comparison.differences:
        table.add_row(each.kind, each.name, each.a, each.b)
    yield table


def _numbers(pairing: Pairing) -> Table:
    title = Text(pairing.settings) if pairing.settings else None  # no markup
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    table.add_column("quantity")
    for heading in ("A", "B", "B / A"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in pairing.rows:
        table.add_row(
            row.quantity.heading, _median(row.a), _median(row.b), _change(row), row.verdict
        )
    return table


def _median(values: Sequence[float]) -> str:
    return cell(estimate_median(values)) if values else "-"


def _change(row: Row) -> str:
    if row.change is None:
        return "-"
    sign = "+" if not row.is_ratio and row.change.value > 0 else ""
    return sign + cell(row.change)
