"""What the paper prints, for a reader to hold measured values against: published.toml."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib.resources import as_file, files
from typing import TYPE_CHECKING, Any

from candle_p1.toml_file import read_toml

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Published:
    """A published value.

    Attributes:
        benchmark: Whose.
        mode: strong, weak, batch, or any.
        quantity: What it is of; a Quantity's name, or what a finding asks for.
        machine: What it was taken on.
        says: What the paper says.
        where: Section, figure or table of the paper.
        value: The number, where there is one.
        low: The lower end, where it gives a span.
        high: The upper end.
        workers: The number of GPUs on Summit, of nodes on Theta, where one is given.
        settings: Parameters it was taken with, as far as said.
    """

    benchmark: str
    mode: str
    quantity: str
    machine: str
    says: str
    where: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    workers: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"published ({self.machine}, {self.where}): {self.says}"


@dataclass(frozen=True)
class PublishedLoading:
    """Seconds to load one file: a cell of Table 3 or 4.

    Attributes:
        table: The table's number.
        machine: What it was taken on.
        role: train or test.
        loader: original or chunked.
        file_mb: The size of the file, in MB as the paper writes it.
        seconds: The time, in s.
    """

    table: int
    machine: str
    role: str
    loader: str
    file_mb: int
    seconds: float


def source() -> str:
    """Returns what the paper is called."""
    return str(_content()["source"])


def machines() -> dict[str, str]:
    """Returns the paper's machines in words, by name."""
    return dict(_content()["machines"])


def published(benchmark: str, mode: str, quantity: str | None = None) -> list[Published]:
    """Returns what the paper prints of a benchmark in a mode of scaling, and of one quantity."""
    found = (Published(**entry) for entry in _content()["values"])
    return [
        each
        for each in found
        if each.benchmark == benchmark
        and each.mode in (mode, "any")
        and quantity in (None, each.quantity)
    ]


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
    with as_file(files("candle_p1.reports").joinpath("published.toml")) as path:
        content: dict[str, Any] = read_toml(path)
    return content
