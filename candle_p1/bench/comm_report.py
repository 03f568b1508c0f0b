"""What measured communication shows: latency and bandwidth that are fitted to it, tables, a figure.

Hockney's model is T = latency + bytes / bandwidth. Libraries change their protocol or algorithm
with the size (eager messages and rendezvous, trees and rings), and memory is slower than caches, so
one line seldom holds from 4 B to 1 GiB. Where it does not, the sizes are divided into few ranges
with a line each. The latency is then that of the smallest sizes, and the bandwidth that of the
largest. The lines of larger sizes may begin below 0: a link that lets a burst pass takes
(bytes - burst) / bandwidth. Where they cannot be told from lines through 0, they are these, since
otherwise sizes that lie close together would leave their slope open.

Residuals are relative, because times differ by orders of magnitude: a fit minimises the sum of
((model - time) / time)^2.

R. W. Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel
Computing 20(3), 1994.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, pairwise
from math import inf, log10
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from candle_p1.bench.harness import format_significant as _number
from candle_p1.bench.transports import ALLREDUCE, OPERATIONS, TRANSPORTS
from candle_p1.records.tables import empty_table
from candle_p1.reports.drawing import (
    COLORS,
    LOOK,
    MARKERS,
    legend_below,
    log_axis,
    new_figure,
    to_drawing,
)
from candle_p1.reports.render import page_of, render_page
from candle_p1.text import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

    from candle_p1.reports.drawing import Drawing

Floats = NDArray[np.float64]
Fit = dict[str, Any]
Report = Mapping[str, Any]

MIN_SIZES = 3
"""A line has two parameters, so fewer sizes leave nothing to estimate its error from."""
LEAST_SPAN = 2
"""The sizes of a range differ at least by this factor, so that their slope shows."""
MAX_RANGES = 4
LARGE_RESIDUAL = 0.05
"""A line that misses a time by more than this does not hold for its size."""
PANEL_INCHES = (5.0, 2.9)
LEVEL_POINTS = 10
"""The height of a row of labels."""


def fits(points: Sequence[Mapping[str, Any]], num_ranks: int) -> list[Fit]:
    """Returns the fit of every operation of every transport that has enough sizes."""
    found = []
    for which in dict.fromkeys((each["transport"], each["operation"]) for each in points):
        chosen = [each for each in points if (each["transport"], each["operation"]) == which]
        sizes, seconds = zip(*sorted((p["bytes"], p["mean_s"]) for p in chosen), strict=True)
        fitted = fit(sizes, seconds)
        if fitted is not None:
            transport, operation = which
            facts = {"transport": transport, "operation": operation, "num_ranks": num_ranks}
            found.append(facts | fitted)
    return found


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> Fit | None:
    """Returns the parameters of an operation for ``--json``; None for fewer than MIN_SIZES sizes.

    `measured_bytes_per_s` is the median of bytes / time over the sizes from 1 / LEAST_SPAN of the
    largest on, and `one_line_residual` the largest relative error of the latency of the first range
    with the bandwidth of the last one. Sizes ascend, and times are above 0.
    """
    if len(sizes) < MIN_SIZES:
        return None
    lines = fit_lines(sizes, seconds)
    of_first = ("latency_s", "latency_ci95_s", "first_bytes")
    of_last = ("bandwidth_bytes_per_s", "bandwidth_ci95_bytes_per_s", "last_bytes")
    found = {key: lines[0][key] for key in of_first} | {key: lines[-1][key] for key in of_last}
    num_bytes, times = np.asarray(sizes, float), np.asarray(seconds)
    model = found["latency_s"] + num_bytes / (found["bandwidth_bytes_per_s"] or inf)
    is_large = LEAST_SPAN * num_bytes >= sizes[-1]
    return found | {
        "measured_bytes_per_s": float(np.median((num_bytes / times)[is_large])),
        "largest_residual": max(line["largest_residual"] for line in lines),
        "one_line_residual": float(np.abs(model / times - 1).max()),
        "ranges": lines,
    }


def fit_lines(sizes: Sequence[int], seconds: Sequence[float]) -> list[Fit]:
    """Returns the lines of at most MAX_RANGES ranges of sizes, ascending; see `fit`.

    There are as few ranges as miss no time by more than LARGE_RESIDUAL, or the most if all do. Each
    of several has at least MIN_SIZES sizes that span LEAST_SPAN, and they are divided where the sum
    of squared relative residuals is least.
    """
    num_sizes = len(sizes)

    @cache
    def fitted(begin: int, end: int) -> tuple[Fit, float]:
        return fit_line(sizes[begin:end], seconds[begin:end], is_first=begin == 0)

    def is_long(begin: int, end: int) -> bool:
        return end - begin >= MIN_SIZES and sizes[end - 1] >= LEAST_SPAN * sizes[begin]

    lines: list[Fit] = []
    for num_ranges in range(1, max(1, min(MAX_RANGES, num_sizes // MIN_SIZES)) + 1):
        divisions = [
            list(pairwise((0, *inner, num_sizes)))
            for inner in combinations(range(1, num_sizes), num_ranges - 1)
        ]
        if num_ranges > 1:
            divisions = [each for each in divisions if all(is_long(*ends) for ends in each)]
        if not divisions:
            break
        best = min(divisions, key=lambda ranges: sum(fitted(*ends)[1] for ends in ranges))
        lines = [fitted(*ends)[0] for ends in best]
        if all(line["largest_residual"] <= LARGE_RESIDUAL for line in lines):
            break
    return lines


def fit_line(
    sizes: Sequence[int], seconds: Sequence[float], *, is_first: bool = True
) -> tuple[Fit, float]:
    """Returns the line with the least sum of squared relative residuals, and this sum.

    Its slope is not below 0, nor is its latency if there are no smaller sizes: where the best line
    has such a parameter, it is the best of those for which one of them is 0. The latency of other
    lines is 0 if the interval of the best one contains 0. A bandwidth is None if the time does not
    grow with the size, and an end of its interval where it is not bounded.
    """
    num_bytes, times = np.asarray(sizes, float), np.asarray(seconds, float)
    columns = np.stack([1 / times, num_bytes / times], axis=1)
    best, errors = _solve(columns, [0, 1])
    if best[1] < 0 or (is_first and best[0] < 0):
        choices = [_solve(columns, [which]) for which in (0, 1)]
        best, errors = min(choices, key=lambda found: _misfit(columns, found[0]))
    elif not is_first and abs(best[0]) < errors[0]:
        best, errors = _solve(columns, [1])
    (latency_s, slope), (latency_error_s, slope_error) = map(float, best), map(float, errors)
    least_s = 0.0 if is_first else -inf
    line = {
        "first_bytes": int(num_bytes[0]),
        "last_bytes": int(num_bytes[-1]),
        "num_sizes": len(times),
        "latency_s": latency_s,
        "latency_ci95_s": (max(least_s, latency_s - latency_error_s), latency_s + latency_error_s),
        "bandwidth_bytes_per_s": _inverse(slope),
        "bandwidth_ci95_bytes_per_s": (
            _inverse(slope + slope_error),
            _inverse(slope - slope_error),
        ),
        "largest_residual": float(np.abs(columns @ best - 1).max()),
    }
    return line, _misfit(columns, best)


def _solve(columns: Floats, used: list[int]) -> tuple[Floats, Floats]:
    """Returns the least-squares solution for ones on the right, with only some parameters.

    Also the half widths of its 95 % intervals, 0 where a parameter was set to 0.
    """
    from scipy.stats import t

    chosen = columns[:, used]
    scale = np.linalg.norm(chosen, axis=0)  # latencies and slopes differ by many orders
    found, widths = np.zeros(2), np.zeros(2)
    found[used] = np.linalg.lstsq(chosen / scale, np.ones(len(columns)), rcond=None)[0] / scale
    degrees = len(columns) - len(used)
    inverse = np.linalg.pinv((chosen / scale).T @ (chosen / scale))
    variance = _misfit(columns, found) / degrees if degrees else inf
    widths[used] = t.ppf(0.975, max(1, degrees)) * np.sqrt(variance * np.diag(inverse)) / scale
    return found, widths


def _misfit(columns: Floats, found: Floats) -> float:
    return float(np.square(columns @ found - 1).sum())


def _inverse(slope: float) -> float | None:
    return 1 / slope if 0 < slope < inf else None


def render(report: Report) -> Iterator[str | Table]:
    """Yields the lines and tables that show what was measured."""
    ranks, nodes = count(report["num_ranks"], "rank"), count(report["num_nodes"], "node")
    yield f"communication of {ranks} on {nodes}"
    for name, facts in report["transports"].items():
        settings = ", ".join(
            f"{key}={value}" for key, value in facts.items() if key not in ("what", "library")
        )
        yield f"{name}: {facts['what']}; {facts['library']}{settings and f' ({settings})'}"
    for name, missing in report["not_installed"].items():
        yield f"{name}: not measured, because not installed here: {', '.join(missing)}"
    for name, transport in TRANSPORTS.items():
        if transport.on_one_node and report["num_nodes"] > 1:
            yield f"{name}: not measured, because the ranks are on several nodes"
    if report["launched"] and "horovod" in report["transports"]:
        yield (
            "horovod_fusion, horovod_paper: not measured in the processes that horovod was measured"
            " in, which cannot change its settings; name one of them in --transport"
        )
    results = report["results"]
    for operation, kind in OPERATIONS.items():
        for name in report["transports"]:
            rows = [r for r in results if (r["operation"], r["transport"]) == (operation, name)]
            if rows:
                explained = f" ({kind.explanation})" if kind.explanation else ""
                yield _table(f"{name}: {kind.title}{explained}", rows, TIMES, 0)
    yield (
        "min, mean and max are over ranks, of two the first; each is the median over blocks of"
        " calls, which begin after a barrier. Sizes and bandwidths are those of nccl-tests: bytes"
        " are those of the whole array, also where each rank has a part of it; algorithm bandwidth"
        " is bytes / mean; bus bandwidth is this times 2 (n - 1) / n for allreduce, (n - 1) / n for"
        " allgather and reduce-scatter, and 1 for the others"
    )
    late = sum(each["stopped_by"] == "time" for each in results)
    if late:
        yield (
            f"~: {late} of {count(len(results), 'time')} did not get within 5 % of the mean in"
            f" {report['seconds']:g} s; --seconds gives them more"
        )
    if report["left_out_bytes"]:
        sizes = ", ".join(f"{size:,}" for size in report["left_out_bytes"])
        yield (
            f"left out, because half of the free memory of a node holds arrays of at most"
            f" {report['limit_bytes']:,} bytes on all of its ranks: {sizes} bytes"
        )
    if report["overlaps"]:
        yield _table("allreduce beside computing", report["overlaps"], OVERLAPS, 1)
        yield (
            "computing is a chain of products of matrices of 128 x 128 that takes about as long as"
            " the allreduce alone, begun when it has begun; hidden is the part of the allreduce"
            " that does not prolong it, as osu_iallreduce defines it"
        )
    if report["fits"]:
        yield _table("fitted", report["fits"], FITS, 2)
        yield (
            "fitted: time = latency + bytes / bandwidth, with least relative residuals, in up to"
            " four ranges of sizes; the latency is that of the smallest sizes, the bandwidth that"
            " of the largest; in brackets 95 % intervals. Measured, of large: the median of bytes /"
            f" mean over the sizes from 1/{LEAST_SPAN} of the largest on"
        )
        for each in report["fits"]:
            if len(each["ranges"]) > 1:
                title = f"{each['transport']}, {each['operation']}: ranges of sizes"
                yield _table(title, each["ranges"], RANGES, 0)


def _table(title: str, rows: Sequence[Any], columns: Mapping[str, str], num_words: int) -> Table:
    """Returns a table; the unit in a heading says in which one the values are shown."""
    table = empty_table(title, *columns, num_words=num_words)
    for row in rows:
        table.add_row(*(_cell(row, heading, key) for heading, key in columns.items()))
    return table


def _cell(row: Mapping[str, Any], heading: str, key: str) -> str:
    value = row[key]
    unit = next((size for name, size in UNITS.items() if f"({name})" in heading), 1)
    if key == "ci95_s":  # with a ~ where it was not as narrow as it was to be
        mark = "" if row["stopped_by"] == "precision" else "~"
        return (
            mark + " to ".join(_number(end / unit) for end in value) if value else "too few repeats"
        )
    if key == "hidden_share":
        return f"{100 * value:.0f}"
    if isinstance(value, list):
        return str(len(value))
    if value is None and key == "bandwidth_bytes_per_s":
        return "not limited"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else value or ""
    ends = row.get(INTERVALS.get(key, ""), ())
    shown = ", ".join("?" if end is None else _number(end / unit) for end in ends)
    return _number(value / unit) + (f" [{shown}]" if shown else "")


INTERVALS = {
    "latency_s": "latency_ci95_s",
    "bandwidth_bytes_per_s": "bandwidth_ci95_bytes_per_s",
}
UNITS = {"us": 1e-6, "GB/s": 1e9, "%": 0.01}
TIMES = {
    "bytes": "bytes",
    "min\n(us)": "min_s",
    "mean\n(us)": "mean_s",
    "max\n(us)": "max_s",
    "95 % interval\nof the mean (us)": "ci95_s",
    "algorithm\n(GB/s)": "algorithm_bytes_per_s",
    "bus\n(GB/s)": "bus_bytes_per_s",
    "gradients\nof": "gradients_of",
}
OVERLAPS = {
    "transport": "transport",
    "bytes": "bytes",
    "allreduce\nalone (us)": "communication_s",
    "computing\nalone (us)": "computing_s",
    "both\n(us)": "together_s",
    "exposed\n(us)": "exposed_s",
    "hidden\n(%)": "hidden_share",
}
FITS = {
    "transport": "transport",
    "operation": "operation",
    "latency\n(us)": "latency_s",
    "bandwidth\n(GB/s)": "bandwidth_bytes_per_s",
    "measured, of\nlarge (GB/s)": "measured_bytes_per_s",
    "ranges": "ranges",
    "largest\nresidual (%)": "largest_residual",
    "with one\nline (%)": "one_line_residual",
}
RANGES = {
    "from (bytes)": "first_bytes",
    "to": "last_bytes",
    "latency\n(us)": "latency_s",
    "bandwidth\n(GB/s)": "bandwidth_bytes_per_s",
    "largest\nresidual (%)": "largest_residual",
}


def page(report: Report, drawn: Drawing) -> str:
    """Returns a page, as HTML, with the figure and everything that is printed."""
    title, *shown = render(report)
    return render_page(page_of(str(title), shown, [drawn]))


def figure(report: Report) -> Drawing:
    """Returns a figure with a row for each operation, and in it a line for each transport."""
    import matplotlib as mpl

    results = report["results"]
    measured = {each["operation"] for each in results}
    operations = [name for name in OPERATIONS if name in measured]
    with mpl.rc_context(LOOK):
        figure, plots = new_figure(2 * len(operations), 2, PANEL_INCHES)
        for row, operation in enumerate(operations):
            chosen = [each for each in results if each["operation"] == operation]
            _draw(plots[2 * row : 2 * row + 2], operation, chosen, report)
        legend_below(figure, *plots[::2])
        return to_drawing(figure, "communication", "communication between ranks", "")


def _draw(plots: Sequence[Axes], operation: str, results: Sequence[Any], report: Report) -> None:
    """Draws the times and the bus bandwidths of an operation."""
    from matplotlib.ticker import EngFormatter, LogLocator

    for i, transport in enumerate(report["transports"]):
        mine = [each for each in results if each["transport"] == transport]
        look: dict[str, Any] = {"color": COLORS[i], "marker": MARKERS[i], "markersize": 4, "lw": 1}
        sizes = [each["bytes"] for each in mine]
        label = transport if mine else "_"
        plots[0].plot(sizes, [each["mean_s"] for each in mine], label=label, **look)
        plots[1].plot(sizes, [each["bus_bytes_per_s"] for each in mine], **look)
        least_s, most_s = [each["min_s"] for each in mine], [each["max_s"] for each in mine]
        plots[0].vlines(sizes, least_s, most_s, COLORS[i], lw=2.5, alpha=0.4)
        for fit in report["fits"]:
            for line in fit["ranges"]:
                if (fit["transport"], fit["operation"]) == (transport, operation):
                    within = np.geomspace(line["first_bytes"], line["last_bytes"], 30)
                    times = line["latency_s"] + within / (line["bandwidth_bytes_per_s"] or inf)
                    plots[0].plot(within, times, ":", color=COLORS[i], lw=1.5, alpha=0.8)
    first, last = min(each["bytes"] for each in results), max(each["bytes"] for each in results)
    marks: dict[float, list[str]] = {}
    for name, size in sorted(report["gradient_bytes"].items(), key=lambda item: item[1]):
        if operation == ALLREDUCE and first <= size <= last:
            marks.setdefault(round(log10(size), 1), []).append(name)  # almost the same size
    for axes, quantity, unit in zip(plots, ("time", "bus bandwidth"), ("s", "B/s"), strict=True):
        axes.set(xscale="log", xlim=(first / 1.5, last * 1.5), ylabel=quantity)
        log_axis(axes)
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(numticks=12))
        axes.xaxis.set_major_formatter(EngFormatter("B"))
        axes.yaxis.set_major_formatter(EngFormatter(unit))
        for level, (place, names) in enumerate(marks.items()):
            axes.axvline(10**place, color="0.6", lw=0.8, ls="--", zorder=0)
            axes.annotate(
                ", ".join(names),
                (10**place, 1),
                (0, 3 + LEVEL_POINTS * level),  # each in a row of its own
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                annotation_clip=False,
            )
        pad = 6 + LEVEL_POINTS * len(marks)
        axes.set_title(OPERATIONS[operation].title, loc="left", pad=pad)
