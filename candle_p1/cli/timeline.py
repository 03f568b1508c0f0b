"""candle-p1 timeline: Horovod's timeline of a traced run, summarized or sliced."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from candle_p1.cli.base import Command, FiniteRange, Group, write_output
from candle_p1.errors import CandleError, ParameterError
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from candle_p1.reports.timeline.summary import TimelineSummary
    from candle_p1.reports.timeline.tracks import Track
    from candle_p1.training.screen import Screen

MIB = 2**20
POWER_FILES = "power-*.csv"
SHOWN_TENSORS = 15
UNION_TIMES = ("union_s", "first_s", "last_s")
TENSOR_KINDS = ("negotiate", "wait", "queue", "memcpy", "transfer")


@click.group("timeline", cls=Group)
def command() -> None:
    """Read the timeline that Horovod writes of a run with --timeline.

    Tracing slows a run down, so times in it must not be compared with those of other runs.
    """


@command.command("summary", cls=Command, examples=["candle-p1 timeline summary timeline.json"])
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path),
    help="Also write the whole summary, with every tensor and step, to this file.",
)
@click.option(
    "--gradients",
    help="A regular expression for the names of gradients, from which steps are found; by default"
    " those that this package uses.",
)
@click.option(
    "--record",
    "record_path",
    type=click.Path(path_type=Path),
    help="The run.json of the run: the broadcast overhead then includes the waiting of the ranks"
    " before they broadcast.",
)
def summary_command(
    path: Path, json_path: Path | None, gradients: str | None, record_path: Path | None
) -> None:
    """Summarize the timeline FILE (or FILE.gz), of any size, complete or truncated."""
    import re

    from candle_p1.records.record import read_record
    from candle_p1.reports.frame import Run
    from candle_p1.reports.timeline.summary import GRADIENT, summarize
    from candle_p1.training.screen import Screen

    try:
        re.compile(gradients or "")
    except re.error as error:
        raise ParameterError(f"--gradients {gradients}: {error}") from error
    run = Run(record_path, read_record(record_path)) if record_path else None
    summary = summarize(path, gradients=gradients or GRADIENT)
    if run and summary.broadcast:
        whole = summary.broadcast.after(run.broadcast_wait_s or 0.0)
        summary = replace(summary, broadcast=whole)
    if json_path:
        write_output("--json", json_path, json.dumps(summary.to_dict()))
    screen = Screen()
    for part in _parts(summary):
        screen.say(part)


@command.command(
    "slice",
    cls=Command,
    examples=["candle-p1 timeline slice timeline.json --from 5 --to 6 --record run.json"],
)
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@click.option(
    "--from",
    "begin_s",
    default=0.0,
    show_default=True,
    type=FiniteRange(min=0),
    help="Where the piece starts, in seconds on the timeline's clock.",
)
@click.option(
    "--to",
    "end_s",
    type=FiniteRange(min=0),
    help="Where it ends; by default the end of the timeline.",
)
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    help="The file to write, gzipped if it ends in .gz; by default FILE with .slice.json.",
)
@click.option(
    "--record",
    "record_path",
    type=click.Path(path_type=Path),
    help="The run.json of the run: also draws its phases, how its ranks read files, and the power"
    " in the files beside it.",
)
def slice_command(
    path: Path, begin_s: float, end_s: float | None, out: Path | None, record_path: Path | None
) -> None:
    """Cut a piece out of the timeline FILE, for ui.perfetto.dev or chrome://tracing."""
    from candle_p1.reports.timeline.events import US_PER_S
    from candle_p1.reports.timeline.slice import cut
    from candle_p1.training.screen import Screen

    screen = Screen()
    tracks = _tracks(path, record_path, screen) if record_path else []
    out = out or path.with_name(path.name.removesuffix(".gz").removesuffix(".json") + ".slice.json")
    piece = cut(path, out, begin_s, end_s, tracks)
    screen.say(
        f"{out}: {piece.begin_us / US_PER_S:.3f} to {piece.end_us / US_PER_S:.3f} s,"
        f" {piece.num_events:,} events of {len(piece.pids):,} tensors"
        f" and {piece.num_track_events:,} of phases, reading and power,"
        f" {out.stat().st_size / MIB:.1f} MiB"
    )
    screen.say("open it at https://ui.perfetto.dev or chrome://tracing")


def _tracks(path: Path, record_path: Path, screen: Screen) -> list[Track]:
    """Returns the phases, the reading and the power to draw; prints what is missing."""
    from candle_p1.records.record import read_record
    from candle_p1.reports.frame import POWER_FILE, Run
    from candle_p1.reports.timeline.events import read_origin_epoch_us
    from candle_p1.reports.timeline.tracks import origin_s, phase_track, power_track, reading_tracks

    run = Run(record_path, read_record(record_path))
    zero_s = origin_s(run, read_origin_epoch_us(path))
    if zero_s is None:
        raise CandleError(
            f"{path} does not state the origin of its clock: leave out --record {record_path}"
        )
    beside = sorted(record_path.parent.glob(POWER_FILES))
    files = [file for file in beside if POWER_FILE.fullmatch(file.name)]
    tracks = [power_track(file, zero_s) for file in files]
    if not tracks:
        screen.say(f"there is no {POWER_FILES} beside {record_path}, so no power is drawn")
    phases = phase_track(run, zero_s)
    if phases.spans:
        tracks.append(phases)
    else:
        screen.say(f"{record_path} does not say when phases began, so they are not drawn")
    return [*tracks, *reading_tracks(run, zero_s)]


def _parts(summary: TimelineSummary) -> Iterator[str | Table]:
    cut = ", truncated" if summary.cut else ""
    yield (
        f"{summary.path}: {count(summary.num_events, 'event')}, {summary.begin_s:.3f} to"
        f" {summary.end_s:.3f} s{cut}; times are those of a traced run"
    )
    if not summary.activities:
        return
    yield "time in s; time in which intervals of several tensors overlap is counted once (union)"
    yield _activity_table(summary)
    broadcast = summary.broadcast
    if broadcast:
        yield (
            f"broadcast overhead {broadcast.overhead_s:.3f} s: {broadcast.waiting_s:.3f} s waiting"
            f" and {broadcast.broadcast_s:.3f} s broadcasting"
            f" {count(broadcast.num_tensors, 'tensor')}"
            f"{'' if broadcast.whole else '; it did not finish'}"
        )
    for name, messages in summary.messages.items():
        if messages["sizes"]:
            yield (
                f"{name}: {messages['num']:,} messages with {messages['num_tensors']:,} tensors,"
                f" {messages['bytes'] / MIB:,.1f} MiB in {messages['duration_s']:.3f} s"
            )
            yield _message_table(messages)
    longest = sorted(summary.tensors, key=lambda row: row.get("transfer_s", 0.0), reverse=True)
    yield (
        f"the {min(len(longest), SHOWN_TENSORS)} of {len(longest):,} tensors with the longest"
        " transfers, in s"
    )
    yield _tensor_table(longest[:SHOWN_TENSORS])
    yield _step_line(summary)
    for row in summary.unfinished:
        yield f"unfinished: {row['activity']} of {row['tensor']}, started at {row['begin_s']:.3f} s"


def _activity_table(summary: TimelineSummary) -> Table:
    table = _table(("activity", "kind"), ("union", "intervals", "first", "last"))
    activities = sorted(summary.activities.items(), key=lambda item: item[1]["first_s"])
    kinds = [row["kind"] for _, row in activities]
    rows = [(name, row["kind"], row) for name, row in activities]
    totals = [("", kind, row) for kind, row in summary.kinds.items() if kinds.count(kind) > 1]
    totals += [("", f"transfer by {name}", row) for name, row in summary.libraries.items()]
    for section in (rows, totals):
        table.add_section()
        for name, kind, row in section:
            union_s, first_s, last_s = (f"{row[key]:.3f}" for key in UNION_TIMES)
            table.add_row(name, kind, union_s, f"{row['num']:,}", first_s, last_s)
    return table


def _message_table(messages: dict[str, Any]) -> Table:
    table = _table((), ("from", "messages", "MiB", "s", "MiB/s"))
    for row in messages["sizes"]:
        rate = row["bytes_per_s"]
        table.add_row(
            _size(row["from_bytes"]),
            f"{row['num']:,}",
            f"{row['bytes'] / MIB:,.3f}",
            f"{row['duration_s']:.3f}",
            "" if rate is None else f"{rate / MIB:,.1f}",
        )
    return table


def _tensor_table(rows: list[dict[str, Any]]) -> Table:
    kinds = [kind for kind in TENSOR_KINDS if any(f"{kind}_s" in row for row in rows)]
    table = _table(("tensor",), ("count", "MiB", *kinds))
    for row in rows:
        name = row["name"].removeprefix("StatefulPartitionedCall/")  # of every tf.function
        mib = "" if row["bytes"] is None else f"{row['bytes'] / MIB:,.3f}"
        seconds = (f"{row[f'{kind}_s']:.3f}" if f"{kind}_s" in row else "" for kind in kinds)
        table.add_row(name, f"{row['num']:,}", mib, *seconds)
    return table


def _step_line(summary: TimelineSummary) -> str:
    import numpy as np

    if not summary.num_steps:
        return "no steps, because no tensor has the name of a gradient (--gradients)"
    steps = {name: np.array(values) for name, values in summary.steps.items()}
    lengths_s = steps["end_s"] - steps["begin_s"]
    medians = {name: np.median(values) for name, values in steps.items()}
    return (
        f"{summary.num_steps:,} steps; medians: {np.median(lengths_s):.4f} s from the first"
        f" negotiation to the last gradient, {medians['allreduce_s']:.4f} s of this in allreduces"
        f" of {medians['bytes'] / MIB:.3f} MiB in {medians['num_tensors']:,.0f} gradients and"
        f" {medians['num_messages']:,.0f} messages;"
        f" the longest step is number {lengths_s.argmax() + 1:,} with {lengths_s.max():.4f} s"
    )


def _size(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes // size} {unit}"
    return f"{num_bytes} B"


def _table(left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    from rich.table import Table

    table = Table()
    for column in left:
        table.add_column(column, overflow="fold")
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    return table
