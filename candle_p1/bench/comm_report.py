"""What measured communication shows: latency and bandwidth that are fitted to it, tables, a figure.

Hockney's model is T = latency + bytes / bandwidth (Parallel Computing 20(3), 1994). Libraries
change their protocol or algorithm with the size, and memory is slower than caches, so the sizes are
divided into few ranges with a line each where one does not hold. Lines of larger sizes may begin
below 0: a link that lets a burst pass takes (bytes - burst) / bandwidth. Where they cannot be told
from lines through 0, they are these, since otherwise sizes that lie close together would leave
their slope open.

Times differ by orders of magnitude, so a fit minimises the sum of ((model - time) / time)^2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, pairwise
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from candle_p1.bench.harness import GIGA, format_significant, table
from candle_p1.bench.transports import OPERATIONS
from candle_p1.reports.drawing import LOOK, Drawing, Mark, Panel, line_figure, to_drawing
from candle_p1.reports.statistics import Estimate
from candle_p1.text import count

Floats = NDArray[np.float64]
Fit = dict[str, Any]
Report = Mapping[str, Any]

MIN_SIZES, LEAST_SPAN, MAX_RANGES, LARGE_RESIDUAL = 3, 2, 4, 0.05
"""The least number of sizes of a range, more than the two parameters of a line; the factor by which
they differ at least, so that their slope shows; the most ranges; and what a line misses a time by
that does not hold for its size."""
MICRO, PERCENT = 1e-6, 0.01


def fits(points: Sequence[Mapping[str, Any]], num_ranks: int) -> list[Fit]:
    """Returns the fit of every operation of every transport that has enough sizes."""
    times: dict[tuple[str, str], dict[int, float]] = {}
    for each in points:
        times.setdefault((each["transport"], each["operation"]), {})[each["bytes"]] = each["mean_s"]
    return [
        {"transport": transport, "operation": operation, "num_ranks": num_ranks, **fitted}
        for (transport, operation), found in times.items()
        if (fitted := fit(sorted(found), [found[size] for size in sorted(found)]))
    ]


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> Fit | None:
    """Returns the parameters of an operation for ``--json``; None for fewer than MIN_SIZES sizes.

    `measured_bytes_per_s` is the median of bytes / time over the sizes from 1 / LEAST_SPAN of the
    largest on, and `one_line_residual` the largest relative error of the latency of the first range
    with the bandwidth of the last one. Sizes ascend, and times are above 0.
    """
    if len(sizes) < MIN_SIZES:
        return None
    lines = fit_lines(sizes, seconds)
    num_bytes, times = np.asarray(sizes, float), np.asarray(seconds)
    rate = lines[-1]["bandwidth_bytes_per_s"] or inf
    is_large = LEAST_SPAN * num_bytes >= sizes[-1]
    of_first = ("latency_s", "latency_ci95_s", "first_bytes")
    of_last = ("bandwidth_bytes_per_s", "bandwidth_ci95_bytes_per_s", "last_bytes")
    return {key: lines[0][key] for key in of_first} | {
        **{key: lines[-1][key] for key in of_last},
        "measured_bytes_per_s": float(np.median((num_bytes / times)[is_large])),
        "largest_residual": max(line["largest_residual"] for line in lines),
        "one_line_residual": float(
            np.abs((lines[0]["latency_s"] + num_bytes / rate) / times - 1).max()
        ),
        "ranges": lines,
    }


def fit_lines(sizes: Sequence[int], seconds: Sequence[float]) -> list[Fit]:
    """Returns the lines of at most MAX_RANGES ranges of sizes, ascending; see `fit`.

    There are as few ranges as miss no time by more than LARGE_RESIDUAL, or the most if all do. Each
    of several has at least MIN_SIZES sizes that span LEAST_SPAN, and they are divided where the sum
    of squared relative residuals is least.
    """
    num_sizes = len(sizes)
    fitted = cache(lambda begin, end: fit_line(sizes[begin:end], seconds[begin:end], begin == 0))

    def is_long(begin: int, end: int) -> bool:
        return end - begin >= MIN_SIZES and sizes[end - 1] >= LEAST_SPAN * sizes[begin]

    lines = [fitted(0, num_sizes)[0]]
    for num_ranges in range(2, min(MAX_RANGES, num_sizes // MIN_SIZES) + 1):
        if all(line["largest_residual"] <= LARGE_RESIDUAL for line in lines):
            break
        ends = [(0, *cuts, num_sizes) for cuts in combinations(range(1, num_sizes), num_ranges - 1)]
        divisions = [list(pairwise(each)) for each in ends]
        divisions = [each for each in divisions if all(is_long(*ends) for ends in each)]
        if not divisions:
            break
        best = min(divisions, key=lambda ranges: sum(fitted(*ends)[1] for ends in ranges))
        lines = [fitted(*ends)[0] for ends in best]
    return lines


def fit_line(
    sizes: Sequence[int], seconds: Sequence[float], is_first: bool = True
) -> tuple[Fit, float]:
    """Returns the line with the least sum of squared relative residuals, and this sum.

    Its slope is not below 0, nor is its latency if there are no smaller sizes: where the best line
    has such a parameter, it is the best of those for which one of them is 0. The latency of other
    lines is 0 if the interval of the best one contains 0. A bandwidth is None if the time does not
    grow with the size, and an end of its interval where it is not bounded.
    """
    num_bytes, times = np.asarray(sizes, float), np.asarray(seconds, float)
    columns = np.stack([1 / times, num_bytes / times], axis=1)
    best, errors, misfit = _solve(columns, [0, 1])
    if best[1] < 0 or (is_first and best[0] < 0):
        best, errors, misfit = min(_solve(columns, [0]), _solve(columns, [1]), key=lambda x: x[2])
    elif not is_first and abs(best[0]) < errors[0]:
        best, errors, misfit = _solve(columns, [1])
    (latency_s, slope), (latency_error_s, slope_error) = map(float, best), map(float, errors)
    slopes = (slope, slope + slope_error, slope - slope_error)
    rate, low, high = (1 / each if 0 < each < inf else None for each in slopes)
    least_s = 0.0 if is_first else -inf
    line = {
        "first_bytes": int(num_bytes[0]),
        "last_bytes": int(num_bytes[-1]),
        "num_sizes": len(times),
        "latency_s": latency_s,
        "latency_ci95_s": (max(least_s, latency_s - latency_error_s), latency_s + latency_error_s),
        "bandwidth_bytes_per_s": rate,
        "bandwidth_ci95_bytes_per_s": (low, high),
        "largest_residual": float(np.abs(columns @ best - 1).max()),
    }
    return line, misfit


def _solve(columns: Floats, used: list[int]) -> tuple[Floats, Floats, float]:
    """Returns the least-squares solution for ones on the right, with only some parameters.

    Also the half widths of its 95 % intervals, 0 where a parameter was set to 0, and its misfit.
    """
    from scipy.stats import t

    scale = np.linalg.norm(columns[:, used], axis=0)  # latencies and slopes differ by many orders
    scaled = columns[:, used] / scale
    found, widths = np.zeros(2), np.zeros(2)
    found[used] = np.linalg.lstsq(scaled, np.ones(len(columns)), rcond=None)[0] / scale
    misfit, degrees = float(np.square(columns @ found - 1).sum()), len(columns) - len(used)
    variances = misfit / degrees * np.diag(np.linalg.pinv(scaled.T @ scaled))
    widths[used] = t.ppf(0.975, degrees) * np.sqrt(variances) / scale
    return found, widths, misfit


def render(report: Report) -> Iterator[str | Table]:
    """Yields the lines and tables that show what was measured."""
    ranks, nodes = count(report["num_ranks"], "rank"), count(report["num_nodes"], "node")
    results, measured = report["results"], report["transports"]
    yield f"communication of {ranks} on {nodes}"
    for name, facts in measured.items():
        settings = [f"{k}={v}" for k, v in facts.items() if k not in ("what", "library")]
        yield "; ".join((f"{name}: {facts['what']}", facts["library"], *settings))
    for name, missing in report["not_installed"].items():
        yield f"{name}: not measured, because not installed here: {', '.join(missing)}"
    for operation, kind in OPERATIONS.items():
        for name in measured:
            rows = [r for r in results if (r["operation"], r["transport"]) == (operation, name)]
            if rows:
                explained = f" ({kind.explanation})" if kind.explanation else ""
                yield table(rows, TIMES, f"{name}: {kind.title}{explained}")
    yield (
        "min, mean and max are over ranks, of two the first; each is the median over blocks of"
        " calls. Sizes and bandwidths are those of nccl-tests, the algorithm bandwidth that of mean"
    )
    if late := sum(each["stopped_by"] == "time" for each in results):
        yield (
            f"~: {late} of {count(len(results), 'time')} did not get within 5 % of the mean in"
            f" {report['seconds']:g} s"
        )
    if report["left_out_bytes"]:
        sizes = ", ".join(f"{size:,}" for size in report["left_out_bytes"])
        limit = f"{report['limit_bytes']:,} bytes, which fill half of the free memory of a node"
        yield f"left out, because larger than {limit}: {sizes} bytes"
    if report["overlaps"]:
        yield table(report["overlaps"], OVERLAPS, "allreduce beside computing")
        yield "hidden: the part of the allreduce that does not prolong computing"
    if report["fits"]:
        yield table(report["fits"], FITS, "fitted")
        yield (
            "fitted: time = latency + bytes / bandwidth, of the smallest and of the largest sizes,"
            " with 95 % intervals; measured: the median of bytes / mean of sizes from"
            f" 1/{LEAST_SPAN} of the largest on"
        )
    for each in report["fits"]:
        if len(each["ranges"]) > 1:
            title = f"{each['transport']}, {each['operation']}: ranges of sizes"
            yield table(each["ranges"], RANGES, title)


def _mean_interval(row: Mapping[str, Any]) -> str:
    """Returns the interval, with a ~ where it was not as narrow as it was to be."""
    if not row["ci95_s"]:
        return "too few repeats"
    mark = "" if row["stopped_by"] == "precision" else "~"
    return mark + " to ".join(format_significant(end / MICRO) for end in row["ci95_s"])


def _fitted(name: str, unit: str, scale: float) -> Callable[[Mapping[str, Any]], str]:

    def cell(row: Mapping[str, Any]) -> str:
        if row[f"{name}_{unit}"] is None:
            return "not limited"
        value, *ends = (
            "?" if each is None else format_significant(each / scale)
            for each in (row[f"{name}_{unit}"], *row[f"{name}_ci95_{unit}"])
        )
        return f"{value} [{', '.join(ends)}]"

    return cell


TIMES: Any = {
    "bytes": lambda row: f"{row['bytes']:,}",
    "min\n(us)": ("min_s", MICRO),
    "mean\n(us)": ("mean_s", MICRO),
    "max\n(us)": ("max_s", MICRO),
    "95 % interval\nof the mean (us)": _mean_interval,
    "algorithm\n(GB/s)": ("algorithm_bytes_per_s", GIGA),
    "bus\n(GB/s)": ("bus_bytes_per_s", GIGA),
    "gradients\nof": lambda row: row["gradients_of"] or "",
}
OVERLAPS: Any = {
    "transport": "transport",
    "bytes": lambda row: f"{row['bytes']:,}",
    "allreduce\nalone (us)": ("communication_s", MICRO),
    "computing\nalone (us)": ("computing_s", MICRO),
    "both\n(us)": ("together_s", MICRO),
    "exposed\n(us)": ("exposed_s", MICRO),
    "hidden\n(%)": lambda row: f"{row['hidden_share'] / PERCENT:.0f}",
}
LINE: Any = {
    "latency\n(us)": _fitted("latency", "s", MICRO),
    "bandwidth\n(GB/s)": _fitted("bandwidth", "bytes_per_s", GIGA),
}
RESIDUAL: Any = {"largest\nresidual (%)": ("largest_residual", PERCENT)}
FITS: Any = {
    "transport": "transport",
    "operation": "operation",
    **LINE,
    "measured, of\nlarge (GB/s)": ("measured_bytes_per_s", GIGA),
    "ranges": lambda row: len(row["ranges"]),
    **RESIDUAL,
    "with one\nline (%)": ("one_line_residual", PERCENT),
}
RANGES: Any = {
    "from (bytes)": lambda row: f"{row['first_bytes']:,}",
    "to": lambda row: f"{row['last_bytes']:,}",
    **LINE,
    **RESIDUAL,
}


def figure(report: Report) -> Drawing:
    """Returns a figure with a row for each operation, and in it a line for each transport.

    On the left are times, from those of the fastest rank to those of the slowest, on the right bus
    bandwidths.
    """
    import matplotlib as mpl
    from matplotlib.ticker import EngFormatter, LogLocator

    panels = []
    for operation, kind in OPERATIONS.items():
        found = [each for each in report["results"] if each["operation"] == operation]
        times: dict[str, list[Mark]] = {name: [] for name in report["transports"]}
        rates: dict[str, list[Mark]] = {name: [] for name in report["transports"]}
        for each in found:
            name, size, rate = each["transport"], each["bytes"], each["bus_bytes_per_s"]
            ranks = Estimate(each["mean_s"], each["min_s"], each["max_s"], 0.5, (1,))
            times[name].append(Mark(size, ranks))
            rates[name].append(Mark(size, Estimate(rate, rate, rate, 0, (1,))))
        if found:
            panels += [Panel(kind.title, times, "time"), Panel(kind.title, rates, "bus bandwidth")]
    with mpl.rc_context(LOOK):
        drawn = line_figure(panels, columns=2, x_label="")
        for number, axes in enumerate(drawn.axes):
            axes.xaxis.set_major_locator(LogLocator())
            axes.xaxis.set_major_formatter(EngFormatter("B"))
            if axes.get_yscale() == "log":
                axes.yaxis.set_major_locator(LogLocator(numticks=12))
            axes.yaxis.set_major_formatter(EngFormatter("B/s" if number % 2 else "s"))
        return to_drawing(drawn, "communication", "communication between ranks", "")
