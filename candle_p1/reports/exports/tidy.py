"""All runs as one tidy table: a row per run, a column per quantity, named with its unit.

It contains every run that could be read, including those that failed or were traced (see the
columns `status` and `disturbed`). Unknown values are empty.
"""

from __future__ import annotations

import csv
import io
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from candle_p1.reports import quantities
from candle_p1.reports.points import mode_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from candle_p1.reports.runs import RecordedRun

Columns = dict[str, tuple[type, list[Any]]]
"""By name: the type of the values that are not None, and the values, one per run."""

QUANTITIES = (
    quantities.TOTAL,
    quantities.EPOCH,
    quantities.FIRST_STEP,
    quantities.WAIT,
    quantities.SAMPLES,
    quantities.COMMUNICATION,
    quantities.LOAD_BALANCE,
    quantities.COMMUNICATION_EFFICIENCY,
    quantities.PARALLEL_EFFICIENCY,
    quantities.ENERGY,
    quantities.POWER,
)
ATTRIBUTES = (
    "status", "disturbed", "failure", "started", "num_ranks", "num_nodes", "threads", "synthetic",
    "data",
)  # fmt: skip
ALWAYS = {quantity.name for quantity in QUANTITIES}
"""Columns of numbers that exist even where no run has a value."""


def tidy(runs: Sequence[RecordedRun]) -> Columns:
    """Returns the table. Columns are in a fixed order, and within a group by name."""
    rows = [dict(_cells(run)) for run in runs]
    found = {name: None for row in rows for name in row}
    groups = ("phase_", "test_", "naive_", "training_", "plan_", "parameter_", "version_")
    first = [name for name in found if not name.startswith(groups)]
    rest = [name for group in groups for name in sorted(found) if name.startswith(group)]
    table = {}
    for name in [*first, *rest]:
        values = [row.get(name) for row in rows]
        kind = float if name in ALWAYS else _kind(values)
        table[name] = kind, [None if value is None else kind(value) for value in values]
    return table


def to_csv(runs: Sequence[RecordedRun]) -> str:
    """Returns the table as CSV (RFC 4180, but lines end with a line feed); None is empty."""
    columns = tidy(runs)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in zip(*(values for _, values in columns.values()), strict=True):
        writer.writerow("" if value is None else value for value in row)
    return text.getvalue()


def to_parquet(runs: Sequence[RecordedRun]) -> bytes | None:
    """Returns the table as Apache Parquet; None where pyarrow is not installed."""
    if find_spec("pyarrow") is None:
        return None
    import pyarrow
    import pyarrow.parquet

    types = {
        bool: pyarrow.bool_(),
        int: pyarrow.int64(),
        float: pyarrow.float64(),
        str: pyarrow.string(),
    }
    arrays = {
        name: pyarrow.array(values, types[kind]) for name, (kind, values) in tidy(runs).items()
    }
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(arrays), sink)
    return bytes(sink.getvalue())


def _cells(run: RecordedRun) -> Iterator[tuple[str, Any]]:
    """Yields the columns of a run with their values; None is unknown."""
    yield "record", str(run.path)
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


def _kind(values: Sequence[Any]) -> type:
    """Returns the type that can hold all values: text where they are of several kinds."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        return float
    return kinds.pop() if len(kinds) == 1 and kinds <= {bool, int, float} else str
