"""All runs as one tidy table: a row per run, a column per quantity, named with its unit.

It contains every run that could be read, including those that failed or were traced (see the
columns `status` and `perturbed_by`). Unknown values are empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from candle_p1.reports.words import csv_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from candle_p1.reports.frame import Run

FACTS = (
    "record", "benchmark", "mode", "status", "perturbed_by", "failure", "started", "num_ranks",
    "num_nodes", "threads", "synthetic", "data", "hosts", "cpu", "num_cores", "memory_gib",
    "devices", "energy_kind",
)  # fmt: skip
QUANTITIES = (
    "total_s", "epoch_s", "first_step_s", "broadcast_overhead_s", "broadcast_wait_s",
    "broadcast_transfer_s", "samples_per_s", "communication_share", "load_balance",
    "communication_efficiency", "parallel_efficiency", "energy_j", "power_w", "power_per_gpu_w",
    "energy_per_gpu_j", "power_per_node_w", "energy_per_node_j",
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


def tidy(runs: Iterable[Run]) -> pd.DataFrame:
    """Returns the table. Columns are in a fixed order, and within a group by name."""
    runs = list(runs)
    facts = [each for run in runs for each in run.facts.items()]
    known = {name for name, value in facts if value is not None or name.startswith("parameter_")}
    names = [*FACTS, *QUANTITIES]
    names += (name for group in GROUPS for name in sorted(known) if name.startswith(group))
    rows = [{name: _words(run[name]) for name in names} for run in runs]
    table = pd.DataFrame(rows, columns=names, dtype=object)
    kinds = {name: pd.api.types.infer_dtype(table[name], skipna=True) for name in names}
    types = {name: TYPES.get(kind, "string") for name, kind in kinds.items()}
    return table.astype(types | dict.fromkeys(QUANTITIES, "Float64"))


def to_csv(table: pd.DataFrame) -> str:
    """Returns a table as CSV, in which no text is a formula."""
    words = [str(name) for name, kind in table.dtypes.items() if kind == "string"]
    return table.assign(**{n: table[n].map(csv_text, "ignore") for n in words}).to_csv(index=False)


def _words(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list) else value
