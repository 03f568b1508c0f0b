"""What is drawn beside a timeline: the phases of the run, its reading of files, and power.

A run's record and its power readings count seconds from the start of the run, whereas a timeline
counts from ``hvd.init``; `origin_s` is the difference.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from candle_p1.errors import RecordError
from candle_p1.records.power_file import read_traces
from candle_p1.reports.timeline.events import US_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from candle_p1.records.power_trace import Trace
    from candle_p1.reports.frame import Run


BYTES_PER_MB = 1_000_000


class Span(NamedTuple):
    """A named interval on the timeline's clock.

    Attributes:
        name: What takes place, or the name of the series.
        begin_us: When it begins.
        end_us: When it ends.
        value: The value of a series during this time; None where the span is not one.
        unit: Its unit.
    """

    name: str
    begin_us: int
    end_us: int
    value: float | None = None
    unit: str = ""


class Track(NamedTuple):
    """A process of its own in the viewer: its title, and its spans in any order."""

    name: str
    spans: list[Span]


def origin_s(run: Run | Run, epoch_us: int | None) -> float | None:
    """Returns when a timeline's clock was 0, in seconds from the start of the run.

    It follows from the time of day that the record of a traced run relates to the run's own clock,
    exact to microseconds; without one, from the time of day at which the run started, to a
    millisecond.

    Args:
        run: The traced run.
        epoch_us: The time of day at which the timeline's clock was 0; None where it is not known.

    Returns:
        The time; None where the timeline does not say.

    Raises:
        RecordError: The record does not say when the run started.
    """
    if epoch_us is None:
        return None
    anchor = run.record.timeline
    if anchor:
        return anchor.anchor_s + (epoch_us - anchor.anchor_epoch_us) / US_PER_S
    try:
        started_s = datetime.fromisoformat(run.record.started).timestamp()
    except ValueError as error:
        raise RecordError(f"{run.place}: started {run.record.started!r} is not a time") from error
    return epoch_us / US_PER_S - started_s


def phase_track(run: Run, origin_s: float) -> Track:
    """Returns rank 0's phases, and its epochs within the training, as far as they are known.

    A phase that was entered several times is drawn in one piece, from its first start.

    Args:
        run: The traced run.
        origin_s: When the timeline's clock was 0, in seconds from the start of the run.
    """
    spans = [
        _span(each.name, each.begin_s[0] - origin_s, each.seconds[0])
        for each in (*run.stretches(), *run.epoch_stretches())
        if not np.isnan(each.begin_s[0])
    ]
    return Track("rank 0: phases", spans)


def reading_tracks(run: Run, origin_s: float) -> list[Track]:
    """Returns, for each file, how many ranks read it at a time, and how fast they read together.

    Args:
        run: The traced run.
        origin_s: When the timeline's clock was 0, in seconds from the start of the run.
    """
    tracks = []
    for role, file in run.files.items():
        reading = file.reading
        if reading is None:
            continue
        begin_s, length_s = reading.begin.min_s - origin_s, reading.interval_s
        spans = [
            _span(name, begin_s + i * length_s, length_s, value / scale, unit)
            for name, unit, values, scale in (
                ("ranks that read", "ranks", reading.num_ranks, 1),
                ("rate of all ranks", "MB/s", reading.bytes_per_s, BYTES_PER_MB),
            )
            for i, value in enumerate([*values, 0.0])  # the viewer draws the last value for ever
        ]
        tracks.append(Track(f"reading {role}", spans))
    return tracks


def power_track(path: Path, origin_s: float) -> Track:
    """Returns a node's power over time; for an energy counter, the mean between two readings.

    Every device is a series of its own. They are not added up, because some contain others.

    Args:
        path: The file power-NNNN.csv of node NNNN.
        origin_s: When the timeline's clock was 0, from the start of the run.

    Raises:
        DataError: The file cannot be read or does not hold power readings.
    """
    spans = [span for trace in read_traces(path) for span in _spans(trace, origin_s)]
    return Track(f"node {int(path.stem.rpartition('-')[2])}: power", spans)


def _spans(trace: Trace, origin_s: float) -> Iterator[Span]:
    channel = trace.channel
    series = f"{channel.label} ({channel.device}, {channel.source})"
    begins_s, watts = trace.times_s - origin_s, trace.values
    lengths_s = np.diff(begins_s, append=begins_s[-1] + trace.interval_s)
    if channel.reading == "energy":
        watts = np.diff(watts) / lengths_s[:-1]
    for begin_s, length_s, power_w in zip(begins_s, lengths_s, watts.tolist(), strict=False):
        yield _span(series, begin_s, length_s, power_w, "W")


def _span(
    name: str, begin_s: float, length_s: float, value: float | None = None, unit: str = ""
) -> Span:
    end_s = begin_s + length_s
    return Span(name, round(begin_s * US_PER_S), round(end_s * US_PER_S), value, unit)
