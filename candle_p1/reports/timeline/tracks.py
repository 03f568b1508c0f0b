"""What is drawn beside a timeline: the phases of the run, and power.

A run's record and its power readings count seconds from the start of the run, whereas a timeline
counts from ``hvd.init``; `origin_s` is the difference.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

import numpy as np

from candle_p1.records.power_file import read_traces
from candle_p1.reports.timeline.events import US_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from candle_p1.records.power_trace import Trace
    from candle_p1.reports.runs import RecordedRun


@dataclass(frozen=True)
class Span:
    """A named interval on the timeline's clock."""

    name: str
    begin_us: int
    end_us: int


@dataclass(frozen=True)
class Sample:
    """The value of a series from a time on, until its next sample.

    Attributes:
        series: The name of the series.
        us: The time, on the timeline's clock.
        unit: The unit of the value.
        value: A finite number.
    """

    series: str
    us: int
    unit: str
    value: float


@dataclass(frozen=True)
class Track:
    """A process of its own in the viewer.

    Attributes:
        name: Its title.
        spans: Intervals, in any order.
        samples: Samples of several series, each in the order of time.
    """

    name: str
    spans: Iterable[Span] = field(default=())
    samples: Iterable[Sample] = field(default=())


def origin_s(run: RecordedRun, epoch_us: int | None) -> float | None:
    """Returns when a timeline's clock was 0, in seconds from the start of the run.

    It follows from the time of day that the record of a traced run relates to the run's own clock,
    exact to microseconds (see `clock`); without one, from the time of day at which the run started,
    to a millisecond.

    Args:
        run: The traced run.
        epoch_us: The time of day at which the timeline's clock was 0; None where it is not known.

    Returns:
        The time; None where the timeline does not say.
    """
    if epoch_us is None:
        return None
    anchor = run.record.timeline
    if anchor:
        return anchor.anchor_s + (epoch_us - anchor.anchor_epoch_us) / US_PER_S
    return epoch_us / US_PER_S - datetime.fromisoformat(run.started).timestamp()


def phase_track(run: RecordedRun, origin_s: float) -> Track | None:
    """Returns rank 0's phases, and its epochs within the training; None where none are known.

    A phase that was entered several times is drawn in one piece, from its first begin.

    Args:
        run: The traced run.
        origin_s: When the timeline's clock was 0, in seconds from the start of the run.
    """
    spans = []
    for each in (*run.stretches(), *run.epoch_stretches()):
        if not np.isnan(each.begin_s[0]):
            begin_s = each.begin_s[0] - origin_s
            spans.append(Span(each.name, _us(begin_s), _us(begin_s + each.seconds[0])))
    return Track("rank 0: phases", spans=spans) if spans else None


def power_track(path: Path, origin_s: float) -> Track:
    """Returns a node's power over time; for an energy counter, the mean between two readings.

    Every device is a series of its own. They are not added up, because some contain others.

    Args:
        path: The file power-NNNN.csv of node NNNN.
        origin_s: When the timeline's clock was 0, from the start of the run.

    Raises:
        DataError: The file cannot be read or does not hold power readings.
    """
    samples = [sample for trace in read_traces(path) for sample in _samples(trace, origin_s)]
    return Track(f"node {int(path.stem.rpartition('-')[2])}: power", samples=samples)


def _samples(trace: Trace, origin_s: float) -> Iterator[Sample]:
    channel = trace.channel
    series = f"{channel.label} ({channel.device}, {channel.source})"
    times_s, values = trace.times_s - origin_s, trace.values
    if channel.reading == "energy":
        values = np.diff(values) / np.diff(times_s)
    for time_s, watts in zip(times_s.tolist(), values.tolist(), strict=False):
        yield Sample(series, _us(time_s), "W", watts)


def _us(seconds: float) -> int:
    return round(seconds * US_PER_S)
