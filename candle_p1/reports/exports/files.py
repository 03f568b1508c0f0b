"""The files for other programs that a report has beside its page."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from candle_p1.files import write_atomically
from candle_p1.reports.exports.extrap import extrap_files
from candle_p1.reports.exports.tidy import to_csv, to_parquet

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from candle_p1.reports.points import Experiment
    from candle_p1.reports.runs import RecordedRun


class Export(NamedTuple):
    """A file.

    Attributes:
        name: Its path within the report.
        content: What it holds.
    """

    name: str
    content: str | bytes


def make_exports(
    runs: Iterable[RecordedRun], experiments: Iterable[Experiment]
) -> tuple[Export, ...]:
    """Returns the tidy tables of all runs, and Extra-P's input of every series."""
    runs = list(runs)
    exports = [Export("runs.csv", to_csv(runs))]
    parquet = to_parquet(runs)
    if parquet is not None:
        exports.append(Export("runs.parquet", parquet))
    series = extrap_files(experiments)
    exports += [Export(f"extrap/{name}", content) for name, content in series.items()]
    return tuple(exports)


def write_exports(exports: Iterable[Export], directory: Path) -> None:
    """Writes them.

    Raises:
        OSError: A file cannot be written.
    """
    for export in exports:
        path = directory / export.name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, export.content)
