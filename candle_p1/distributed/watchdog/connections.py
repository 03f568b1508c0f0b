"""The connections of the watchdog server, and of a hub: who may connect, and what they send."""

from __future__ import annotations

import errno
import fcntl
import hmac
import json
import resource
import selectors
import socket
import sys
import time
from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from candle_p1.distributed.watchdog.protocol import (
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

TOKEN_S = 5.0
"""How long a new connection may take to send the token and the hello."""
MAX_STRANGERS = 1024
"""How many connections may be without a token; a further one replaces the oldest."""
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

Message = dict[str, Any]


@dataclass(eq=False)
class Peer:
    """A connection to a rank or to a hub.

    Attributes:
        connection: The socket.
        heard_s: When it was last heard, by time.monotonic.
        is_known: Whether it has said hello; it is a stranger until then.
        closed: Whether the connection is closed.
        is_told: Whether it was told to end.
        probed_s: When it was asked whether it answers, since it was heard; None: it was not.
    """

    connection: socket.socket
    heard_s: float
    is_known: bool = False
    closed: bool = False
    is_told: bool = False
    probed_s: float | None = None
    _has_token: bool = False
    _begin: bytes = b""
    _inbox: Inbox = field(default_factory=Inbox)

    def receive(self, token: bytes) -> list[Message]:
        """Returns the messages that have arrived, also those that signals and beats stand for.

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
        arrived = self._inbox.take(data)
        messages = [_parse(text) for text in arrived.messages]
        others: list[Message] = [
            {"save_signal" if each in SAVE_SIGNALS else "signal": each} for each in arrived.signals
        ]
        if arrived.stamp:
            others.append({"stamp": arrived.stamp})
        if arrived.has_last_word:
            others.append({"last_word": True})
        if not self.is_known:  # the hello comes first
            return [*messages, *others]
        self.heard_s, self.probed_s = time.monotonic(), None
        return [*others, *messages]

    def send(self, message: Message) -> None:
        """Sends a line, if the other end is still there."""
        with suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def probe(self) -> None:
        """Asks a silent peer's kernel whether it answers."""
        if self.probed_s is None and not self.closed:
            self.probed_s = time.monotonic()
            with suppress(OSError):
                self.connection.send(PROBE, socket.MSG_DONTWAIT)

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
    except OSError:
        return 0.0
    if len(info) < TCP_INFO_BYTES:
        return 0.0
    return int.from_bytes(info[LAST_ACK_RECV : LAST_ACK_RECV + 4], sys.byteorder) / 1000


def num_unacknowledged(connection: socket.socket) -> int:
    """Returns how many bytes of what was sent the other end has not acknowledged."""
    number = array("i", [0])
    try:
        fcntl.ioctl(connection, TIOCOUTQ, number)
    except OSError:
        return 0
    return number[0]


def _parse(text: bytes) -> Message:
    """Returns a message.

    Raises:
        ProtocolError: It is none.
    """
    try:
        # Before it there may be signals that are not control characters: SIGRTMIN and above.
        message = json.loads(text[text.find(b"{") :] if b"{" in text else b"{}")
    except (ValueError, RecursionError) as error:
        raise ProtocolError("this is not JSON") from error
    if not isinstance(message, dict):
        raise ProtocolError("this is not a message")
    return message


class Connections:
    """Listens to ranks and hubs.

    Args:
        listener: A listening socket.
        token: The secret with which a connection must begin.
        take: Called with a peer and each of its messages. The first one is its hello, the last one
            {"closed": …, "before_s": …}: "gone" if it has ended, "unreachable" if it does not
            answer, and how long ago its last segment arrived. It raises
            ValueError, KeyError, TypeError or AttributeError if no rank sends such a message.
        silent_s: How long the other end of a connection may not answer, in s.
        max_strangers: How many connections without a hello to keep.

    Attributes:
        peers: Those that have said hello.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        take: Callable[[Peer, Message], None],
        silent_s: float,
        max_strangers: int = MAX_STRANGERS,
    ) -> None:
        self._listener, self._token, self._take = listener, token.encode(), take
        self._silent_s, self._max_strangers = silent_s, max_strangers
        self._strangers: list[Peer] = []  # without a hello, the oldest first
        self.peers: list[Peer] = []
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def close(self) -> None:
        """Closes all of them."""
        for each in [*self._strangers, *self.peers]:
            each.connection.close()
        self._selector.close()

    def listen_to(self, connection: socket.socket, receive: Callable[[], bool]) -> None:
        """Also calls a function when there is something to read on another connection.

        It returns whether to go on.
        """
        self._selector.register(connection, selectors.EVENT_READ, receive)

    def receive(self, timeout_s: float = 0.1) -> None:
        """Waits a moment for new connections and messages, and passes the messages on."""
        for key, _ in self._selector.select(timeout=timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif callable(key.data):
                if not key.data():
                    self._selector.unregister(key.fileobj)
            elif not key.data.closed:
                self._receive_from(key.data)
        late = time.monotonic() - TOKEN_S
        for stranger in [each for each in self._strangers if each.heard_s < late]:
            self._close(stranger)

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
        peer.is_known, peer.heard_s = True, time.monotonic()
        self._strangers.remove(peer)
        self.peers.append(peer)
        with suppress(OSError):
            expect_answers(peer.connection, self._silent_s)
            peer.connection.sendall(WELCOME)

    def tell(self, order: Message) -> None:
        """Sends an order to all that have not been told; the first one of all is to speak."""
        for each in self.peers:
            if not each.is_told and not each.closed:
                nobody = not any(other.is_told for other in self.peers)
                each.is_told = True
                each.send(order | {"speak": bool(order["speak"]) and nobody})

    def _accept(self) -> None:
        """Accepts connections; too many without a token do not keep those of ranks out."""
        for _ in range(MAX_ACCEPTED):
            try:
                connection = self._listener.accept()[0]
            except BlockingIOError:
                return
            except OSError as error:  # it has gone already, or there are too many open files
                if error.errno in (errno.EMFILE, errno.ENFILE) and self._strangers:
                    self._close(self._strangers[0])
                    continue
                time.sleep(0.01)
                return
            connection.setblocking(True)
            stranger = Peer(connection, heard_s=time.monotonic())
            self._strangers.append(stranger)
            self._selector.register(connection, selectors.EVENT_READ, stranger)
            if len(self._strangers) > self._max_strangers:
                self._close(self._strangers[0])

    def _close(self, peer: Peer) -> None:
        if peer.closed:
            return
        peer.closed = True
        if peer in self._strangers:
            self._strangers.remove(peer)
        self._selector.unregister(peer.connection)
        peer.connection.close()


def raise_file_limit(wanted: int) -> int:
    """Raises this process's limit of open files towards a number; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def max_strangers(num_peers: int) -> int:
    """Makes room for so many peers; returns how many strangers there may be besides."""
    num_files = raise_file_limit(num_peers + MAX_STRANGERS + SPARE_FILES)
    return max(16, min(MAX_STRANGERS, num_files - num_peers - SPARE_FILES))
