"""All runs as one tidy table: a row per run, a column per quantity, named with its unit.

It contains every run that could be read, including those that failed or were traced (see the
columns `status` and `disturbed`). Unknown values are empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from candle_p1.reports import quantities
from candle_p1.reports.points import mode_of
from candle_p1.reports.words import csv_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from candle_p1.reports.runs import RecordedRun

QUANTITIES = (
    quantities.TOTAL,
    quantities.EPOCH,
    quantities.FIRST_STEP,
    quantities.BROADCAST,
    quantities.WAIT,
    quantities.TRANSFER,
    quantities.SAMPLES,
    quantities.COMMUNICATION,
    quantities.LOAD_BALANCE,
    quantities.COMMUNICATION_EFFICIENCY,
    quantities.PARALLEL_EFFICIENCY,
    quantities.ENERGY,
    quantities.POWER,
    *(each for pair in quantities.POWER_AND_ENERGY for each in pair),
)
ATTRIBUTES = (
    "status", "disturbed", "failure", "started", "num_ranks", "num_nodes", "threads", "synthetic",
    "data",
)  # fmt: skip
GROUPS = ("phase_", "test_", "naive_", "training_", "plan_", "parameter_", "version_")
"""The beginnings of the names of the last columns, in their order."""

TYPES = {
    "boolean": "boolean",
    "integer": "Int64",
    "floating": "Float64",
    "mixed-integer-float": "Float64",
}
"""The type of a column by the kind of its values; those of other or several kinds are text."""


def tidy(runs: Sequence[RecordedRun]) -> pd.DataFrame:
    """Returns the table. Columns are in a fixed order, and within a group by name."""
    table = pd.DataFrame([dict(_cells(run)) for run in runs], dtype=object)
    columns = list(map(str, table))
    names = [name for name in columns if not name.startswith(GROUPS)]
    for group in GROUPS:
        names += sorted(name for name in columns if name.startswith(group))
    kinds = {name: pd.api.types.infer_dtype(table[name], skipna=True) for name in names}
    types = {name: TYPES.get(kind, "string") for name, kind in kinds.items()}
    types |= {quantity.name: "Float64" for quantity in QUANTITIES if quantity.name in types}
    return table[names].astype(types)


def to_csv(table: pd.DataFrame) -> str:
    """Returns a table as CSV, in which no text is a formula."""
    words = [str(name) for name, kind in table.dtypes.items() if kind == "string"]
    return table.assign(**{n: table[n].map(csv_text, "ignore") for n in words}).to_csv(index=False)


def _cells(run: RecordedRun) -> Iterator[tuple[str, Any]]:
    """Yields the columns of a run with their values; None is unknown."""
    yield "record", run.place
    yield "benchmark", run.benchmark
    yield "mode", mode_of(run)
    for name in ATTRIBUTES:
        yield name, getattr(run, name)
    yield "hosts", " ".join(run.hosts) or None
    for name in ("cpu", "num_cores", "memory_gib"):
        yield name, getattr(run.machine, name, None)
    yield "devices", " ".join(run.machine.devices) if run.machine else None
    yield "energy_kind", run.energy_kind
    for quantity in QUANTITIES:
        yield quantity.name, quantity.of(run)
    for name, seconds in run.phase_s.items():
        yield f"phase_{name}_s", seconds
    for group, figures in (
        ("test", run.quality),
        ("naive", run.naive),
        ("training", run.last_epoch),
        ("plan", run.plan),
        ("version", run.versions),
    ):
        for name, value in figures.items():
            yield f"{group}_{name}", value
    for name, value in run.parameters.items():
        yield f"parameter_{name}", " ".join(map(str, value)) if isinstance(value, list) else value
