"""A comparison of training steps, as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from candle_p1.bench.show import MB, digits, plain_table
from candle_p1.reports.statistics import MIN_VALUES
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.table import Table

GIGA = 1e9
MILLI = 1e-3


def parts(report: Mapping[str, Any]) -> Iterator[str | Table]:
    """Yields the lines and tables that show a comparison.

    Args:
        report: What `candle_p1.bench.step.StepComparison.measure` returned.
    """
    results = report["results"]
    ours = results[0]
    rounds, steps = count(report["num_rounds"], "round"), count(report["num_steps"], "step")
    yield (
        f"{report['benchmark']}: training step, batch of a rank {ours['batch_size']},"
        f" {ours['device']}, {rounds} of {steps}"
    )
    yield _times(results)
    if ours["ci95_s"] is None:
        yield (
            f"{count(ours['repeats'], 'step')}: fewer than {MIN_VALUES} give no 95 % interval of"
            " the median, so the range is shown"
        )
    for name, found in report["differences"].items():
        yield (
            f"{name} trains the same: losses differ by {found['loss']:.1g} and the first updates by"
            f" {found['update']:.1g}, at most and relative"
        )
    floor = report["floor"]
    yield (
        f"floor of a rank: {_ms(floor['total_s'])} ms, of which"
        f" {_ms(floor['products_s'])} ms are matrix products"
        f" ({digits(floor['flops'] / GIGA)} GFLOP at {digits(floor['matmul_flops_per_s'] / GIGA)}"
        f" GFLOP/s) and {_ms(floor['optimizer_s'])} ms the optimizer's memory traffic"
        f" ({digits(floor['optimizer_bytes'] / GIGA)} GB at"
        f" {digits(floor['copy_bytes_per_s'] / GIGA)} GB/s);"
        f" a step takes {digits(ours['median_s'] / floor['total_s'])} times as long"
    )
    if report["communication"]:
        exposed = report["communication"]
        yield (
            f"exposed communication: {_ms(exposed['exposed_s'])} ms of a step,"
            f" {100 * exposed['share']:.1f} %"
        )
    yield _memory(results)
    if report["synthetic"]:
        yield "the data are synthetic"


def _times(results: list[dict[str, Any]]) -> Table:
    spread = "range" if results[0]["ci95_s"] is None else "95 % interval"
    others = [result["variant"] for result in results[1:]]
    table = plain_table(
        "variant",
        "ranks x\nthreads",
        "median\n(ms)",
        f"{spread}\n(ms)",
        "samples\n/s",
        "GFLOP\n/s",
        *(["the first\nover this"] if others else []),
    )
    for result in results:
        low, high = result["ci95_s"] or result["range_s"]
        speedup = [digits(results[0]["speedup"].get(result["variant"], 1.0))] if others else []
        table.add_row(
            result["variant"],
            f"{result['num_ranks']} x {result['threads']}",
            _ms(result["median_s"]),
            f"{_ms(low)} to {_ms(high)}",
            digits(result["samples_per_s"]),
            digits(result["flops_per_s"] / GIGA),
            *speedup,
        )
    return table


def _memory(results: list[dict[str, Any]]) -> Table:
    table = plain_table(
        "variant", "memory of\nthe node (MB)", "weights, gradients,\nstate (MB)", "matrices\n(MB)"
    )
    for result in results:
        peak = result["peak_bytes"]
        table.add_row(
            result["variant"],
            "not measured" if peak is None else digits(peak / MB),
            digits(result["state_bytes"] / MB),
            digits(result["matrix_bytes"] / MB),
        )
    return table


def _ms(seconds: float) -> str:
    return digits(seconds / MILLI)
