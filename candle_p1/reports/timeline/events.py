"""The events of a Horovod timeline, read as a stream.

Rank 0 of Horovod (0.28.1, ``horovod/common/timeline.cc``) writes one JSON array of trace events::

    {"name": "process_name", "ph": "M", "pid": 3, "args": {"name": "gradient.0.dense/kernel"}}
    {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 513107, "pid": 3}
    {"ph": "X", "name": "1", "ts": 520544, "pid": 3, "dur": 0}
    {"ph": "E", "ts": 520803, "pid": 3, "args": {"dtype": "float32", "shape": "[3, 1]"}}

A process (``pid``) is a tensor, named when it first appears. ``ts`` is in whole microseconds since
``hvd.init`` and never decreases: one lock orders all events. Only the naming of a process ends a
line, so nearly all of a file is a single line. After each event the array is closed with "]", which
the next event overwrites; a run that is killed leaves what had been flushed.
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

CHUNK_BYTES = 2**18
MAX_EVENT_CHARS = 2**20
"""Horovod's events are a hundred characters or so. What does not end within this is no event."""

GZIP_MAGIC = b"\x1f\x8b"

# A file system that lost the end of a file may have left zeros.
_BETWEEN = re.compile(r"[\s,\0]*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_BRACKET = re.compile(r"[][{}]")


class EventReader:
    """Reads a timeline, plain or gzipped, from start to end, in constant memory.

    ::

        reader = EventReader(path)
        for event in reader:
            ...

    A file that ends anywhere is read to its last whole event. Users of this class can rely on
    "ph"; on a "name" of text, but in "E"; on a whole "ts", but in metadata ("M"); on a whole "pid",
    but in "i", a mark that belongs to no tensor; and on "args", if any, being an object.

    Args:
        path: The file.

    Attributes:
        cut: The array was not closed. Known at the end.
        num_events: Read so far.

    Raises:
        DataError: The file cannot be read or is not a timeline; while iterating.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cut = True
        self.num_events = 0
        self._num_lines = 0  # before the text in hand
        self._text = ""
        self._decoder = json.JSONDecoder(parse_constant=_refuse)

    def __iter__(self) -> Iterator[Event]:
        """Yields the events in the order of the file."""
        return chain.from_iterable(self.batches())

    def batches(self) -> Iterator[list[Event]]:
        """Yields the events in lists of some thousand."""
        opened = False
        for chunk in self._chunks():
            self._text += chunk
            if not opened:
                opened = self._open_array()
            elif not self.cut:  # closed: nothing but white space may follow
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
        """Yields the file's text. UTF-8 that is damaged, or cut at the end, is replaced."""
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        try:
            with self.path.open("rb") as file:
                zipped = file.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC)
                yield from map(decode, _unzipped(file) if zipped else _pieces(file))
        except (OSError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise DataError(f"cannot be read: {reason}", self.path) from error

    def _open_array(self) -> bool:
        """Takes the opening bracket; returns whether there was one yet."""
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
        """Decodes the text in hand up to where its last event but one should end."""
        end = self._text.rfind("},") + 1
        if end == 0:
            return self._decode_singly() if len(self._text) > MAX_EVENT_CHARS else []
        try:
            batch: list[Event] = self._decoder.decode(f"[{self._text[:end]}]")
        except ValueError:  # the place was within an event, or the array is closed
            return self._decode_singly()
        self._check(batch)
        self._take(end + 1)
        return batch

    def _decode_singly(self) -> list[Event]:
        """Decodes the text in hand, event by event, to the last whole one."""
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
        """Counts the events and makes sure that they are what users of this class rely on."""
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
            f"not a Horovod timeline: after {self.num_events:,} events comes no trace event:"
            f" {self._text[:60]!r}",
            self.path,
            self._num_lines + 1,
        )


def _is_partial(text: str) -> bool:
    """Returns whether a text that is no JSON object could become one if it went on."""
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
    """Yields what is in a gzip file, to where it was cut."""
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
