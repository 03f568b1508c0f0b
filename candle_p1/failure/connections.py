"""The ranks as the watchdog server knows them: their connections, and what they have reported."""

from __future__ import annotations

import errno
import fcntl
import hmac
import resource
import selectors
import socket
import sys
import time
from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from candle_p1.failure.progress import ProgressCounters
from candle_p1.failure.protocol import (
    AWAKE_S,
    PROBE,
    SAVE_SIGNALS,
    WELCOME,
    Inbox,
    ProtocolError,
    expect_answers,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from candle_p1.failure.protocol import Message

TOKEN_S = 5.0
"""How long a new connection may take to send the token and the hello."""
MAX_STRANGERS = 1024
"""How many connections may be without a token; a further one replaces the oldest."""
MIN_STRANGERS = 16
SPARE_FILES = 32
GONE = (errno.ECONNRESET, errno.EPIPE, errno.EBADF)
"""The errors of a connection whose other end has ended; others mean that it cannot be reached."""
SIOCOUTQ = 0x5411
"""Asks how many bytes the other end has not acknowledged (linux/sockios.h)."""
LAST_ACK_RECV = slice(56, 60)
"""Where tcpi_last_ack_recv, in ms, is in Linux's struct tcp_info."""


@dataclass(eq=False)
class Peer:
    """A connection to a rank; moments are by time.monotonic."""

    connection: socket.socket
    since_s: float
    is_known: bool = False  # it has said hello; it is a stranger until then
    closed: bool = False
    is_told: bool = False  # to end
    probed_s: float | None = None  # when something was sent to it, since it was heard
    _has_token: bool = False
    _begin: bytes = b""
    _inbox: Inbox = field(default_factory=Inbox)

    def receive(self, token: bytes) -> list[Any]:
        """Returns the messages that have arrived.

        Raises:
            ProtocolError: This is no rank.
            EOFError: The other end has closed the connection.
            OSError: The connection has failed.
        """
        data = self.connection.recv(65536)
        if not data:
            raise EOFError
        if not self._has_token:
            line, newline, data = (self._begin + data).partition(b"\n")
            if not newline and len(line) <= len(token):
                self._begin = line
                return []
            if not newline or not hmac.compare_digest(line, token):
                raise ProtocolError("the token is wrong")
            self._has_token = True
        messages = self._inbox.take(data)
        self.probed_s = None
        return messages

    def send(self, data: bytes) -> bool:
        """Sends something without waiting; returns whether it is sent, or nobody is there."""
        self.probed_s = self.probed_s or time.monotonic()
        try:
            return self.connection.send(data, socket.MSG_DONTWAIT) == len(data)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def probe(self) -> None:
        """Asks a silent peer's kernel whether it answers."""
        if self.probed_s is None and not self.closed:
            self.send(PROBE)

    @property
    def answers(self) -> bool | None:
        """Whether the kernel of a silent peer has answered the probe; None: not yet asked."""
        if self.probed_s is None or time.monotonic() - self.probed_s < AWAKE_S:
            return None
        if self.closed:
            return False
        num_unacknowledged = array("i", [0])
        fcntl.ioctl(self.connection, SIOCOUTQ, num_unacknowledged)
        return num_unacknowledged[0] == 0


def heard_before_s(connection: socket.socket) -> float:
    """Returns how long ago the other end's last segment arrived, in s; 0 if that is not known.

    The kernel counts in milliseconds, or ticks of its clock.
    """
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LAST_ACK_RECV.stop)
    except OSError:  # a socket of this process
        return 0.0
    return int.from_bytes(info[LAST_ACK_RECV], sys.byteorder) / 1000


class Connections:
    """Listens to ranks.

    Args:
        token: The secret with which a connection must begin.
        take: Called with a peer and each of its messages. The first one is its hello, the last one
            {"closed": …, "before_s": …}: "gone" if it has ended, "unreachable" if it does not
            answer, and how long ago its last segment arrived. It raises ValueError, KeyError,
            TypeError or AttributeError if no rank sends such a message.
        silent_s: How long the other end of a connection may not answer, in s.
        listener: A listening socket; None: there are only connections that are added.
        max_strangers: How many connections without a hello to keep.

    Attributes:
        peers: Those that have said hello.
    """

    def __init__(
        self,
        token: str,
        take: Callable[[Peer, Any], None],
        silent_s: float,
        listener: socket.socket | None = None,
        max_strangers: int = MAX_STRANGERS,
    ) -> None:
        self._listener, self._token, self._take = listener, token.encode(), take
        self._silent_s, self._max_strangers = silent_s, max_strangers
        self._strangers: list[Peer] = []  # without a hello, the oldest first
        self.peers: list[Peer] = []
        self._has_speaker = False
        self._selector = selectors.DefaultSelector()
        if listener is not None:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

    def receive(self, timeout_s: float = 0.1) -> None:
        """Waits a moment for new connections and messages, and passes the messages on."""
        for key, _ in self._selector.select(timeout=timeout_s):
            if key.fileobj is self._listener:
                self._accept(self._listener)
            elif not key.data.closed:
                self._receive_from(key.data)
        late = time.monotonic() - TOKEN_S
        for stranger in [each for each in self._strangers if each.since_s < late]:
            self._close(stranger)

    def add(self, connection: socket.socket) -> None:
        """Adds a connection, from which a token and a hello are expected."""
        stranger = Peer(connection, since_s=time.monotonic())
        self._strangers.append(stranger)
        self._selector.register(connection, selectors.EVENT_READ, stranger)
        if len(self._strangers) > self._max_strangers:
            self._close(self._strangers[0])

    def close(self) -> None:
        """Closes all connections."""
        for peer in [*self._strangers, *self.peers]:
            self._close(peer)
        self._selector.close()

    def tell(self, order: Callable[[bool], bytes]) -> None:
        """Sends an order to all that have not been told; the first that is not silent speaks."""
        for each in self.peers:
            if not each.is_told and not each.closed:
                speaks = each.probed_s is None and not self._has_speaker
                each.is_told = each.send(order(speaks))
                self._has_speaker |= speaks and each.is_told

    def _receive_from(self, peer: Peer) -> None:
        why = "gone"
        try:
            messages = peer.receive(self._token)
            if not peer.is_known and messages:
                if "hello" not in messages[0]:
                    raise ProtocolError("there is no hello")
                self._take(peer, messages.pop(0))
                self._admit(peer)
            for message in messages:
                self._take(peer, message)
            return
        except (ProtocolError, EOFError, ValueError, KeyError, TypeError, AttributeError):
            pass  # it has ended, or what it sends is not what ranks send
        except OSError as error:
            why = "gone" if error.errno in GONE else "unreachable"
        before_s = heard_before_s(peer.connection)
        self._close(peer)
        if peer.is_known:
            self._take(peer, {"closed": why, "before_s": before_s})

    def _admit(self, peer: Peer) -> None:
        peer.is_known = True
        self._strangers.remove(peer)
        self.peers.append(peer)
        with suppress(OSError):
            peer.connection.sendall(WELCOME)
        with suppress(OSError):  # a socket of this process needs no such limits
            expect_answers(peer.connection, self._silent_s)

    def _accept(self, listener: socket.socket) -> None:
        """Accepts connections; too many without a token do not keep those of ranks out."""
        for _ in range(64):  # then, the others are listened to
            try:
                connection = listener.accept()[0]
            except BlockingIOError:
                return
            except OSError as error:  # it has gone already, or there are too many open files
                if error.errno in (errno.EMFILE, errno.ENFILE) and self._strangers:
                    self._close(self._strangers[0])
                    continue
                time.sleep(0.01)
                return
            connection.setblocking(True)
            self.add(connection)

    def _close(self, peer: Peer) -> None:
        if peer.closed:
            return
        peer.closed = True
        if peer in self._strangers:
            self._strangers.remove(peer)
        self._selector.unregister(peer.connection)
        peer.connection.close()


def num_files(num_ranks: int) -> int:
    """Returns how many open files a server of so many ranks needs at least."""
    return num_ranks + SPARE_FILES + MIN_STRANGERS


def make_room(num_ranks: int) -> int:
    """Raises this process's limit of open files for so many ranks.

    Returns how many strangers there may be besides.
    """
    wanted = num_ranks + MAX_STRANGERS + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        wanted = soft
    return max(MIN_STRANGERS, min(MAX_STRANGERS, wanted - num_ranks - SPARE_FILES))


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
        """Returns the rank that has said hello, or raises KeyError, TypeError or ValueError."""
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
        """Takes note of a message; TypeError, ValueError or AttributeError if no rank sends it."""
        if isinstance(message, dict) and "closed" in message:
            self.close(message["closed"], message.get("before_s", 0.0))
            return
        self.heard_s = time.monotonic()
        if isinstance(message, list):
            if (counters := ProgressCounters(*map(int, message))) != self.progress:
                self.progress, self.idle_s = counters, 0.0
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

    def _take_signal(self, number: int) -> None:
        """Takes note of a signal; one that asks to save interrupts a rank that is not able to.

        It counts once for two seconds: launchers and job scripts both send it on.
        """
        if self.signal is not None:
            return
        now = time.monotonic()
        if number not in SAVE_SIGNALS:
            self.signal = number
        elif self.save_signal is None and self.can_save:
            self.save_signal, self.save_signalled_s = number, now
        elif self.save_signal is None or now - self.save_signalled_s > 2.0:
            self.signal = number
