"""A piece of a timeline as a file of its own, for Perfetto and chrome://tracing.

The piece is valid in the viewers' format even where the timeline is truncated: the array is closed,
every begin event has an end event, and every event has a process and a thread. Times are those of
the timeline.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from candle_p1.errors import DataError, ParameterError
from candle_p1.reports.timeline.events import ORIGIN_KEY, US_PER_S, EventReader, origin_epoch_us

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from candle_p1.reports.timeline.events import Event
    from candle_p1.reports.timeline.tracks import Track

CLOCK_PID = 0
"""Belongs to no tensor: Horovod states the clock's origin there."""
LANE_TIDS = 2**20
"""The distance between the threads of a track."""


class Slice:
    """The events of a piece.

    Attributes:
        begin_us: Where the piece begins, on the timeline's clock.
        end_us: Where it ends; this and the following are known when all events have been yielded.
        pids: The processes of the tensors that appear.
        num_events: Events of the timeline, without metadata.
        num_track_events: Events of the tracks, likewise.
    """

    def __init__(self, path: Path, begin_us: int, limit_us: int | None) -> None:
        self._path, self._limit_us = path, limit_us
        self._names: dict[int, str] = {}
        self._last_pid = CLOCK_PID
        self.begin_us = self.end_us = begin_us
        self.pids: set[int] = set()
        self.num_events = self.num_track_events = 0

    def events(self, tracks: Sequence[Track]) -> Iterator[Event]:
        """Yields the timeline's own events, then those of the tracks."""
        yield from self._timeline()
        for i, track in enumerate(tracks):
            yield from self._drawn(track, self._last_pid + 1 + i, sort_index=i - len(tracks))

    def _timeline(self) -> Iterator[Event]:
        begun = False
        us: int | None = None
        unfinished: dict[int, list[Event]] = defaultdict(list)  # by process
        for event in EventReader(self._path):
            phase = event["ph"]
            if phase == "M":
                yield from self._named(event)
                continue
            us = event["ts"]
            if not begun and us >= self.begin_us:
                begun = True
                for earlier in chain.from_iterable(unfinished.values()):
                    yield from self._own(earlier | {"ts": self.begin_us})
            if self._limit_us is not None and us > self._limit_us:
                break
            if phase == "B":
                unfinished[event["pid"]].append(event)
            elif phase == "E":
                if not unfinished[event["pid"]]:
                    continue  # it has no begin event: the timeline was started during an operation
                unfinished[event["pid"]].pop()
            if begun and phase in "BEXi":
                yield from self._own(event)
        if us is None:
            raise DataError("the timeline has no events", self._path)
        if not begun:
            raise ParameterError(
                f"{self._path} ends at {us / US_PER_S:.6f} s, before the piece begins at"
                f" {self.begin_us / US_PER_S} s"
            )
        self.end_us = us if self._limit_us is None else self._limit_us
        for pid, events in unfinished.items():
            for _ in events:
                yield from self._own({"ph": "E", "ts": min(us, self.end_us), "pid": pid})

    def _named(self, event: Event) -> Iterator[Event]:
        """Remembers a tensor's name; yields the event that states the clock's origin."""
        pid = event["pid"]
        self._last_pid = max(self._last_pid, pid)
        epoch_us = origin_epoch_us(event)
        if epoch_us is not None:
            facts = {"name": "Horovod timeline", ORIGIN_KEY: epoch_us}
            yield _metadata("process_name", pid, **facts)
        elif event["name"] == "process_name":
            self._names[pid] = event.get("args", {}).get("name", f"tensor {pid}")

    def _own(self, event: Event) -> Iterator[Event]:
        """Yields an event of the timeline, after the name of its tensor when that is new."""
        pid = event.get("pid", CLOCK_PID)  # a mark of Horovod's cycles belongs to no tensor
        if pid != CLOCK_PID and pid not in self.pids:
            self.pids.add(pid)
            self._last_pid = max(self._last_pid, pid)
            yield _metadata("process_name", pid, name=self._names.get(pid, f"tensor {pid}"))
            yield _metadata("process_sort_index", pid, sort_index=pid)
        self.num_events += 1
        yield event | {"pid": pid, "tid": pid}

    def _drawn(self, track: Track, pid: int, sort_index: int) -> Iterator[Event]:
        """Yields a track as the process `pid`, clipped to the piece."""
        yield _metadata("process_name", pid, name=track.name)
        yield _metadata("process_sort_index", pid, sort_index=sort_index)
        lanes: list[list[int]] = []
        # A viewer nests spans that begin together in the order of the file.
        for span in sorted(track.spans, key=lambda span: (span.begin_us, -span.end_us)):
            begin_us, end_us = max(span.begin_us, self.begin_us), min(span.end_us, self.end_us)
            if begin_us >= end_us:
                continue
            self.num_track_events += 1
            event = {"name": span.name, "ts": begin_us, "pid": pid}
            if span.value is None:
                tid = pid + LANE_TIDS * _lane(lanes, begin_us, end_us)
                yield event | {"ph": "X", "dur": end_us - begin_us, "tid": tid}
            else:
                yield event | {"ph": "C", "args": {span.unit: span.value}, "tid": pid}


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

    Returns:
        What was written.

    Raises:
        ParameterError: The piece is empty, or `out` cannot be written.
        DataError: The file cannot be read or is not a timeline.
    """
    if end_s is not None and end_s <= begin_s:
        raise ParameterError(f"a piece from {begin_s} s to {end_s} s is empty")
    if out.exists() and path.exists() and out.samefile(path):
        raise ParameterError(f"{out} is the timeline itself: choose another file for the piece")
    end_us = None if end_s is None else round(end_s * US_PER_S)
    piece = Slice(path, round(begin_s * US_PER_S), end_us)
    with _replacing(out) as file:
        file.write("[")
        separator = "\n"
        for event in piece.events(tracks):
            file.write(separator + json.dumps(event, allow_nan=False))
            separator = ",\n"
        file.write("\n]\n")
    return piece


@contextmanager
def _replacing(path: Path) -> Iterator[TextIO]:
    """Opens a file that replaces `path` when it is complete."""
    partial = path.with_name(f".{path.name}.part")
    try:
        with (
            gzip.open(partial, "wt", compresslevel=6, encoding="utf-8")
            if path.suffix == ".gz"
            else partial.open("w", encoding="utf-8") as file
        ):
            yield file
        partial.replace(path)
    except OSError as error:
        raise ParameterError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            partial.unlink()


def _metadata(name: str, pid: int, /, **args: Any) -> Event:
    return {"name": name, "ph": "M", "pid": pid, "tid": pid, "args": args}


def _lane(lanes: list[list[int]], begin_us: int, end_us: int) -> int:
    """Returns the first lane in which a span nests within all open spans, or is alone.

    Args:
        lanes: For each, the ends of the open spans, the outermost first; is updated.
        begin_us: Where the span begins, not before the previous one.
        end_us: Where it ends.
    """
    for lane, ends in enumerate(lanes):
        while ends and ends[-1] <= begin_us:
            ends.pop()
        if not ends or end_us <= ends[-1]:
            ends.append(end_us)
            return lane
    lanes.append([end_us])
    return len(lanes) - 1
