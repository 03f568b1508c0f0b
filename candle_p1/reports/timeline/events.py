"""The events of a Horovod timeline, read as a stream.

Rank 0 of Horovod (0.28.1, ``horovod/common/timeline.cc``) writes one JSON array of trace events::

    {"name": "process_name", "ph": "M", "pid": 3, "args": {"name": "gradient.0.dense/kernel"}}
    {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 513107, "pid": 3}
    {"ph": "X", "name": "1", "ts": 520544, "pid": 3, "dur": 0}
    {"ph": "E", "ts": 520803, "pid": 3, "args": {"dtype": "float32", "shape": "[3, 1]"}}

A process (``pid``) is a tensor, named when it first appears. ``ts`` is in whole microseconds since
``hvd.init`` and never decreases, because one lock orders all events. Only the naming of a process
ends a line, so nearly all of a file is a single line. After each event the array is closed with
"]", which the next event overwrites; a run that is killed leaves what had been flushed.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from itertools import chain
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from candle_p1.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Event = dict[str, Any]

US_PER_S = 1_000_000
CHUNK_BYTES = 2**18
MAX_EVENT_CHARS = 2**20
"""Horovod's events have about a hundred characters; longer text than this is not an event."""

GZIP_MAGIC = b"\x1f\x8b"

# A file system that lost the end of a file may have left zeros.
_BETWEEN = re.compile(r"[\s,\0]*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_BRACKET = re.compile(r"[][{}]")


class EventReader:
    """Reads a timeline, plain or gzipped, as a stream in constant memory.

    ::

        reader = EventReader(path)
        for event in reader:
            ...

    A truncated file is read to its last complete event. Every event is guaranteed to have "ph"; a
    "name" that is text, except in "E"; an integer "ts", except in metadata ("M"); an integer "pid",
    except in "i", a mark that belongs to no tensor; and "args", if present, is an object.

    Args:
        path: The file.

    Attributes:
        cut: Whether the array is not closed; known at the end.
        num_events: Events read so far.

    Raises:
        DataError: The file cannot be read or is not a timeline; while iterating.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cut = True
        self.num_events = 0
        self._num_lines = 0  # before the pending text
        self._text = ""
        self._decoder = json.JSONDecoder(parse_constant=_refuse)

    def __iter__(self) -> Iterator[Event]:
        """Yields the events in the order of the file."""
        return chain.from_iterable(self.batches())

    def batches(self) -> Iterator[list[Event]]:
        """Yields the events in lists of a few thousand."""
        opened = False
        for chunk in self._chunks():
            self._text += chunk
            if not opened:
                opened = self._open_array()
            elif not self.cut:  # closed: only white space may follow
                self._decode_singly()
            if opened and self.cut and (batch := self._decode_block()):
                yield batch
        if not opened:
            return
        if batch := self._decode_singly():
            yield batch
        if self._text and not (self.cut and _is_partial(self._text)):
            self._fail()

    def _chunks(self) -> Iterator[str]:
        """Yields the file's text, with invalid or truncated UTF-8 replaced."""
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        try:
            with self.path.open("rb") as file:
                zipped = file.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC)
                yield from map(decode, _unzipped(file) if zipped else _pieces(file))
        except (OSError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise DataError(f"cannot be read: {reason}", self.path) from error

    def _open_array(self) -> bool:
        """Consumes the opening bracket; returns whether it has been seen."""
        start = _BETWEEN.match(self._text.removeprefix("\ufeff"))
        text = self._text.removeprefix("\ufeff")[start.end() if start else 0 :]
        if not text:
            return False
        if text[0] != "[":
            raise DataError(
                "not a Horovod timeline: a JSON array of trace events begins with '['", self.path, 1
            )
        self._take(len(self._text) - len(text) + 1)
        return True

    def _decode_block(self) -> list[Event]:
        """Decodes the pending text up to the probable end of its last event but one."""
        end = self._text.rfind("},") + 1
        if end == 0:
            return self._decode_singly() if len(self._text) > MAX_EVENT_CHARS else []
        try:
            batch: list[Event] = self._decoder.decode(f"[{self._text[:end]}]")
        except ValueError:  # that was within an event, or the array is closed
            return self._decode_singly()
        self._check(batch)
        self._take(end + 1)
        return batch

    def _decode_singly(self) -> list[Event]:
        """Decodes the pending text, event by event, to the last complete one."""
        batch: list[Event] = []
        position = 0
        while True:
            between = _BETWEEN.match(self._text, position)
            position = between.end() if between else position
            if self.cut and self._text.startswith("]", position):
                position += 1
                self.cut = False
                continue
            if not self.cut or position == len(self._text):
                break
            try:
                event, position = self._decoder.raw_decode(self._text, position)
            except ValueError:
                break
            batch.append(event)
        self._check(batch)
        self._take(position)
        if self._text and (not self.cut or len(self._text) > MAX_EVENT_CHARS):
            self._fail()
        return batch

    def _take(self, num_chars: int) -> None:
        self._num_lines += self._text.count("\n", 0, num_chars)
        self._text = self._text[num_chars:]

    def _check(self, batch: list[Event]) -> None:
        """Counts the events and checks that they are what the class guarantees."""
        try:
            for event in batch:
                phase = event["ph"]
                if (
                    (phase != "M" and type(event["ts"]) is not int)
                    or (phase != "i" and type(event["pid"]) is not int)
                    or (phase != "E" and type(event["name"]) is not str)
                    or ("args" in event and type(event["args"]) is not dict)
                ):
                    raise TypeError
        except (KeyError, TypeError):
            self._text = json.dumps(event)
            self._fail()
        self.num_events += len(batch)

    def _fail(self) -> NoReturn:
        raise DataError(
            f"not a Horovod timeline: no trace event follows the first {self.num_events:,} events:"
            f" {self._text[:60]!r}",
            self.path,
            self._num_lines + 1,
        )


def _is_partial(text: str) -> bool:
    """Returns whether a text that is not a JSON object could be the beginning of one."""
    depth = 0
    for bracket in _BRACKET.findall(_STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth <= 0:
            return False
    return text.startswith("{")


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(CHUNK_BYTES):
        yield piece


def _unzipped(file: BinaryIO) -> Iterator[bytes]:
    """Yields the content of a gzip file, up to where it is truncated."""
    with gzip.open(file) as unzipped:
        while True:
            try:
                piece = unzipped.read1(CHUNK_BYTES)  # unlike read(), keeps what precedes a cut
            except EOFError:
                return
            if not piece:
                return
            yield piece


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
