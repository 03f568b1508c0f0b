"""Shows a comparison of ways to save the state of a training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from candle_p1.bench.checkpoint import BACKUP, HOUR_S, OURS, SAVES_PER_JOB
from candle_p1.bench.tables import MB, digits, ms, plain_table, spread, too_few
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.table import Table


def parts(report: Mapping[str, Any]) -> Iterator[str | Table]:
    """Yields the lines and tables that show a comparison.

    Args:
        report: What `candle_p1.bench.checkpoint.CheckpointComparison.measure` returned.
    """
    results, plain = report["results"], report["plain_write"]
    ours = results[0]
    yield (
        f"{report['benchmark']}: {digits(report['state_bytes'] / MB)} MB of state in"
        f" {count(report['num_arrays'], 'array')}, {count(report['num_ranks'], 'rank')} x"
        f" {count(report['threads'], 'thread')} on {report['device']},"
        f" {count(report['num_rounds'], 'round')} of {count(SAVES_PER_JOB, 'save')};"
        f" a step takes {ms(report['step_s'])} ms"
    )
    yield _times(results)
    if ours["ci95_s"] is None:
        yield too_few(ours, "save")
    low, high = plain["ci95_s"] or plain["range_s"]
    yield (
        f"a plain synced write of as many bytes by one process, before each save: median"
        f" {digits(plain['median_s'])} s ({spread(plain)} {digits(low)} to {digits(high)}), which"
        f" is {digits(plain['bytes_per_s'] / MB)} MB/s in {report['directory']}"
    )
    ratio = report["wait_ratio"]
    yield (
        f"{OURS}: training waits {digits(ratio['value'])} times as long as for {BACKUP}"
        f" ({ratio['confidence']:.0%} interval {digits(ratio['low'])} to {digits(ratio['high'])});"
        f" the first save of a run, which creates the files, took {digits(max(ours['first_s']))} s"
    )
    yield _beside(results)
    yield from _advice(report)
    if report["synthetic"]:
        yield "the data are synthetic"


def _times(results: list[dict[str, Any]]) -> Table:
    table = plain_table(
        "variant",
        "training\nwaits (s)",
        f"{spread(results[0])}\n(s)",
        "data are safe\nafter (s)",
        "rate\n(MB/s)",
        "relative to the\nplain write",
        f"{spread(results[0])}",
    )
    for result in results:
        low, high = result["ci95_s"] or result["range_s"]
        lowest, highest = result["ci95_relative_rate"] or result["range_relative_rate"]
        table.add_row(
            result["variant"],
            digits(result["median_s"]),
            f"{digits(low)} to {digits(high)}",
            digits(result["safe"]["median_s"]),
            digits(result["bytes_per_s"] / MB),
            digits(result["relative_rate"]),
            f"{digits(lowest)} to {digits(highest)}",
        )
    return table


def _beside(results: list[dict[str, Any]]) -> Table:
    table = plain_table(
        "variant",
        "memory beyond\ntraining's (MB)",
        "in copies of\nthe state",
        "steps while it\nis written",
        "which take\n(times as long)",
        "training is\ndelayed (s)",
    )
    for result in results:
        peak, slowdown = result["peak_bytes"], result["step_slowdown"]
        table.add_row(
            result["variant"],
            "not measured" if peak is None else digits(peak / MB),
            "not measured" if peak is None else f"{result['peak_copies']:.2f}",
            str(result["num_steps_beside"]),
            "" if slowdown is None else digits(slowdown),
            digits(result["delay"]["median_s"]),
        )
    return table


def _advice(report: Mapping[str, Any]) -> Iterator[str | Table]:
    advice, restart = report["advice"], report["restart"]
    yield (
        f"a checkpoint delays training by {digits(advice['cost_s'])} s: the wait, and what the"
        f" steps beside it take longer; a restart takes {digits(advice['restart_s'])} s, of which"
        f" the start, loading and building take {digits(restart['prepare_s'])} s and reading the"
        f" checkpoint {digits(restart['restore_s'])} s"
    )
    table = plain_table(
        "advised interval", "(s)", "(steps)", "(epochs)", "expected time\nadded by failures"
    )
    for each in advice["intervals"]:
        extra = each["expected_extra"]
        table.add_row(
            each["formula"],
            digits(each["interval_s"]),
            digits(each["steps"]),
            digits(each["epochs"]),
            "unlimited" if extra is None else f"{extra:.2%}",
        )
    yield f"for one failure in {digits(advice['mtbf_s'] / HOUR_S)} hours on average:"
    yield table
    seconds = max(1, round(advice["intervals"][-1]["interval_s"]))
    yield f"in a run: --ckpt_every_s {seconds}"
