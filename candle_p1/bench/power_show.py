"""A comparison of power readings, as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from candle_p1.bench.power import MAX_DIFFERENCE, MAX_OVERHEAD, MIN_WINDOW_S
from candle_p1.bench.show import count, digits, plain_table
from candle_p1.reports.statistics import MIN_VALUES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.table import Table


def parts(report: Mapping[str, Any]) -> Iterator[str | Table]:
    """Yields the lines and tables that show a comparison.

    Args:
        report: What `candle_p1.bench.power.PowerComparison.measure` returned.
    """
    rounds = count(report["num_rounds"], "round")
    yield (
        f"{report['benchmark']} with {report['backend']} on {report['device']}, {rounds} of a"
        f" window of {report['window_s']:g} s that is sampled at {report['power_hz']:g} Hz and one"
        " that is not"
    )
    if report["num_rounds"] < MIN_VALUES:
        yield (
            f"{rounds}: fewer than {MIN_VALUES} give no 95 % interval of the median, so the range"
            " is shown"
        )
    yield from _readings(report)
    yield from _overhead(report)
    for source, reason in report["absent"].items():
        yield f"not measured: {source}: {reason}"
    if report["synthetic"]:
        yield "the data are synthetic"


def _readings(report: Mapping[str, Any]) -> Iterator[str | Table]:
    if not report["readings"]:
        yield (
            "energy counter against integrated power: not measured, for no NVIDIA GPU of this"
            " process can be read"
        )
        return
    table = plain_table("GPU", "counter\n(J a window)", "power over\ncounter", _spread(report))
    for each in report["readings"]:
        name = f"{each['label']} {each['device']}"
        if "reason" in each:
            table.add_row(name, "not measured", each["reason"])
            continue
        counters_j = sorted(energies["counter"] for energies in each["energies_j"])
        low, high = each["ci95_ratio"] or each["range_ratio"]
        table.add_row(
            name,
            digits(counters_j[len(counters_j) // 2]),
            f"{each['median_ratio']:.4f}",
            f"{low:.4f} to {high:.4f}",
        )
    yield table
    if report["window_s"] >= MIN_WINDOW_S:
        for each in report["readings"]:
            if "reason" not in each:
                yield (
                    f"{each['device']}: integrated power against the energy counter:"
                    f" {_within(each['within'], MAX_DIFFERENCE)}"
                )


def _overhead(report: Mapping[str, Any]) -> Iterator[str | Table]:
    found = report["overhead"]
    low, high = found["ci95_slower"] or found["range_slower"]
    what = ", ".join(report["sources"])
    if found["simulated"]:
        what = "a simulated recording, for there is no sensor"
    yield (
        f"sampling {count(found['num_channels'], 'channel')} of {what}: a step takes"
        f" {found['median_slower']:+.2%} longer ({_spread(report)} {low:+.2%} to {high:+.2%}):"
        f" {_within(found['within'], MAX_OVERHEAD)}; the thread takes"
        f" {found['median_cpu_share']:.2%} of one core"
    )


def _within(within: bool | None, limit: float) -> str:
    if within is None:
        return f"more rounds would tell whether within {limit:.0%}"
    return f"{'within' if within else 'not within'} {limit:.0%}"


def _spread(report: Mapping[str, Any]) -> str:
    return "range" if report["num_rounds"] < MIN_VALUES else "95 % interval"
