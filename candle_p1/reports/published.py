"""Values that the paper prints, for comparison with measured ones: published.toml."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from candle_p1.toml_file import read_toml


@dataclass(frozen=True)
class Published:
    """A published value.

    Attributes:
        mode: strong, weak, batch, or any.
        quantity: The name of a Quantity, or what a finding asks for.
        machine: Where it was measured.
        where: Section, figure or table of the paper.
    """

    benchmark: str
    mode: str
    quantity: str
    machine: str
    says: str
    where: str
    value: float | None = None

    def __str__(self) -> str:
        return f"published ({self.machine}, {self.where}): {self.says}"


@dataclass(frozen=True)
class PublishedLoading:
    """Seconds to load one file: a cell of Table 3 or 4.

    Attributes:
        machine: Where it was measured.
        role: train or test.
        loader: original or chunked.
        file_mb: The size of the file, in MB as the paper writes it.
    """

    table: int
    machine: str
    role: str
    loader: str
    file_mb: int
    seconds: float


def source() -> str:
    """Returns the reference to the paper."""
    return str(_content()["source"])


def machines() -> dict[str, str]:
    """Returns descriptions of the paper's machines, by name."""
    return dict(_content()["machines"])


def published(benchmark: str, mode: str, *quantities: str) -> list[Published]:
    """Returns what the paper prints for a benchmark in a mode of scaling, quantity by quantity."""
    found = (Published(**entry) for entry in _content()["values"])
    fitting = [e for e in found if e.benchmark == benchmark and e.mode in (mode, "any")]
    return [each for name in quantities for each in fitting if each.quantity == name]


def published_figure(benchmark: str, mode: str, slug: str) -> str | None:
    """Returns which figures or tables of the paper correspond to a figure of a report."""
    figures = _content()["figures"]
    of_both = figures.get(benchmark, {}) | figures.get(f"{benchmark}-{mode}", {})
    return of_both.get(slug)  # type: ignore[no-any-return]


def published_loading(benchmark: str) -> list[PublishedLoading]:
    """Returns the benchmark's cells of Tables 3 and 4."""
    return [
        PublishedLoading(table["table"], table["machine"], role, loader, row["mb"], row[loader])
        for table in _content()["loading"]
        for role, row in table.get(benchmark, {}).items()
        for loader in ("original", "chunked")
    ]


@cache
def _content() -> dict[str, Any]:
    return read_toml(Path(__file__).with_name("published.toml"))
