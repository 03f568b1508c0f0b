"""Shows the times of convolutions and what the model of their costs makes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from candle_p1.bench.tables import digits, plain_table
from candle_p1.models.fast.convolution_costs import FORMS
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.table import Table

GIGA = 1e9
MILLI = 1e-3
PERCENT = 100


def parts(report: Mapping[str, Any]) -> Iterator[str | Table]:
    """Yields the lines and tables that show a report of ConvolutionMeasurement."""
    rates, results = report["rates"], report["results"]
    yield (
        f"convolutions, forward and gradients, {count(report['threads'], 'thread')};"
        f" {digits(rates['flops_per_s'] / GIGA)} GFLOP/s in products of large matrices,"
        f" {digits(rates['bytes_per_s'] / GIGA)} GB/s in copies"
    )
    yield "the fastest of several calls in ms, and the deviation of the fitted model in %"
    yield _times([each for each in results if each["name"] is None])
    yield "the same of the benchmarks' convolutions, to which the model was not fitted"
    yield _times([each for each in results if each["name"] is not None])
    errors = ", ".join(
        f"{form} {PERCENT * error:.0f} %" for form, error in report["median_error"].items()
    )
    yield f"median deviation of what was fitted: {errors}"
    yield _factors(report)
    agreeing = [each for each in results if each["chosen"] == each["fastest"]]
    lost = [
        each["forms"][each["chosen"]]["least_s"] / each["forms"][each["fastest"]]["least_s"] - 1
        for each in results
    ]
    yield (
        f"the model chooses the fastest form of {len(agreeing)} of {len(results)}; its choice takes"
        f" {PERCENT * sum(lost) / len(lost):.0f} % longer than the fastest on average, and"
        f" {PERCENT * max(lost):.0f} % at most"
    )


def _times(results: list[dict[str, Any]]) -> Table:
    table = plain_table("batch x length, taps, channels, filters, pool", *FORMS, "chosen")
    for each in results:
        name = f"{each['name']}: " if each["name"] else ""
        after = f"{each['first_taps']} + " if each["first_taps"] else ""
        sizes = (
            f"{name}{each['batch']} x {each['length']}, {after}{each['taps']}, {each['channels']},"
            f" {each['filters']}, {each['pool']}"
        )
        cells = []
        for form in FORMS:
            found = each["forms"].get(form)
            if found is None:
                cells.append("")
                continue
            deviation = PERCENT * (found["fitted_s"] / found["least_s"] - 1)
            cells.append(f"{digits(found['least_s'] / MILLI)} {deviation:+.0f}")
        mark = "" if each["chosen"] == each["fastest"] else " (not the fastest)"
        table.add_row(sizes, *cells, each["chosen"] + mark)
    return table


def _factors(report: Mapping[str, Any]) -> Table:
    table = plain_table("form", "term", "fitted", "in use")
    for form, factors in report["fitted_factors"].items():
        for name, factor in factors.items():
            used = report["used_factors"][form][name]
            table.add_row(form, name, f"{factor:.3g}", f"{used:.3g}")
    return table
