"""Measures what ranks need to exchange arrays, by size, through every library that is installed.

The command either starts ranks on this machine, with a job for each transport, or is itself started
by a launcher on every rank, also on several nodes. Then all transports are measured in those
processes, one after the other.

Latency and bandwidth are those of Hockney's model, T = latency + bytes / bandwidth (Parallel
Computing 20(3), 1994). Libraries change their protocol or algorithm with the size, and memory is
slower than caches, so the sizes are divided into few ranges with a line each where one does not
hold. Lines of larger sizes may begin below 0: a link that lets a burst pass takes (bytes - burst) /
bandwidth. Where they cannot be told from lines through 0, they are these, since otherwise sizes
that lie close together would leave their slope open. Times differ by orders of magnitude, so a fit
minimises the sum of ((model - time) / time)^2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations, pairwise
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from candle_p1.bench import harness
from candle_p1.bench.comm_task import GRADIENT_BYTES, ONE_RANK, CommTask
from candle_p1.bench.harness import GIGA, Job, Measured, choose_names, number, option, table
from candle_p1.bench.task import OtherEnvironment, errors_end
from candle_p1.bench.transports import OPERATIONS, TRANSPORTS
from candle_p1.distributed.comm import connect
from candle_p1.distributed.launch_environment import launcher_variable
from candle_p1.errors import ParameterError
from candle_p1.files import write_atomically
from candle_p1.records.record import utc_now
from candle_p1.reports.drawing import LOOK, Drawing, Mark, Panel, line_figure, to_drawing
from candle_p1.reports.statistics import Estimate
from candle_p1.text import count

Floats = NDArray[np.float64]
Fit = dict[str, Any]

LARGE_BYTES, HUGE_BYTES = 1 << 22, 1 << 28
"""Sizes are each four times the one before, and from LARGE_BYTES on, where arrays leave the caches,
twice, because the bandwidth is fitted to those that are beyond all caches. From HUGE_BYTES on there
is also a size halfway to the next, for libraries that change below 512 MiB."""
MIN_SIZES, LEAST_SPAN, MAX_RANGES, LARGE_RESIDUAL = 3, 2, 4, 0.05
"""The least number of sizes of a range, more than the two parameters of a line; the factor by which
they differ at least, so that their slope shows; the most ranges; and what a line misses a time by
that does not hold for its size."""
MICRO, PERCENT = 1e-6, 0.01


def _mean_interval(row: harness.Report) -> str:
    """Returns the interval, with a ~ where it was not as narrow as it was to be."""
    if not row["ci95_s"]:
        return "too few repeats"
    mark = "" if row["stopped_by"] == "precision" else "~"
    return mark + " to ".join(number(end / MICRO) for end in row["ci95_s"])


def _fitted(name: str, unit: str, scale: float) -> Callable[[harness.Report], str]:

    def cell(row: harness.Report) -> str:
        if row[f"{name}_{unit}"] is None:
            return "not limited"
        value, *ends = (
            "?" if each is None else number(each / scale)
            for each in (row[f"{name}_{unit}"], *row[f"{name}_ci95_{unit}"])
        )
        return f"{value} [{', '.join(ends)}]"

    return cell


BYTES: Any = {"bytes": lambda row: f"{row['bytes']:,}"}
TIMES: Any = {
    **BYTES,
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
    **BYTES,
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


@dataclass(kw_only=True)
class Comm(harness.Comparison):
    """Measure latency and bandwidth between ranks by message size, through MPI and each engine.

    Shows the times of allreduce, broadcast, allgather, reduce-scatter and point to point, with
    algorithm and bus bandwidth as nccl-tests define them; the allreduce of the gradients of the
    four benchmarks; how much of an allreduce is hidden behind computing; and the latency and
    bandwidth that are fitted to the times.

    Starts ranks on this machine, or is started on every rank by a launcher, such as srun.
    """

    examples: ClassVar[Sequence[str]] = (
        "candle-p1 bench comm --np 2 --json comm.json --picture comm.svg",
        "candle-p1 bench comm --transport mpi --operations allreduce --max_bytes 4194304",
    )

    num_ranks: int | None = harness.count_option(
        None,
        "Ranks to start on this machine (default: 2); omit it if a launcher starts this command"
        " on every rank, as on several nodes.",
        "--np",
    )
    transport: str | None = option(
        None,
        f"What to measure: {', '.join(TRANSPORTS)}; by default all that are installed and can"
        " connect the ranks.",
        metavar="NAME,NAME,...",
    )
    operations: str | None = option(
        None, f"The operations: {', '.join(OPERATIONS)}; by default all.", metavar="NAME,NAME,..."
    )
    min_bytes: int = option(
        4, "The smallest size; sizes grow fourfold, from 4 MiB on twofold.", within=(4, 1 << 40)
    )
    max_bytes: int = option(
        1 << 30,
        "The largest size, also of gradients; memory may limit it further.",
        within=(4, 1 << 40),
    )
    seconds: float = option(
        0.5,
        "How long to measure a size, unless its 95 % interval is within 5 % earlier.",
        within=(0.0, 3600.0, True),
    )
    no_overlap: bool = option(
        False, "Do not measure how much of an allreduce overlaps with computing."
    )
    compare_env: str | None = option(
        None,
        "Measure what is not installed here in the environment of this interpreter, such as one"
        " with JAX beside one with Horovod.",
        metavar="PYTHON",
    )
    picture: Path | None = option(
        None, "Draw times and bandwidths into this .png or .svg file.", is_file=True
    )

    @property
    def is_launched(self) -> bool:
        """Whether a launcher has started this command on every rank."""
        return self.num_ranks is None and launcher_variable() is not None

    @cached_property
    def other(self) -> Any:
        """The other environment."""
        return self.compare_env and OtherEnvironment.of(self.compare_env)

    @property
    def sizes(self) -> list[int]:
        """The sizes in bytes, close together where they are large."""
        if self.min_bytes > self.max_bytes:
            raise ParameterError(
                f"--min_bytes {self.min_bytes} is larger than --max_bytes {self.max_bytes}"
            )
        size, sizes = self.min_bytes, []
        while size <= self.max_bytes:
            sizes += [size] if size < HUGE_BYTES else [size, size * 3 // 2]
            size *= 4 if size < LARGE_BYTES else 2
        return self._within(sizes)

    def _within(self, sizes: Iterable[int]) -> list[int]:
        return [size for size in sizes if self.min_bytes <= size <= self.max_bytes]

    def task(self, *names: str) -> CommTask:
        """Returns what measures some transports."""
        chosen: Iterable[str] = OPERATIONS
        if self.operations is not None:
            chosen = choose_names(self.operations, OPERATIONS, "--operations")
        return CommTask(
            transports=names,
            operations=[name for name in OPERATIONS if name in chosen],
            sizes=self.sizes,
            gradients=self._within(GRADIENT_BYTES.values()),
            seconds=self.seconds,
            overlaps=not self.no_overlap,
        )

    def jobs(self) -> list[Job]:
        """Returns a job for each transport; the other environment has those of its engine."""
        num_ranks = self.num_ranks or 2
        if num_ranks == 1:
            raise ParameterError(f"--np 1: {ONE_RANK}")
        names = choose_transports(self.transport, one_process=self.is_launched)
        if self.is_launched:
            return [Job(", ".join(names), self.task(*names))]
        jobs = [Job(name, self.task(name), num_ranks) for name in names]
        for name, kind in TRANSPORTS.items() if self.other else ():
            if kind.missing() and self.other.backend in kind.packages:
                jobs.append(Job(name, self.task(name), num_ranks, other=self.other))
        return jobs

    def prepare(self, progress: harness.Progress | None = None) -> list[str]:
        return [] if self.is_launched else super().prepare(progress)

    def measure(self, on_start: harness.OnStart) -> dict[str, Any] | None:
        """Measures; on ranks that a launcher has started, an error, which is printed, ends all."""
        if not self.is_launched:
            return super().measure(on_start)
        started, comm, (job,) = utc_now(), connect(), self.jobs()
        with errors_end(comm):
            outcome = job.task.measure(comm)
            comm.barrier()
        if comm.rank:
            return None
        return self.report(Measured([(job, [outcome])])) | harness.envelope(started)

    def report(self, measured: Measured) -> dict[str, Any]:
        """Returns what the jobs have measured, and the fit of every operation."""
        outcomes = [ranks[0] for _, ranks in measured]
        settings = {name: each for found in outcomes for name, each in found["settings"].items()}
        points = [point for found in outcomes for point in found["points"]]
        limit_bytes = min(found["limit_bytes"] for found in outcomes)
        wanted = {*self.sizes, *self._within(GRADIENT_BYTES.values())}
        missing = {n: kind.missing() for n, kind in TRANSPORTS.items() if n not in settings}
        return {
            "launched": self.is_launched,
            **{name: outcomes[0][name] for name in ("num_ranks", "num_nodes", "ranks_per_node")},
            "transports": {
                name: {"what": TRANSPORTS[name].what, **each} for name, each in settings.items()
            },
            "not_installed": {name: packages for name, packages in missing.items() if packages},
            "seconds": self.seconds,
            "limit_bytes": limit_bytes,
            "left_out_bytes": sorted(size for size in wanted if size > limit_bytes),
            "results": points,
            "overlaps": [each for found in outcomes for each in found["overlaps"]],
            "fits": fits(points, outcomes[0]["num_ranks"]),
            "compare_env": self.compare_env,
        }

    def render(self, report: harness.Report) -> harness.Parts:
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
            " calls. Sizes and bandwidths are those of nccl-tests, the algorithm bandwidth that of"
            " mean"
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
                "fitted: time = latency + bytes / bandwidth, of the smallest and of the largest"
                " sizes, with 95 % intervals; measured: the median of bytes / mean of sizes from"
                f" 1/{LEAST_SPAN} of the largest on"
            )
        for each in report["fits"]:
            if len(each["ranges"]) > 1:
                title = f"{each['transport']}, {each['operation']}: ranges of sizes"
                yield table(each["ranges"], RANGES, title)

    def draw(self, report: harness.Report) -> Iterator[str]:
        if self.picture:
            drawn = figure(report)
            is_png = self.picture.suffix == ".png"
            write_atomically(self.picture, drawn.png if is_png else drawn.svg)
            yield f"picture: {self.picture}"


VERB = Comm


def choose_transports(text: str | None, *, one_process: bool = False) -> list[str]:
    """Returns the transports of a comma-separated list; None: all that are installed.

    Horovod 0.28 can be started again, but crashes if its settings are set again
    (horovod::common::ParameterManager), so one process can measure one transport of each library.

    Raises:
        ParameterError: One of them is not known or not installed, or they cannot all be measured in
            one process where that is wanted.
    """
    names = [name for name, kind in TRANSPORTS.items() if not kind.missing()]
    if text is not None:
        names = choose_names(text, TRANSPORTS, "--transport")
    elif not names:
        raise ParameterError(
            "no communication library is installed: install candle-p1[cpu] or candle-p1[jax-mpi]"
        )
    for name in names:
        if lacks := ", ".join(TRANSPORTS[name].missing()):
            raise ParameterError(f"--transport {name}: not installed in this environment: {lacks}")
    if not one_process:
        return names
    of_libraries = {TRANSPORTS[name].packages: name for name in reversed(names)}
    possible = [name for name in names if name in of_libraries.values()]
    if text is not None and (more := [name for name in names if name not in possible]):
        raise ParameterError(
            f"--transport: {', '.join(more)}: the settings of Horovod cannot be changed within a"
            " process, and a launcher has started this one: measure them with a command each"
        )
    return possible


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


def figure(report: harness.Report) -> Drawing:
    """Returns a figure with a row for each operation, and in it a line for each transport.

    On the left are times, from those of the fastest rank to those of the slowest, on the right bus
    bandwidths.
    """
    import matplotlib as mpl
    from matplotlib.ticker import EngFormatter, LogLocator

    panels = []
    for operation, kind in OPERATIONS.items():
        times: dict[str, list[Mark]] = {name: [] for name in report["transports"]}
        rates: dict[str, list[Mark]] = {name: [] for name in report["transports"]}
        for each in report["results"]:
            if each["operation"] == operation:
                name, size, rate = each["transport"], each["bytes"], each["bus_bytes_per_s"]
                ranks = Estimate(each["mean_s"], each["min_s"], each["max_s"], 0.5, (1,))
                times[name].append(Mark(size, ranks))
                rates[name].append(Mark(size, Estimate(rate, rate, rate, 0, (1,))))
        if any(times.values()):
            panels += [Panel(kind.title, times, "time"), Panel(kind.title, rates, "bus bandwidth")]
    with mpl.rc_context(LOOK):
        drawn = line_figure(panels, columns=2, x_label="")
        for i, axes in enumerate(drawn.axes):
            axes.xaxis.set_major_locator(LogLocator())
            axes.xaxis.set_major_formatter(EngFormatter("B"))
            if axes.get_yscale() == "log":
                axes.yaxis.set_major_locator(LogLocator(numticks=12))
            axes.yaxis.set_major_formatter(EngFormatter("B/s" if i % 2 else "s"))
        return to_drawing(drawn, "communication", "communication between ranks", "")
