"""Shows a comparison of loaders as tables and as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from candle_p1.bench.load import BASELINES
from candle_p1.bench.tables import MB, digits, plain_table, spread, too_few
from candle_p1.figures import compared_times
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.table import Table

MAX_NAMED = 3
"""With more files than this, a title has their number."""

RANKED_S = 0.1
"""Where all methods take less, the ratios of their times are noise."""


def parts(report: Mapping[str, Any]) -> Iterator[str | Table]:
    """Yields the lines and tables that show a comparison.

    Args:
        report: What `candle_p1.bench.load.LoadComparison.measure` returned.
    """
    results = report["results"]
    first = results[0]
    yield (
        f"{report['benchmark']}: loading {_megabytes(first['file_bytes'])} MB,"
        f" {_conditions(first)}, {count(first['repeats'], 'repeat')}"
    )
    yield _times(results)
    if not _are_ranked(results):
        yield (
            f"no method takes {RANKED_S} s: these files are too small to rank the methods;"
            " use --size full, or files of that size"
        )
    yield f"memory and bytes read; the matrices of a rank: {_megabytes(first['matrix_bytes'])} MB"
    yield _bytes(results)
    files = _files(report, results)
    if files.row_count:
        yield "each file, in s"
        yield files
    yield from _notes(report)


def _notes(report: Mapping[str, Any]) -> Iterator[str]:
    """Yields explanations of the tables."""
    result = report["results"][0]
    if result["ci95_s"] is None:
        yield too_few(result, "repeat")
    if report["synthetic"]:
        yield "the data are synthetic"
    yield "memory is what loading adds, without the file cache, in a job that is not timed"
    yield (
        "bytes read are those of system calls; for files mapped into memory, as by cached and"
        " recent versions of pandas, only the bytes from storage count, with --file_cache cold"
    )
    if report["published"]["tables"]:
        yield f"published: {report['published']['source']}"
        for table in report["published"]["tables"]:
            yield f"  Table {table['table']}, {table['machine']}: {table['node']}"


def picture(report: Mapping[str, Any], path: Path) -> None:
    """Draws the times of all repeats, beside the published ones.

    Args:
        report: What `candle_p1.bench.load.LoadComparison.measure` returned.
        path: The PNG file.
    """
    published = {
        f"{table['machine']} (Table {table['table']})": {
            method: sum(file[f"{method}_s"] for file in table["files"].values())
            for method in BASELINES
        }
        for table in report["published"]["tables"]
    }
    compared_times(
        path,
        {result["method"]: result["repeats_s"] for result in report["results"]},
        published,
        title=f"{report['benchmark']}: loading {_sizes(report)},\n"
        f"{_conditions(report['results'][0])}",
        published_title=f"published, files of {_published_mb(report)} MB",
    )


def _sizes(report: Mapping[str, Any]) -> str:
    """Returns the sizes of the files, each of them if they are few, and what they are."""
    sizes = {role: _megabytes(file["file_bytes"]) for role, file in report["files"].items()}
    total = f"{_megabytes(report['results'][0]['file_bytes'])} MB"
    each = ", ".join(f"{role} {size}" for role, size in sizes.items())
    files = f" ({each})" if 1 < len(sizes) <= MAX_NAMED else f" in {count(len(sizes), 'file')}"
    return f"{total}{files}{' of synthetic data' if report['synthetic'] else ''}"


def _published_mb(report: Mapping[str, Any]) -> str:
    """Returns the sizes of the published files, such as "597 + 150"."""
    for table in report["published"]["tables"]:
        return " + ".join(str(file["file_mb"]) for file in table["files"].values())
    return ""


def _conditions(result: Mapping[str, Any]) -> str:
    ranks, threads = count(result["num_ranks"], "rank"), count(result["threads"], "thread")
    return f"{ranks} with {threads} each, {result['file_cache']} file cache"


def _are_ranked(results: Sequence[Mapping[str, Any]]) -> bool:
    return any(result["median_s"] >= RANKED_S for result in results)


def _times(results: Sequence[Mapping[str, Any]]) -> Table:
    first, is_ranked = results[0], len(results) > 1 and _are_ranked(results)
    baselines = [name for name in BASELINES if name in first["speedup"] and is_ranked]
    speedups = [f"speed-up\nover {name}" for name in baselines]
    table = plain_table("method", "median\n(s)", f"{spread(first)}\n(s)", "MB/s", *speedups)
    for result in results:
        low, high = result["ci95_s"] or result["range_s"]
        table.add_row(
            result["method"],
            digits(result["median_s"]),
            f"{digits(low)} to {digits(high)}",
            digits(result["file_bytes"] / MB / result["median_s"]),
            *(digits(result["speedup"][name]) for name in baselines),
        )
    return table


def _bytes(results: Sequence[Mapping[str, Any]]) -> Table:
    table = plain_table(
        "method",
        "peak of a rank\n(MB, matrices)",
        "of the node\n(MB, matrices)",
        "read\n(MB, files)",
        "from storage\n(MB)",
    )
    for result in results:
        table.add_row(
            result["method"],
            _megabytes(result["peak_rank_bytes"], result["matrix_bytes"]),
            _megabytes(result["peak_bytes"], result["matrix_bytes"]),
            _megabytes(result["bytes_read"], result["file_bytes"]),
            _megabytes(result["storage_bytes_read"]),
        )
    return table


def _megabytes(num_bytes: int | None, of_bytes: int | None = None) -> str:
    if num_bytes is None:
        return "not measured"
    times = f"  {num_bytes / of_bytes:5.2f}x" if of_bytes else ""
    return f"{digits(num_bytes / MB)}{times}"


def _files(report: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> Table:
    """Returns the times of each file on this machine, above the paper's tables."""
    table = plain_table("machine", "file", "size", *BASELINES, "speed-up")
    measured = {result["method"]: result["per_file_median_s"] for result in results}
    if all(name in measured for name in BASELINES) and _are_ranked(results):
        for role in results[0]["per_file_median_s"]:
            size = f"{_megabytes(report['files'][role]['file_bytes'])} MB"
            slow, fast = (measured[name][role] for name in BASELINES)
            table.add_row("this one", role, size, digits(slow), digits(fast), digits(slow / fast))
    for published in report["published"]["tables"]:
        table.add_section()
        machine = f"{published['machine']} (published)"
        for role, file in published["files"].items():
            slow, fast = (file[f"{name}_s"] for name in BASELINES)
            cells = (f"{file['file_mb']} MB", f"{slow:.2f}", f"{fast:.2f}", digits(slow / fast))
            table.add_row(machine, role, *cells)
    return table
