"""Shows where the time from the command to the first step goes, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from candle_p1.bench.tables import MB, digits, plain_table, spread, too_few
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.table import Table


def parts(report: Mapping[str, Any]) -> Iterator[str | Table]:
    """Yields the lines and the table that show a comparison.

    Args:
        report: What `candle_p1.bench.start.StartComparison.measure` returned.
    """
    run, bare = report["results"]
    yield (
        f"{report['benchmark']}: from the command to the end of the first step, on"
        f" {count(report['num_ranks'], 'rank')}, {count(report['num_rounds'], 'round')}, files of"
        f" {digits(report['file_bytes'] / MB)} MB in the file cache"
    )
    yield _times(run, bare)
    low, high = report["ci95_ratio"] or report["range_ratio"]
    yield (
        f"the start takes {digits(report['median_ratio'])} times as long as the bare minimum"
        f" ({spread(run)} {digits(low)} to {digits(high)}), for which as many processes as ranks"
        f" import {report['framework']} and read the files' bytes"
    )
    yield "parts of a run are means over ranks; the process of a single rank is that of the command"
    if run["ci95_s"] is None:
        yield too_few(run, "round")
    if report["synthetic"]:
        yield "the data are synthetic"


def _times(run: Mapping[str, Any], bare: Mapping[str, Any]) -> Table:
    table = plain_table("", "median (s)", f"{spread(run)} (s)")

    def add(name: str, times: Mapping[str, Any] | None) -> None:
        if times:
            low, high = times["ci95_s"] or times["range_s"]
            table.add_row(name, f"{times['median_s']:.3f}", f"{low:.3f} to {high:.3f}")

    for result in (run, bare):
        for part in result["parts"]:
            add(f"  {part['part']}", part)
        add(result["variant"], result)
        table.add_section()
    add("a later step", run["later_step"])
    add("from the last measurement to the command's end", run["end"])
    return table
