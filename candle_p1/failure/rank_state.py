"""What the watchdog server knows about a rank."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from candle_p1.failure.progress import ProgressCounters
from candle_p1.failure.protocol import AWAKE_S, SAVE_SIGNALS

if TYPE_CHECKING:
    from candle_p1.failure.connections import Peer
    from candle_p1.failure.protocol import Message

REPEAT_S = 2.0
"""For this long, the same signal counts once: launchers and job scripts both send it on."""


@dataclass(frozen=True)
class ProcessFault:
    """What has happened to the launcher, to a rank, or to all ranks."""

    what: str  # "died", "was stopped …" or the like
    launcher: int = 0  # the process id, if it has happened to that
    is_common: bool = False  # no rank is to blame


@dataclass(eq=False)
class RankState:
    """A rank that has said hello, and what it has reported; moments are by time.monotonic."""

    rank: int
    host: str
    pid: int
    peer: Peer | None = None  # None: it died before it had a connection
    heard_s: float = 0.0  # when it was last heard
    silent_s: float = 0.0  # how long it was not heard while others were
    idle_s: float = 0.0  # how long it has not advanced while all ranks were heard
    phase: str | None = None  # that it has entered last
    progress: ProgressCounters = ProgressCounters()  # noqa: RUF009, it is a tuple
    can_save: bool = False  # it saves and ends by itself after SIGUSR1 and SIGUSR2
    signal: int | None = None  # that ends it
    save_signal: int | None = None  # after which it saves
    save_signalled_s: float = 0.0
    error: dict[str, Any] | None = None  # message, traceback, lost_peer, stalled
    fault: ProcessFault | None = None  # of the launcher, or what was found out about this rank
    record: Path | None = None
    ends_itself: bool = False  # it has said so with its last word
    closed: str | None = None  # why its connection has ended: "gone" or "unreachable"
    closed_s: float = inf
    said_bye: bool = False  # its run is over

    @classmethod
    def from_hello(cls, hello: Message, peer: Peer) -> RankState:
        """Returns the rank that has said hello.

        Raises:
            KeyError, TypeError, ValueError: This is no hello.
        """
        if not isinstance(hello["host"], str):
            raise TypeError
        rank, pid = int(hello["rank"]), int(hello["pid"])
        return cls(rank, hello["host"], pid, peer, heard_s=time.monotonic())

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    @property
    def is_lost(self) -> bool:
        """Whether its connection was closed without a goodbye."""
        return self.closed is not None and not self.said_bye

    @property
    def has_own_error(self) -> bool:
        """Whether it has reported an error that is not the consequence of another rank's end."""
        error = self.error
        return error is not None and not (error.get("lost_peer") or error.get("stalled"))

    @property
    def is_unreachable(self) -> bool:
        """Whether its node does not answer."""
        if self.closed:  # one that was stopped, asked and then killed has died
            return self.closed == "unreachable"
        return self.peer is not None and self.peer.answers is False

    @property
    def is_awake(self) -> bool:
        """Whether it is known to run, or need not be."""
        return self.said_bye or time.monotonic() - self.heard_s < AWAKE_S

    def take(self, message: Message | list[int]) -> None:
        """Takes note of a message.

        Raises:
            TypeError, ValueError, AttributeError: No rank sends it.
        """
        if isinstance(message, dict) and "closed" in message:
            self.close(message["closed"], message.get("before_s", 0.0))
            return
        self.heard_s = time.monotonic()
        if isinstance(message, list):
            self._advance(ProgressCounters(*map(int, message)))
            return
        if message.get("phase", self.phase) != self.phase:
            self.phase, self.idle_s = message["phase"], 0.0
        self.can_save = message.get("can_save", self.can_save)
        self.error = message.get("error", self.error)
        self.ends_itself = self.ends_itself or "last_word" in message
        self.said_bye = self.said_bye or "bye" in message
        if "signal" in message:
            self._take_signal(int(message["signal"]))
        if "launcher_fault" in message:
            fault = message["launcher_fault"]
            self.fault = ProcessFault(str(fault["what"]), launcher=int(fault["pid"]))
        if "record" in message:
            self.record = Path(message["record"])

    def close(self, why: str, before_s: float = 0.0) -> None:
        """Takes note that its connection has ended, so many seconds ago."""
        if self.closed is None:
            self.closed, self.closed_s = why, time.monotonic() - before_s

    def _advance(self, progress: ProgressCounters) -> None:
        if progress != self.progress:
            self.progress, self.idle_s = progress, 0.0

    def _take_signal(self, number: int) -> None:
        """Takes note of a signal; one that asks to save interrupts a rank that is not able to."""
        if self.signal is not None:
            return
        now = time.monotonic()
        if number not in SAVE_SIGNALS:
            self.signal = number
        elif self.save_signal is None and self.can_save:
            self.save_signal, self.save_signalled_s = number, now
        elif self.save_signal is None or now - self.save_signalled_s > REPEAT_S:
            self.signal = number
