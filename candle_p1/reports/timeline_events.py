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

For every tensor Horovod logs the negotiation (from the first rank that is ready to the last), then
the operation itself (from the end of the negotiation), and within the operation its activities, one
after the other::

    NEGOTIATE_ALLREDUCE
    ALLREDUCE
      QUEUE                      waiting for the accelerator's stream
      MEMCPY_IN_FUSION_BUFFER
      NCCL_ALLREDUCE             performed by a communication library
      MEMCPY_OUT_FUSION_BUFFER
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from candle_p1.errors import DataError
from candle_p1.files import open_regular_file

Event = dict[str, Any]

US_PER_S = 1_000_000
CHUNK_BYTES = 2**18
MAX_EVENT_CHARS = 2**20
"""Horovod's events have about a hundred characters; longer text than this is not an event."""
MAX_US = 2**62

ORIGIN_KEY = "start_time_since_epoch_in_micros"
GZIP_MAGIC = b"\x1f\x8b"

_NAMES = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "join", "barrier")
OPERATIONS = {name.upper(): name for name in _NAMES} | {"ADASUM": "allreduce"}
LIBRARIES = ("NCCL", "MPI", "GLOO", "CCL", "DDL")
LIBRARY_OPERATIONS = OPERATIONS | {"BCAST": "broadcast", "REDUCE": "reduce"}
"""By the last word of the name: NCCL_BCAST, MPI_CROSS_ALLGATHER."""
NEGOTIATE, TRANSFER = "negotiate", "transfer"
KINDS_BY_WORD = {"QUEUE": "queue", "WAIT": "wait", "MEMCPY": "memcpy", "COPY": "memcpy"}
KINDS_BY_WORD |= {"INIT": "setup", "ALLOCATE": "setup"}
"""By the first word of the name: WAIT_FOR_DATA, INIT_NCCL."""

# A file system that lost the end of a file may have left zeros.
_SOMETHING = re.compile(r"[^\s,\0\ufeff]")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_BRACKET = re.compile(r"[][{}]")


class Activity(NamedTuple):
    """The meaning of an event's name.

    Attributes:
        name: As in the file.
        kind: "negotiate"; the operation ("allreduce", "broadcast", ...), which lasts from the end
            of its negotiation; or, within an operation, "queue", "wait" (for a tensor's data),
            "memcpy", "setup" (of buffers and communicators), "transfer" (by a library) or "other".
        operation: The operation that is negotiated or performed; else None.
        library: The communication library that performs it; else None.
    """

    name: str
    kind: str
    operation: str | None = None
    library: str | None = None


@cache
def classify(name: str) -> Activity:
    """Returns the meaning of an event's name; an unknown name is of kind "other"."""
    if name in OPERATIONS:
        return Activity(name, OPERATIONS[name], OPERATIONS[name])
    first, _, rest = name.partition("_")
    if first == "NEGOTIATE":
        return Activity(name, NEGOTIATE, OPERATIONS.get(rest, rest.lower()))
    operation = LIBRARY_OPERATIONS.get(name.rpartition("_")[2])
    if first in LIBRARIES and operation:
        return Activity(name, TRANSFER, operation, first)
    return Activity(name, KINDS_BY_WORD.get(first, "other"))


class EventReader:
    """Reads a timeline, plain or gzipped, as a stream in constant memory.

    A truncated file is read to its last complete event. Every event is guaranteed to have "ph"; a
    "name" that is text, except in "E"; an integer "ts", except in metadata ("M"); an integer "pid",
    except in "i", a mark that belongs to no tensor; and "args", if present, is an object.

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

    def __iter__(self) -> Iterator[Event]:
        """Yields the events in the order of the file."""
        decode = json.JSONDecoder(parse_constant=_refuse).raw_decode
        text, position, opened = "", 0, False
        for chunk in self._chunks():
            text = text[position:] + chunk
            position = 0
            while found := _SOMETHING.search(text, position):
                position = found.start()
                if not opened and found[0] == "[":
                    opened = True
                    position += 1
                elif opened and self.cut and found[0] == "]":
                    self.cut = False
                    position += 1
                elif not opened or not self.cut:
                    self._fail(text[position:])
                else:
                    try:
                        event, position = decode(text, position)
                    except ValueError:  # the end of the event is in the next chunk
                        break
                    except RecursionError:
                        self._fail(text[position:])
                    if not _is_event(event):
                        self._fail(str(event))
                    self.num_events += 1
                    yield event
            else:
                position = len(text)
            if len(text) - position > MAX_EVENT_CHARS:
                self._fail(text[position:])
        if position < len(text) and not _is_partial(text[position:]):
            self._fail(text[position:])

    def _chunks(self) -> Iterator[str]:
        """Yields the file's text, with invalid or truncated UTF-8 replaced."""
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        try:
            with open_regular_file(self.path) as file:
                zipped = file.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC)
                # Unlike read(), read1() returns what precedes the truncation of a gzip file.
                read = gzip.GzipFile(fileobj=file).read1 if zipped else file.read1
                with suppress(EOFError):
                    while piece := read(CHUNK_BYTES):
                        yield decode(piece)
        except (OSError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise DataError(f"cannot be read: {reason}", self.path) from error

    def _fail(self, text: str) -> NoReturn:
        raise DataError(
            "not a Horovod timeline, which is a JSON array of trace events:"
            f" unexpected text after {self.num_events:,} events: {text[:60]!r}",
            self.path,
        )


def origin_epoch_us(event: Event) -> int | None:
    """Returns the time of day at the clock's 0, in µs since 1970, if an event states it."""
    value = event.get("args", {}).get(ORIGIN_KEY)
    return value if isinstance(value, int) and abs(value) <= MAX_US else None


def _is_event(value: Any) -> bool:
    try:
        phase = value["ph"]
        if phase == "M" and value["name"] == "process_name" and "name" in value.get("args", {}):
            return type(value["args"]["name"]) is str and type(value["pid"]) is int
        return (
            (phase == "M" or (type(value["ts"]) is int and abs(value["ts"]) <= MAX_US))
            and (phase == "i" or type(value["pid"]) is int)
            and (phase == "E" or type(value["name"]) is str)
            and type(value.get("args", {})) is dict
        )
    except (KeyError, TypeError):
        return False


def _is_partial(text: str) -> bool:
    """Returns whether a text that is not a JSON object could be the beginning of one."""
    depth = 0
    for bracket in _BRACKET.findall(_STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth <= 0:
            return False
    return text.startswith("{")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
