"""What ranks, hubs and the watchdog server send each other.

A connection begins with a line that holds the token. Nothing is parsed before it, and whoever does
not send it soon is disconnected. Then there are three streams in one, each with bytes of its own,
because they come from parts of a rank that do not wait for each other:

- messages in JSON, each with a NUL at its end: hello (rank, host, pid), record (its path), phase,
  steps begun, can_save, trouble (with another process), signal, error, bye
- signals: a byte for each, its number, never that of NUL, which Python's C-level handler writes
- beats: bytes from 0x80 on, which are not in JSON as it is written here (heartbeat/heartbeat.h)
- a last word: the byte 0x7F, from a rank that ends by itself (heartbeat/last_word.h)

The answers are lines: welcome; an order in JSON: end (the reason), status, speak (whether this rank
should print the reason), and from a hub lost, if it cannot reach the server. An empty line asks a
silent rank's kernel whether it still answers.

A hub (candle_p1.distributed.watchdog.hub) speaks for the ranks of its group. Its hello holds hub
(the first of them), host and pid; its messages are those of the ranks, with the rank as of, and
once a second the stamps of the ranks that it has heard.
"""

from __future__ import annotations

import signal
import socket
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

TOKEN_VARIABLE = "CANDLE_P1_WATCHDOG_TOKEN"
"""Passed in an environment variable because every user of the machine can read arguments."""
WELCOME = b"welcome\n"
"""The answer to a hello."""
PROBE = b"\n"
END_OF_MESSAGE = b"\0"
MAX_MESSAGE_BYTES = 2**20
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
SAVE_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
CONTROLS = bytes(range(1, 32))
"""None of these is in JSON as it is written here, so they are signals."""
BEATS = bytes(range(0x80, 0x100))
LAST_WORD = b"\x7f"
END_OF_NUMBER, END_OF_BEAT = b"\xc0", b"\xff"
BEAT_S = 1.0
"""How often a rank gives a sign of life, and a hub reports those of its ranks."""
AWAKE_S = 3.0
"""A rank that was heard within this time is running."""


class Stamp(NamedTuple):
    """How far a rank has come; see candle_p1.distributed.progress.

    Attributes:
        steps: The training steps that it has begun.
        collectives: The collectives of all ranks that it has begun.
        waiting: 1 within one of these, 2 while it waits for some ranks only, 3 while it waits for
            its disk, 0 elsewhere.
    """

    steps: int = 0
    collectives: int = 0
    waiting: int = 0


class ProtocolError(Exception):
    """Something has arrived that no rank sends."""


@dataclass
class Arrived:
    """What has arrived on a connection.

    Attributes:
        signals: The signals among it, each once.
        stamp: That of the last beat; None if there is no complete one.
        messages: The complete messages, in JSON.
        has_last_word: Whether the rank has said that it ends by itself.
    """

    signals: list[int]
    stamp: Stamp | None
    messages: list[bytes]
    has_last_word: bool


class Inbox:
    """Takes apart what arrives on a connection after the token."""

    def __init__(self) -> None:
        self._text = b""
        self._beat = b""

    def take(self, data: bytes) -> Arrived:
        """Takes the next bytes, which may begin and end anywhere.

        Raises:
            ProtocolError: A message or a beat is longer than any.
        """
        signals = [each for each in (*SIGNALS, *SAVE_SIGNALS) if bytes([each]) in data]
        text = data.translate(None, delete=CONTROLS + LAST_WORD + BEATS)
        beats = self._beat + data.translate(None, delete=bytes(range(0x80)))
        *messages, self._text = (self._text + text).split(END_OF_MESSAGE)
        *complete, self._beat = beats.split(END_OF_BEAT)
        if len(self._text) > MAX_MESSAGE_BYTES or len(self._beat) > MAX_MESSAGE_BYTES:
            raise ProtocolError("a message is too long")
        stamp = decode_beat(complete[-1]) if complete else None
        return Arrived([int(each) for each in signals], stamp, messages, LAST_WORD in data)


def decode_beat(beat: bytes) -> Stamp:
    """Returns the stamp in a beat, without its end.

    Raises:
        ProtocolError: It is none.
    """
    numbers = []
    for digits in beat.split(END_OF_NUMBER)[:-1]:
        if len(digits) > 11 or any(digit >= END_OF_NUMBER[0] for digit in digits):
            raise ProtocolError("a beat has no number")
        numbers.append(sum((digit & 0x3F) << 6 * place for place, digit in enumerate(digits)))
    if len(numbers) != len(Stamp._fields):
        raise ProtocolError("a beat is incomplete")
    return Stamp(*numbers)


def expect_answers(connection: socket.socket, limit_s: float) -> None:
    """Makes the kernel end a connection whose other end has not answered for so long.

    Args:
        connection: A TCP connection.
        limit_s: The time in s; infinite: as long as the kernel likes.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not isfinite(limit_s):
        return
    pause = min(max(1, int(limit_s / 4)), 60)
    limit_ms = min(max(1, int(limit_s * 1000)), 2**31 - 1)  # 0 is the kernel's default
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
