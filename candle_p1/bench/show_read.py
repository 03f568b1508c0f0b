"""Shows how reading scales with ranks, as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from candle_p1.bench.tables import MB, digits, plain_table, spread, too_few
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.table import Table

MAX_SHOWN_RANKS = 16


def parts(report: Mapping[str, Any]) -> Iterator[str | Table]:
    """Yields the lines and tables that show a measurement.

    Args:
        report: What `candle_p1.bench.read.ReadComparison.measure` returned.
    """
    results = report["results"]
    first = results[0]
    blocks = report["num_blocks"]
    size = f"of 1/{blocks} of the largest file" if blocks else "as in a run"
    delay = f", {report['delay_s']:g} s extra per block" if report["delay_s"] else ""
    yield (
        f"{report['benchmark']}: reading {digits(sum(report['files'].values()) / MB)} MB in blocks"
        f" {size}{delay}, file cache"
        f" {report['file_cache']}, {count(report['threads'], 'thread')} per rank,"
        f" {count(first['repeats'], 'repeat')}"
    )
    over = f"time over that of\n{count(first['num_ranks'], 'rank')}"
    table = plain_table("ranks", "median\n(s)", f"{spread(first)}\n(s)", over, "reading at\na time")
    for result in results:
        num_ranks, mean = str(result["num_ranks"]), result["mean_ranks"]
        table.add_row(num_ranks, *_times(result), "not measured" if mean is None else digits(mean))
        if result["apart"]:
            table.add_row(f"{num_ranks} apart", *_times(result["apart"]))
    yield table
    if any(result["apart"] for result in results):
        yield (
            "apart: each rank loads its part of the files, without the others and into memory of"
            " its own; what ranks gain then is all that the machine allows"
        )
    most = max(results, key=lambda result: result["num_ranks"])
    role = max(most["reading"], key=lambda role: report["files"][role], default=None)
    if role is not None and most["num_ranks"] > 1:
        yield f"when the ranks read {role}, in s from the beginning, in the last job with the most"
        yield _ranks(most["per_rank"][role])
    if first["ci95_s"] is None:
        yield too_few(first, "repeat")
    if report["synthetic"]:
        yield "the data are synthetic"


def _times(times: Mapping[str, Any]) -> list[str]:
    low, high = times["ci95_s"] or times["range_s"]
    return [digits(times["median_s"]), f"{digits(low)} to {digits(high)}", digits(times["ratio"])]


def _ranks(values: Mapping[str, Any]) -> Table:
    table = plain_table("rank", "first read", "last read ended", "reading", "MB")
    columns = [values[name] for name in ("begin_s", "end_s", "busy_s", "num_bytes")]
    for rank, (begin_s, end_s, busy_s, num_bytes) in enumerate(zip(*columns, strict=True)):
        if rank == MAX_SHOWN_RANKS:
            table.add_row("…")
            break
        times = [f"{each:.3f}" if each is not None else "none" for each in (begin_s, end_s)]
        table.add_row(str(rank), *times, f"{busy_s:.3f}", digits(num_bytes / MB))
    return table
