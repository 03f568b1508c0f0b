"""Every published value, and the paper's Table 1 beside what is trained here."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any

from candle_p1.bench.harness import plain_table
from candle_p1.benchmark import Benchmark, find_benchmark
from candle_p1.errors import ParameterError
from candle_p1.reports.published import (
    Published,
    all_published,
    content,
    number_words,
)

if TYPE_CHECKING:
    from rich.table import Table

    from candle_p1.datasets.synthetic import SyntheticRecipe
    from candle_p1.reports.published import Number

DIFFERS = "differs"
"""The note on a row that differs from the paper without a reason."""

MIB = 2**20
DATA_SEED = 2019
SIZE_TOLERANCE = 0.02
"""Files whose sizes differ by less than this fraction have the same size: values are random."""


@dataclass(frozen=True)
class TrainedRow:
    """A row of Table 1, by one of published.toml's `table_1_rows`, beside what is trained here.

    `candle` is what CANDLE's default model file says, and `here` the default with synthetic data of
    full size; None where it is unknown. The note says why it differs from the paper.
    """

    name: str
    published: Number
    candle: Number | None
    here: Number | None
    note: str


def table_1(benchmark: Benchmark) -> list[TrainedRow]:
    """Returns the paper's Table 1 beside what is trained here; [] if the paper has no column."""
    told, candle = (content()[key].get(benchmark.name, {}) for key in ("table_1", "candle"))
    own = _trained(benchmark) if told else {}
    return [
        TrainedRow(name, cell, candle.get(name), own.get(name), _note(benchmark, name, cell, own))
        for name, cell in told.items()
    ]


def _trained(benchmark: Benchmark) -> dict[str, Number]:
    """Returns what a run with the default parameters and synthetic data of full size trains."""
    params = benchmark.declaration.parse([], benchmark.model_file)
    own: dict[str, Number] = {name: params[name] for name in ("epochs", "batch_size", "optimizer")}
    rate = params["learning_rate"]
    own["learning_rate"] = "none" if rate is None else rate
    paper = benchmark.paper
    if paper.num_samples and paper.num_inputs:
        held_out = params["val_split"] if "val_split" in benchmark.supports else 0
        own["samples"] = paper.num_samples - int(paper.num_samples * held_out)
        own["elements"] = paper.num_inputs
    if benchmark.recipe:
        sizes = dict(_full_sizes(benchmark.recipe))
        testing = sizes.pop(benchmark.recipe.roles[paper.testing_role])
        own["training_mb"], own["testing_mb"] = (
            round(num_bytes / MIB) for num_bytes in (sum(sizes.values()), testing)
        )
    return own


@cache
def _full_sizes(recipe: SyntheticRecipe) -> dict[str, int]:
    return {file.name: file.num_bytes_estimate for file in recipe.files("full", DATA_SEED)}


def _note(benchmark: Benchmark, name: str, cell: Number, own: Mapping[str, Number]) -> str:
    here = own.get(name)
    if isinstance(here, str) or isinstance(cell, str) or here is None:
        same = here == cell
    else:
        tolerance = SIZE_TOLERANCE if name.endswith("_mb") else 0
        same = abs(here - cell) <= tolerance * cell
    return benchmark.paper.notes.get(name, "" if same else DIFFERS)


def collect(name: str | None) -> dict[str, Any]:
    """Returns the published values as JSON holds them, and Table 1 beside what is trained here.

    Those of one benchmark, or of all, and of none in particular.

    Raises:
        ParameterError: There is no such benchmark, or nothing is published about it.
    """
    values = all_published()
    known = list(dict.fromkeys(each.benchmark for each in values if each.benchmark))
    if name is not None and name not in known:
        found = find_benchmark(name).name
        if found not in known:
            raise ParameterError(
                f"nothing is published about {found}: choose from {', '.join(known)}"
            )
        name = found
    selected = [each for each in values if name in (None, each.benchmark)]
    compared = [each for each in known if name in (None, each) and each in content()["table_1"]]
    rows = {each: table_1(find_benchmark(each)) for each in compared}
    return {
        "sources": content()["sources"],
        "machines": content()["machines"],
        "table_1": {each: [asdict(row) for row in rows[each]] for each in compared},
        "values": [asdict(each) for each in selected],
    }


def to_csv(report: Mapping[str, Any]) -> str:
    """Returns the values as CSV, with a column for each of their fields."""
    text = io.StringIO()
    names = [field.name for field in fields(Published)]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for value in report["values"]:
        writer.writerow(value | {"loaders": " ".join(value["loaders"])})
    return text.getvalue()


def render(report: Mapping[str, Any]) -> Iterator[str | Table]:
    """Yields what `collect` returned as lines and tables."""
    values = [Published(**value) for value in report["values"]]
    for benchmark in dict.fromkeys(each.benchmark for each in values):
        title = benchmark.upper() or "all benchmarks"
        rows = [TrainedRow(**row) for row in report["table_1"].get(benchmark, ())]
        if rows:
            yield f"{title}: the paper's Table 1, and what is trained by default (--size full)"
            table = plain_table("", "published", "CANDLE", "here")
            table.add_column("note", overflow="fold")
            for row in rows:
                name, unit = content()["table_1_rows"][row.name]
                cells = (row.published, row.candle, row.here)
                shown = ("-" if cell is None else number_words(cell) for cell in cells)
                table.add_row(f"{name} (MB)" if unit == "MB" else name, *shown, row.note)
            yield table
        yield f"{title}: published values"
        table = plain_table("machine")
        for heading in ("value", "place"):
            table.add_column(heading, overflow="fold")
        for each in values:
            if each.benchmark == benchmark and (each.section != "Table 1" or not rows):
                where = each.where if each.source == "paper" else f"{each.source}, {each.where}"
                table.add_row(each.machine, each.says, where)
        yield table
    for source, reference in report["sources"].items():
        if any(each.source == source for each in values):
            yield f"{source}: {reference}"
    yield (
        "nothing is read off figures, and of Tables 2, 5 and 6 there is only what the text repeats"
    )
