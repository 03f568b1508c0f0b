"""Shows measured communication as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from candle_p1.bench.comm_fit import LEAST_SPAN
from candle_p1.bench.tables import digits
from candle_p1.distributed.transports import TRANSPORTS
from candle_p1.distributed.transports.transport import OPERATIONS
from candle_p1.records.tables import empty_table
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.table import Table

US, GB = 1e-6, 1e9


def title_of(report: Mapping[str, Any]) -> str:
    """Returns on what was measured."""
    ranks, nodes = report["num_ranks"], report["num_nodes"]
    return f"communication of {count(ranks, 'rank')} on {count(nodes, 'node')}"


def parts(report: Mapping[str, Any]) -> Iterator[str | Table]:
    """Yields the lines and tables that show what was measured.

    Args:
        report: What `candle_p1.bench.comm.CommMeasurement.measure` returned.
    """
    yield title_of(report)
    for name, facts in report["transports"].items():
        settings = ", ".join(
            f"{key}={value}" for key, value in facts.items() if key not in ("what", "library")
        )
        yield f"{name}: {facts['what']}; {facts['library']}{settings and f' ({settings})'}"
    for name, missing in report["not_installed"].items():
        yield f"{name}: not measured, because not installed here: {', '.join(missing)}"
    if report["num_nodes"] > 1:
        for name, kind in TRANSPORTS.items():
            if kind.on_one_node:
                yield f"{name}: not measured, because the ranks are on several nodes"
    if report["launched"] and "horovod" in report["transports"]:
        yield (
            "horovod_fusion, horovod_paper: not measured in the processes that horovod was measured"
            " in, which cannot change its settings; name one of them in --through"
        )
    results = report["results"]
    for operation in OPERATIONS:
        for transport in report["transports"]:
            chosen = [
                each
                for each in results
                if (each["operation"], each["transport"]) == (operation, transport)
            ]
            if chosen:
                yield _times(f"{transport}: {_described(operation)}", chosen)
    yield from _explanations(report)
    if report["overlaps"]:
        yield _overlaps(report["overlaps"])
        yield (
            "computing is a chain of products of matrices of 128 x 128 that takes about as long as"
            " the allreduce alone, begun when it has begun; hidden is the part of the allreduce"
            " that does not prolong it, as osu_iallreduce defines it"
        )
    if report["fits"]:
        yield _fits(report["fits"])
        yield (
            "fitted: time = latency + bytes / bandwidth, with least relative residuals, in up to"
            " four ranges of sizes; the latency is that of the smallest sizes, the bandwidth that"
            " of the largest; in brackets 95 % intervals. Measured, of large: the median of bytes /"
            f" mean over the sizes from 1/{LEAST_SPAN} of the largest on"
        )
        for each in report["fits"]:
            if len(each["ranges"]) > 1:
                yield _ranges(each)


def _described(operation: str) -> str:
    kind = OPERATIONS[operation]
    return kind.title + (f" ({kind.explanation})" if kind.explanation else "")


def _times(title: str, results: Sequence[Mapping[str, Any]]) -> Table:
    table = empty_table(
        title,
        "bytes",
        "min\n(us)",
        "mean\n(us)",
        "max\n(us)",
        "95 % interval\nof the mean (us)",
        "algorithm\n(GB/s)",
        "bus\n(GB/s)",
        "gradients\nof",
        num_words=0,
    )
    for each in results:
        table.add_row(
            f"{each['bytes']:,}",
            _us(each["min_s"]),
            _us(each["mean_s"]),
            _us(each["max_s"]),
            _between(each),
            digits(each["algorithm_bytes_per_s"] / GB),
            digits(each["bus_bytes_per_s"] / GB),
            each["gradients_of"] or "",
        )
    return table


def _between(result: Mapping[str, Any]) -> str:
    """Returns the interval; with a ~ where it was not as narrow as it was to be."""
    if result["ci95_s"] is None:
        return "too few repeats"
    mark = "" if result["stopped_by"] == "precision" else "~"
    return f"{mark}{_us(result['ci95_s'][0])} to {_us(result['ci95_s'][1])}"


def _explanations(report: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "min, mean and max are over ranks, of two the first; each is the median over blocks of"
        " calls, which begin after a barrier. Sizes and bandwidths are those of nccl-tests: bytes"
        " are those of the whole array, also where each rank has a part of it; algorithm bandwidth"
        " is bytes / mean; bus bandwidth is this times 2 (n - 1) / n for allreduce, (n - 1) / n for"
        " allgather and reduce-scatter, and 1 for the others"
    )
    late = sum(each["stopped_by"] == "time" for each in report["results"])
    if late:
        yield (
            f"~: {late} of {count(len(report['results']), 'time')} did not get within 5 % of the"
            f" mean in {report['seconds']:g} s; --seconds gives them more"
        )
    if report["left_out_bytes"]:
        sizes = ", ".join(f"{size:,}" for size in report["left_out_bytes"])
        yield (
            f"left out, because half of the free memory of a node holds arrays of at most"
            f" {report['limit_bytes']:,} bytes on all of its ranks: {sizes} bytes"
        )


def _overlaps(overlaps: Sequence[Mapping[str, Any]]) -> Table:
    table = empty_table(
        "allreduce beside computing",
        "transport",
        "bytes",
        "allreduce\nalone (us)",
        "computing\nalone (us)",
        "both\n(us)",
        "exposed\n(us)",
        "hidden\n(%)",
    )
    for each in overlaps:
        table.add_row(
            each["transport"],
            f"{each['bytes']:,}",
            *(
                _us(each[f"{name}_s"])
                for name in ("communication", "computing", "together", "exposed")
            ),
            f"{100 * each['hidden_share']:.0f}",
        )
    return table


def _fits(fits: Sequence[Mapping[str, Any]]) -> Table:
    table = empty_table(
        "fitted",
        "transport",
        "operation",
        "latency\n(us)",
        "bandwidth\n(GB/s)",
        "measured, of\nlarge (GB/s)",
        "ranges",
        "largest\nresidual (%)",
        "with one\nline (%)",
        num_words=2,
    )
    for each in fits:
        table.add_row(
            each["transport"],
            each["operation"],
            f"{_us(each['latency_s'])} {_interval(each['latency_ci95_s'], US)}",
            _bandwidth(each),
            digits(each["measured_bytes_per_s"] / GB),
            str(len(each["ranges"])),
            digits(100 * each["largest_residual"]),
            digits(100 * each["one_line_residual"]),
        )
    return table


def _ranges(fit: Mapping[str, Any]) -> Table:
    table = empty_table(
        f"{fit['transport']}, {fit['operation']}: ranges of sizes",
        "from (bytes)",
        "to",
        "latency\n(us)",
        "bandwidth\n(GB/s)",
        "largest\nresidual (%)",
        num_words=0,
    )
    for line in fit["ranges"]:
        table.add_row(
            f"{line['first_bytes']:,}",
            f"{line['last_bytes']:,}",
            f"{_us(line['latency_s'])} {_interval(line['latency_ci95_s'], US)}",
            _bandwidth(line),
            digits(100 * line["largest_residual"]),
        )
    return table


def _bandwidth(fit: Mapping[str, Any]) -> str:
    rate = fit["bandwidth_bytes_per_s"]
    if rate is None:
        return "not limited"
    return f"{digits(rate / GB)} {_interval(fit['bandwidth_ci95_bytes_per_s'], GB)}"


def _interval(ends: Sequence[float | None], unit: float) -> str:
    return "[" + ", ".join("?" if end is None else digits(end / unit) for end in ends) + "]"


def _us(seconds: float) -> str:
    return digits(seconds / US)
