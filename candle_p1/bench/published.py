"""Every published value, and the paper's Table 1 beside what is trained here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rich.table import Table

from candle_p1.benchmark import Benchmark, find_benchmark
from candle_p1.errors import ParameterError
from candle_p1.records.tables import empty_table
from candle_p1.reports.published import Published, all_published, content, number_words

DIFFERS = "differs"
"""The note on a row that differs from the paper without a reason."""
MIB = 2**20
DATA_SEED = 2019
SIZE_TOLERANCE = 0.02
"""Files whose sizes differ by less than this fraction have the same size: values are random."""


def table_1(benchmark: Benchmark) -> dict[str, dict[str, Any]]:
    """Returns the paper's Table 1 beside what is trained here; {} if the paper has no column.

    For each of published.toml's `table_1_rows`: what is ``published``; ``candle``, which CANDLE's
    default model file says; ``here``, the default with synthetic data of full size, None if it is
    not known; and a ``note`` that says why it differs from the paper.
    """
    told, candle = (content()[key].get(benchmark.name, {}) for key in ("table_1", "candle"))
    own, rows = _trained(benchmark) if told else {}, {}
    for name, cell in told.items():
        here, same = own.get(name), own.get(name) == cell
        if name.endswith("_mb") and here is not None:
            same = abs(here - cell) <= SIZE_TOLERANCE * cell
        note = benchmark.paper.notes.get(name, "" if same else DIFFERS)
        rows[name] = {"published": cell, "candle": candle.get(name), "here": here, "note": note}
    return rows


def _trained(benchmark: Benchmark) -> dict[str, Any]:
    params, paper = benchmark.declaration.parse([], benchmark.model_file), benchmark.paper
    own: dict[str, Any] = {name: params[name] for name in ("epochs", "batch_size", "optimizer")}
    rate = params["learning_rate"]
    own["learning_rate"] = "none" if rate is None else rate
    if paper.num_samples and paper.num_inputs:
        held_out = params["val_split"] if "val_split" in benchmark.supports else 0
        own["samples"] = paper.num_samples - int(paper.num_samples * held_out)
        own["elements"] = paper.num_inputs
    if benchmark.recipe:
        files = benchmark.recipe.files("full", DATA_SEED)
        sizes = {file.name: file.num_bytes_estimate for file in files}
        own["testing_mb"] = round(sizes.pop(benchmark.recipe.roles[paper.testing_role]) / MIB)
        own["training_mb"] = round(sum(sizes.values()) / MIB)
    return own


def collect(name: str | None) -> dict[str, Any]:
    """Returns the published values as JSON holds them, and Table 1 beside what is trained here.

    Those of one benchmark, or of all, and of none in particular.

    Raises:
        ParameterError: There is no such benchmark, or nothing is published about it.
    """
    values = all_published()
    known = list(dict.fromkeys(each.benchmark for each in values if each.benchmark))
    if name is not None and name not in known:
        name = find_benchmark(name).name
        if name not in known:
            raise ParameterError(
                f"nothing is published about {name}: choose from {', '.join(known)}"
            )
    compared = [each for each in content()["table_1"] if name in (None, each)]
    return {
        "sources": content()["sources"],
        "machines": content()["machines"],
        "table_1": {
            benchmark: [
                {"name": row, **cells} for row, cells in table_1(find_benchmark(benchmark)).items()
            ]
            for benchmark in compared
        },
        "values": [asdict(each) for each in values if name in (None, each.benchmark)],
    }


def to_csv(report: Mapping[str, Any]) -> str:
    """Returns the values as CSV, with a column for each of their fields."""
    import pandas as pd

    rows = [value | {"loaders": " ".join(value["loaders"])} for value in report["values"]]
    return pd.DataFrame(rows, dtype=object).to_csv(index=False)


def render(report: Mapping[str, Any]) -> Iterator[str | Table]:
    """Yields what `collect` returned as lines and tables."""
    values = [Published(**value) for value in report["values"]]
    for benchmark in dict.fromkeys(each.benchmark for each in values):
        title, rows = benchmark.upper() or "all benchmarks", report["table_1"].get(benchmark, ())
        if rows:
            yield f"{title}: the paper's Table 1, and what is trained by default (--size full)"
            table = empty_table("", "", "published", "CANDLE", "here")
            table.add_column("note", overflow="fold")
            for row in rows:
                name, unit = content()["table_1_rows"][row["name"]]
                cells = (row[key] for key in ("published", "candle", "here"))
                shown = ("-" if cell is None else number_words(cell) for cell in cells)
                table.add_row(f"{name} (MB)" if unit == "MB" else name, *shown, row["note"])
            yield table
        yield f"{title}: published values"
        table = empty_table("", "machine")
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
