"""Values that the paper and two other reports state, for comparison with ours: published.toml."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from candle_p1.toml_file import read_toml

if TYPE_CHECKING:
    from candle_p1.reports.experiments import Experiment  # which takes time to import

Number = int | float | str

ORIGINAL_LOADER, METHOD_LOADER = "original", "chunked"
PAPER_LOADERS = (ORIGINAL_LOADER, METHOD_LOADER)
"""The loaders that the paper compares: that of the benchmarks, and its own method."""

GAINS = ("improvement_", "change_")
"""The beginnings of the quantities that tell what the paper's method gains."""


@dataclass(frozen=True)
class Published:
    """A published value, or a statement without a number; published.toml explains the fields.

    "" is no figure or no certain benchmark; the mode is strong, weak, batch, or any.
    """

    quantity: str
    says: str
    section: str
    figure: str = ""
    benchmark: str = ""
    mode: str = "any"
    machine: str = ""
    value: Number | None = None
    to: Number | None = None
    unit: str = ""
    num_ranks: int | None = None
    loaders: tuple[str, ...] = ()
    source: str = "paper"

    @property
    def where(self) -> str:
        """Section and figure."""
        return ", ".join(filter(None, (self.section, self.figure)))

    def __str__(self) -> str:
        place = ", ".join(filter(None, (self.machine, self.where)))
        return f"published ({place}): {self.says}"


class PublishedLoading(NamedTuple):
    """Seconds to load one file, of a size in MB as the paper writes it: a cell of Table 3 or 4."""

    table: int
    machine: str
    role: str
    loader: str
    file_mb: int
    seconds: float


@cache
def content() -> dict[str, Any]:
    """Returns what published.toml holds, whose keys are explained there."""
    return read_toml(Path(__file__).with_name("published.toml"))


def published(
    experiment: Experiment, *quantities: str, loaders: Collection[str] | None = None
) -> list[Published]:
    """Returns what is published about an experiment's benchmark and mode, quantity by quantity.

    Values that tell of loaders are left out unless all of these are among `loaders`, by default
    those of the experiment's runs that have times.
    """
    used = experiment.loaders if loaders is None else set(loaders)
    return [
        each
        for quantity in quantities
        for each in _stated()
        if (each.quantity, each.benchmark) == (quantity, experiment.benchmark)
        and each.mode in (experiment.mode, "any")
        and used.issuperset(each.loaders)
    ]


def published_epochs(experiment: Experiment) -> int | None:
    """Returns the epochs per rank that the paper found necessary; None where it names no number."""
    return next((int(each.value or 0) for each in published(experiment, "epochs_needed")), None)


def all_published() -> list[Published]:
    """Returns every published value, in the order of the file; its Tables 1, 3 and 4 come last."""
    found = list(_stated())
    for benchmark, cells in content()["table_1"].items():
        for row, (title, unit) in content()["table_1_rows"].items():
            says = f"{title} {number_words(cells[row])} {unit}".rstrip()
            facts: dict[str, Any] = {"benchmark": benchmark, "value": cells[row], "unit": unit}
            found.append(Published(row, says, "Table 1", **facts))
    for benchmark in content()["table_1"]:
        for table, machine, role, loader, mb, seconds in published_loading(benchmark):
            says = f"{seconds} s to load the {role} file of {mb} MB (loader {loader})"
            facts = {"benchmark": benchmark, "machine": machine, "loaders": (loader,)}
            facts |= {"value": seconds, "unit": "s"}
            found.append(Published("load_s", says, f"Table {table}", **facts))
    return found


def published_loading(benchmark: str) -> list[PublishedLoading]:
    """Returns the benchmark's cells of Tables 3 and 4."""
    return [
        PublishedLoading(table["table"], table["machine"], role, loader, row["mb"], row[loader])
        for table in content()["loading"]
        for role, row in table.get(benchmark, {}).items()
        for loader in PAPER_LOADERS
    ]


def number_words(number: Number) -> str:
    """Returns a number as the paper writes it, for example 1,120 or 0.001."""
    return number if isinstance(number, str) else f"{number:,}"


@cache
def _stated() -> list[Published]:
    found = []
    for group in content()["groups"]:
        for entry in group["values"]:
            facts = {name: each for name, each in (group | entry).items() if name != "values"}
            ranks, loaders = facts.pop("ranks", None), facts.pop("loaders", ())
            if facts["quantity"].startswith(GAINS):
                loaders = PAPER_LOADERS
            numbers = {"value": facts.get("value"), "to": facts.get("to"), "ranks": ranks}
            words = {name: number_words(n) for name, n in numbers.items() if n is not None}
            says = facts.pop("says").format(**words)
            found.append(Published(says=says, num_ranks=ranks, loaders=tuple(loaders), **facts))
    return found
