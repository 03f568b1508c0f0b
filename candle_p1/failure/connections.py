"""The connections of the watchdog server: who may connect, and what they send."""

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
from typing import TYPE_CHECKING, Any

from candle_p1.failure.protocol import (
    AWAKE_S,
    PROBE,
    WELCOME,
    Inbox,
    ProtocolError,
    expect_answers,
)

if TYPE_CHECKING:
    from collections.abc import Callable

TOKEN_S = 5.0
"""How long a new connection may take to send the token and the hello."""
MAX_STRANGERS = 1024
"""How many connections may be without a token; a further one replaces the oldest."""
MIN_STRANGERS = 16
MAX_ACCEPTED = 64
"""How many connections are accepted before the others are listened to."""
SPARE_FILES = 32
GONE = (errno.ECONNRESET, errno.EPIPE, errno.EBADF)
"""The errors of a connection whose other end has ended; others mean that it cannot be reached."""
TIOCOUTQ = 0x5411
"""Asks how many bytes the other end has not acknowledged (linux/sockios.h, SIOCOUTQ)."""
LAST_ACK_RECV = 56
"""The offset of tcpi_last_ack_recv, in ms, in Linux's struct tcp_info."""
TCP_INFO_BYTES = LAST_ACK_RECV + 4


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
        return num_unacknowledged(self.connection) == 0


def heard_before_s(connection: socket.socket) -> float:
    """Returns how long ago the other end's last segment arrived, in s; 0 if that is not known.

    The kernel counts in milliseconds, or ticks of its clock.
    """
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    except OSError:  # a socket of this process
        return 0.0
    return int.from_bytes(info[LAST_ACK_RECV : LAST_ACK_RECV + 4], sys.byteorder) / 1000


def num_unacknowledged(connection: socket.socket) -> int:
    """Returns how many bytes of what was sent the other end has not acknowledged."""
    number = array("i", [0])
    fcntl.ioctl(connection, TIOCOUTQ, number)
    return number[0]


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
        for _ in range(MAX_ACCEPTED):
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
