"""candle-p1 timeline: the summary of Horovod's timeline of a traced run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from candle_p1.cli.base import PATH, Command, Group, json_option, option, write_json
from candle_p1.errors import ParameterError
from candle_p1.text import count

if TYPE_CHECKING:
    from candle_p1.reports.horovod_timeline import TimelineSummary

MIB = 2**20
SHOWN_TENSORS = 15
TENSOR_KINDS = ("negotiate", "wait", "queue", "memcpy", "transfer")


@click.group("timeline", cls=Group)
def timeline_command() -> None:
    """Read the timeline that Horovod writes when a run has --timeline.

    Tracing slows a run down, so times in it must not be compared with those of other runs.
    """


@timeline_command.command(
    "summary", cls=Command, examples=["candle-p1 timeline summary timeline.json"]
)
@click.argument("path", metavar="FILE", type=PATH)
@json_option("the whole summary, with every tensor and step,")
@option(
    "--gradients",
    "A regular expression for the names of gradients, from which steps are found; by default"
    " those that this package uses.",
)
@option(
    "--record",
    "The run.json of the run: the broadcast overhead then includes the waiting of the ranks"
    " before they broadcast.",
    PATH,
    name="record_path",
)
def summary_command(
    path: Path, json_file: Path | None, gradients: str | None, record_path: Path | None
) -> None:
    """Summarize the timeline FILE (or FILE.gz), of any size, complete or truncated."""
    from candle_p1.records.record import read_record
    from candle_p1.reports.frame import Run
    from candle_p1.reports.horovod_timeline import GRADIENT, summarize
    from candle_p1.training.screen import Screen

    try:
        re.compile(gradients or "")
    except re.error as error:
        raise ParameterError(f"--gradients {gradients}: {error}") from error
    run = Run(record_path, read_record(record_path)) if record_path else None
    summary = summarize(path, gradients=gradients or GRADIENT)
    if run and summary.broadcast:
        whole = summary.broadcast.after(run["broadcast_wait_s"] or 0.0)
        summary = replace(summary, broadcast=whole)
    screen = Screen()
    for part in _render(summary):
        screen.say(part)
    write_json(json_file, summary.to_dict())


def _render(summary: TimelineSummary) -> Iterator[Any]:
    import numpy as np

    yield (
        f"{summary.path}: {count(summary.num_events, 'event')}, {summary.begin_s:.3f} to"
        f" {summary.end_s:.3f} s{', truncated' * summary.cut}; times are those of a traced run"
    )
    if not summary.activities:
        return
    yield "time in s; time in which intervals of several tensors overlap is counted once (union)"
    rows = [{"name": name} | row for name, row in summary.activities.items()]
    rows.sort(key=lambda row: row["first_s"])
    kinds, num_activities = [row["kind"] for row in rows], len(rows)
    of_kinds = {kind: row for kind, row in summary.kinds.items() if kinds.count(kind) > 1}
    rows += [{"name": "", "kind": kind} | row for kind, row in of_kinds.items()]
    times = {"first": "{first_s:.3f}", "last": "{last_s:.3f}"}
    columns = {"activity": "{name}", "kind": "{kind}", "union": "{union_s:.3f}"}
    yield _table(columns | {"intervals": "{num:,}"} | times, rows, num_activities)
    if broadcast := summary.broadcast:
        yield (
            f"broadcast overhead {broadcast.overhead_s:.3f} s: {broadcast.waiting_s:.3f} s waiting"
            f" and {broadcast.broadcast_s:.3f} s broadcasting"
            f" {count(broadcast.num_tensors, 'tensor')}"
            f"{'' if broadcast.whole else '; it did not finish'}"
        )
    for name, messages in summary.messages.items():
        if messages["bytes"]:
            yield (
                f"{name}: {messages['num']:,} messages with {messages['num_tensors']:,} tensors,"
                f" {messages['bytes'] / MIB:,.1f} MiB in {messages['duration_s']:.3f} s"
            )
    longest = sorted(summary.tensors, key=lambda row: row.get("transfer_s", 0.0), reverse=True)
    yield (
        f"the {min(len(longest), SHOWN_TENSORS)} of {len(longest):,} tensors with the longest"
        " transfers, in s"
    )
    del longest[SHOWN_TENSORS:]
    prefix = "StatefulPartitionedCall/"  # of every tf.function
    longest = [
        row | {"name": row["name"].removeprefix(prefix), "mib": row["bytes"] and row["bytes"] / MIB}
        for row in longest
    ]
    kinds = [kind for kind in TENSOR_KINDS if any(f"{kind}_s" in row for row in longest)]
    columns = {"tensor": "{name}", "count": "{num:,}", "MiB": "{mib:,.3f}"}
    yield _table(columns | {kind: f"{{{kind}_s:.3f}}" for kind in kinds}, longest)
    if summary.num_steps:
        steps = {name: np.array(values) for name, values in summary.steps.items()}
        lengths_s = steps["end_s"] - steps["begin_s"]
        medians = {name: np.median(values) for name, values in steps.items()}
        yield (
            f"{summary.num_steps:,} steps; medians: {np.median(lengths_s):.4f} s from the first"
            f" negotiation to the last gradient, {medians['allreduce_s']:.4f} s of this in"
            f" allreduces of {medians['bytes'] / MIB:.3f} MiB in {medians['num_tensors']:,.0f}"
            f" gradients and {medians['num_messages']:,.0f} messages; the longest step is number"
            f" {lengths_s.argmax() + 1:,} with {lengths_s.max():.4f} s"
        )
    else:
        yield "no steps, because no tensor has the name of a gradient (--gradients)"
    for row in summary.unfinished:
        yield f"unfinished: {row['activity']} of {row['tensor']}, started at {row['begin_s']:.3f} s"


def _table(columns: dict[str, str], rows: Iterable[dict[str, Any]], section: int = 0) -> Any:
    """Returns a table; columns are formats of a row, of which those of numbers are on the right."""
    from rich.table import Table

    table = Table()
    for name, form in columns.items():
        sides: Any = {"justify": "right", "no_wrap": True} if ":" in form else {"overflow": "fold"}
        table.add_column(name, **sides)
    for i, row in enumerate(rows, 1):
        table.add_row(*(_cell(form, row) for form in columns.values()), end_section=i == section)
    return table


def _cell(form: str, row: dict[str, Any]) -> str:
    try:
        return form.format(**row)
    except (KeyError, TypeError):  # not known
        return ""
