"""A piece of a timeline as a file of its own, for Perfetto and chrome://tracing.

The piece is valid in the viewers' format even where the timeline is truncated: the array is closed,
every begin has an end, and every event has a process and a thread. Times are those of the timeline.
"""

from __future__ import annotations

import gzip
import json
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from candle_p1.errors import DataError, ParameterError
from candle_p1.reports.timeline.clock import ORIGIN_KEY, origin_epoch_us
from candle_p1.reports.timeline.events import US_PER_S, EventReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from candle_p1.reports.timeline.events import Event
    from candle_p1.reports.timeline.tracks import Sample, Track

CLOCK_PID = 0
"""Belongs to no tensor: Horovod states the clock's origin there."""
LANE_TIDS = 2**20
"""The distance between the threads of a track."""


@dataclass(frozen=True)
class Slice:
    """What was written.

    Attributes:
        path: The file.
        begin_s: Where the piece begins, on the timeline's clock.
        end_s: Where it ends.
        num_events: Events of the timeline, without metadata.
        num_tensors: Tensors that appear.
        num_track_events: Events of the tracks.
    """

    path: Path
    begin_s: float
    end_s: float
    num_events: int
    num_tensors: int
    num_track_events: int


def cut(
    path: Path,
    out: Path,
    begin_s: float = 0.0,
    end_s: float | None = None,
    tracks: Sequence[Track] = (),
) -> Slice:
    """Writes a piece of a timeline, with tracks above it; events are clipped to the piece.

    The timeline is not read beyond the piece. Tensors keep their order.

    Args:
        path: The timeline.
        out: The file to write, gzipped if its name ends in .gz; an existing one is replaced.
        begin_s: Where the piece begins, in seconds on the timeline's clock.
        end_s: Where it ends; None is the end of the timeline.
        tracks: What is drawn beside it.

    Raises:
        ParameterError: The piece is empty, or `out` cannot be written.
        DataError: The file cannot be read or is not a timeline.
    """
    if end_s is not None and end_s <= begin_s:
        raise ParameterError(f"a piece from {begin_s} s to {end_s} s is empty")
    if out.exists() and path.exists() and out.samefile(path):
        raise ParameterError(f"{out} is the timeline itself: choose another file for the piece")
    begin_us = round(begin_s * US_PER_S)
    end_us = None if end_s is None else round(end_s * US_PER_S)
    with _replacing(out) as file:
        writer = _Writer(file)
        piece = _Piece(writer, begin_us, end_us)
        for event in EventReader(path):
            if not piece.take(event):
                break
        last_us = piece.finish()
        if last_us is None:
            raise DataError("the timeline has no events", path)
        if not piece.begun:
            raise ParameterError(
                f"{path} ends at {last_us / US_PER_S:.6f} s, before the piece begins at {begin_s} s"
            )
        end_us = last_us if end_us is None else end_us
        drawing = _Drawing(writer, begin_us, end_us)
        for i, track in enumerate(tracks):
            drawing.draw(track, pid=piece.last_pid + 1 + i, sort_index=i - len(tracks))
        writer.close()
    return Slice(
        path=out,
        begin_s=begin_s,
        end_s=end_us / US_PER_S,
        num_events=piece.num_events,
        num_tensors=len(piece.pids),
        num_track_events=drawing.num_events,
    )


@contextmanager
def _replacing(path: Path) -> Iterator[TextIO]:
    """Opens a file that replaces `path` when it is complete."""
    partial = path.with_name(f".{path.name}.part")
    try:
        with (
            partial.open("wb") as raw,
            gzip.open(raw, "wt", encoding="utf-8", compresslevel=6)
            if path.suffix == ".gz"
            else open(raw.fileno(), "w", encoding="utf-8", closefd=False) as file,
        ):
            yield file
        partial.replace(path)
    except OSError as error:
        raise ParameterError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            partial.unlink()


class _Writer:
    """Writes a JSON array, an event per line."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._separator = "[\n"

    def write(self, event: Event) -> None:
        self._file.write(self._separator + json.dumps(event, allow_nan=False))
        self._separator = ",\n"

    def metadata(self, name: str, pid: int, /, **args: Any) -> None:
        self.write({"name": name, "ph": "M", "pid": pid, "tid": pid, "args": args})

    def close(self) -> None:
        self._file.write("[]\n" if self._separator == "[\n" else "\n]\n")


class _Piece:
    """The timeline's own part of a piece.

    Attributes:
        begun: Whether an event at or after the begin has been seen.
        pids: The processes of the tensors that appear.
        num_events: Events written, without metadata.
        last_pid: The largest process number seen.
    """

    def __init__(self, writer: _Writer, begin_us: int, end_us: int | None) -> None:
        self._writer, self._begin_us, self._end_us = writer, begin_us, end_us
        self._names: dict[int, str] = {}
        self._open: dict[int, list[Event]] = {}
        self._us: int | None = None
        self.begun = False
        self.pids: set[int] = set()
        self.num_events = 0
        self.last_pid = CLOCK_PID

    def take(self, event: Event) -> bool:
        """Takes the next event of the timeline; returns whether more are needed."""
        phase = event["ph"]
        if phase == "M":
            self._name(event)
            return True
        us: int = event["ts"]
        if us >= self._begin_us and not self.begun:
            self.begun = True
            self._write_open()
        if self._end_us is not None and us > self._end_us:
            self._us = self._end_us
            return False
        self._us = us if self._us is None else max(us, self._us)
        if phase == "B":
            self._open.setdefault(event["pid"], []).append(event)
            if self.begun:
                self._write(event)
        elif phase == "E":
            # Omit an end without a begin: the timeline was started during an operation.
            if self._open.get(event["pid"]):
                self._open[event["pid"]].pop()
                if self.begun:
                    self._write(event)
        elif phase in "Xi" and us >= self._begin_us:
            self._write(event)
        return True

    def _name(self, event: Event) -> None:
        pid, args = event["pid"], event.get("args", {})
        self.last_pid = max(self.last_pid, pid)
        if event["name"] != "process_name":
            return
        epoch_us = origin_epoch_us(event)
        if epoch_us is not None:
            self._writer.metadata(
                "process_name", pid, name="Horovod timeline", **{ORIGIN_KEY: epoch_us}
            )
        elif "name" in args:
            self._names[pid] = args["name"]

    def _write_open(self) -> None:
        """Begins everything that is open where the piece begins."""
        for events in self._open.values():
            for event in events:
                self._write(event | {"ts": self._begin_us})

    def _write(self, event: Event) -> None:
        pid = event.get("pid", CLOCK_PID)  # a mark of Horovod's cycles belongs to no tensor
        if pid != CLOCK_PID and pid not in self.pids:
            self.pids.add(pid)
            self.last_pid = max(self.last_pid, pid)
            self._writer.metadata("process_name", pid, name=self._names.get(pid, f"tensor {pid}"))
            self._writer.metadata("process_sort_index", pid, sort_index=pid)
        self._writer.write(event | {"pid": pid, "tid": pid})
        self.num_events += 1

    def finish(self) -> int | None:
        """Ends everything that is open at the end; returns that time in µs, None without events."""
        if self.begun:
            for pid, events in self._open.items():
                for _ in events:
                    self._write({"ph": "E", "ts": self._us, "pid": pid})
        return self._us


class _Drawing:
    """Writes tracks, each as a process of its own, clipped to the piece.

    Attributes:
        num_events: Events written, without metadata.
    """

    def __init__(self, writer: _Writer, begin_us: int, end_us: int) -> None:
        self._writer, self._begin_us, self._end_us = writer, begin_us, end_us
        self.num_events = 0

    def draw(self, track: Track, pid: int, sort_index: int) -> None:
        """Draws a track as the process `pid`, at `sort_index` from the top."""
        self._writer.metadata("process_name", pid, name=track.name)
        self._writer.metadata("process_sort_index", pid, sort_index=sort_index)
        lanes: list[list[int]] = []
        # A viewer nests spans that begin together in the order of the file.
        for span in sorted(track.spans, key=lambda span: (span.begin_us, -span.end_us)):
            begin_us, end_us = max(span.begin_us, self._begin_us), min(span.end_us, self._end_us)
            if begin_us < end_us:
                lane = _lane(lanes, begin_us, end_us)
                facts = {"name": span.name, "ph": "X", "dur": end_us - begin_us}
                self._write(facts, begin_us, pid, tid=pid + lane * LANE_TIDS)
        before: dict[str, Sample] = {}
        for sample in track.samples:
            if sample.us <= self._begin_us:
                before[sample.series] = sample
            elif sample.us <= self._end_us:
                if sample.series in before:  # the value with which the piece begins
                    self._write_sample(before.pop(sample.series), pid)
                self._write_sample(sample, pid)
        for sample in before.values():
            self._write_sample(sample, pid)

    def _write_sample(self, sample: Sample, pid: int) -> None:
        us = max(sample.us, self._begin_us)
        args = {sample.unit: sample.value}
        self._write({"name": sample.series, "ph": "C", "args": args}, us, pid, tid=pid)

    def _write(self, event: Event, us: int, pid: int, tid: int) -> None:
        self._writer.write(event | {"ts": us, "pid": pid, "tid": tid})
        self.num_events += 1


def _lane(lanes: list[list[int]], begin_us: int, end_us: int) -> int:
    """Returns the first lane in which a span nests within all open spans, or is alone.

    Args:
        lanes: For each, the ends of the open spans, the outermost first; is updated.
        begin_us: Where the span begins, not before the previous one.
        end_us: Where it ends.
    """
    for i, ends in enumerate([*lanes, []]):
        while ends and ends[-1] <= begin_us:
            ends.pop()
        if not ends or end_us <= ends[-1]:
            if i == len(lanes):
                lanes.append(ends)
            ends.append(end_us)
            return i
    raise AssertionError("a new lane takes every span")
