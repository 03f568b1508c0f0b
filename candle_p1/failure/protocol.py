"""What ranks and the watchdog server send each other.

A connection begins with a line that holds the token. Nothing is parsed before it, and whoever does
not send it soon is disconnected. Then a rank sends lines of JSON:

- {"hello": {"rank", "host", "pid", …}}, first of all
- [steps, collectives, waiting] every second (candle_p1.failure.progress)
- {"record"}, its path; {"phase"}; {"can_save"}; {"error"}; {"bye"}
- {"signal"}, its number; {"launcher_fault"}, what has happened to the launcher; {"last_word"}, if
  the process ends by itself; these come from native/agent.h, as the numbers do

The server answers with a welcome, and with an order at most: "CODE SPEAK REASON", where SPEAK is 1
for the rank that is to print the reason. An order ends with NUL; an empty one asks the kernel of a
silent rank whether its node still answers.
"""

from __future__ import annotations

import errno
import json
import os
import re
import selectors
import signal
import socket
import time
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TOKEN_VARIABLE = "CANDLE_P1_WATCHDOG_TOKEN"
"""Passed in an environment variable because every user of the machine can read arguments."""
WELCOME = b"welcome\n"
PROBE = b"\0"
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
SAVE_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
AWAKE_S = 3.0
"""A rank that was heard within this time is running."""

CONNECT_S = 10.0
"""How long connecting may take, to all addresses."""
LIMIT_S = 28.0
"""How long all of it may take, until who has accepted a connection answers, on a busy machine."""

Message = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """How long what may last, in s; may be infinite.

    Attributes:
        stopped_s: How long a process may be stopped (SIGSTOP) while others run.
        silent_s: How long a rank may be silent while others are not, and a node may not answer.
        hung_s: How long the other ranks may wait for one in training.
        save_s: How long a run may take to save and end after SIGUSR1 or SIGUSR2.
    """

    stopped_s: float = 10.0
    silent_s: float = 20.0
    hung_s: float = 300.0
    save_s: float = 45.0


@dataclass(frozen=True)
class Endpoint:
    """Where a rank connects."""

    addresses: list[str] = field(default_factory=list)
    port: int = 0
    token: str = ""  # the secret with which a connection begins
    host: str = ""  # of the server, as is the process
    pid: int = 0
    silent_s: float = Limits.silent_s  # how long the connection may be without an answer

    def __str__(self) -> str:
        return f"the watchdog (host {self.host}, pid {self.pid})"


def encode(**message: Any) -> bytes:
    """Returns a message as it is sent."""
    return json.dumps(message).encode() + b"\n"


def encode_order(code: int, reason: str, *, speak: bool) -> bytes:
    """Returns the order to end with an exit code, so short that a socket takes it as a whole."""
    text = f"{code} {int(speak)} {reason[:4000]}"
    return text.encode(errors="replace").replace(b"\0", b"") + b"\0"


class ProtocolError(Exception):
    """Something has arrived that no rank sends."""


class Inbox:
    """Takes apart what arrives on a connection after the token."""

    def __init__(self) -> None:
        self._text = b""

    def take(self, data: bytes) -> list[Any]:
        """Returns the messages that are complete; ProtocolError if one is too long, or no JSON."""
        *lines, self._text = (self._text + data).split(b"\n")
        if len(self._text) > 2**20:
            raise ProtocolError("a message is too long")
        try:
            return [json.loads(line) for line in lines if line]
        except (ValueError, RecursionError) as error:
            raise ProtocolError("this is not JSON") from error


def expect_answers(connection: socket.socket, limit_s: float) -> None:
    """Makes the kernel end a TCP connection whose other end has not answered for so long."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not isfinite(limit_s):
        return
    pause = min(max(1, int(limit_s / 4)), 60)
    limit_ms = min(max(1, int(limit_s * 1000)), 2**31 - 1)  # 0 is the kernel's default
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)


def connect(endpoint: Endpoint, hello: Message) -> socket.socket:
    """Connects to the first address that answers, and says hello.

    All addresses are tried at the same time, because one behind a firewall does not answer at all.
    Names are tried if none of the numbers can be reached: they may take long to look up.

    Raises:
        OSError: None answers; the message says for each address why.
    """
    limit = time.monotonic() + LIMIT_S
    errors: dict[str, str] = {}
    numbers = [each for each in endpoint.addresses if re.fullmatch(r"\d+(\.\d+){3}", each)]
    names = [address for address in endpoint.addresses if address not in numbers]
    is_reached = True
    while is_reached and time.monotonic() < limit:
        is_reached = False
        for group in (numbers, names):
            for address, connection in _reach(group, endpoint.port, errors):
                is_reached = True
                try:
                    greet(connection, endpoint.token, hello, max(0.1, limit - time.monotonic()))
                    expect_answers(connection, endpoint.silent_s)
                    return connection
                except OSError as error:
                    connection.close()  # the server may have had too many connections: try again
                    errors[address] = _words(error)
            if is_reached:
                break
        time.sleep(0.1)
    raise OSError("; ".join(f"{each}:{endpoint.port}: {why}" for each, why in errors.items()))


def greet(connection: socket.socket, token: str, hello: Message, limit_s: float = LIMIT_S) -> None:
    """Says hello, and waits for the welcome; raises OSError if there is none."""
    connection.settimeout(limit_s)
    connection.sendall(f"{token}\n".encode() + encode(hello=hello))
    if connection.recv(len(WELCOME), socket.MSG_WAITALL) != WELCOME:
        raise ConnectionResetError(errno.ECONNRESET, "the connection was closed")


def _reach(
    addresses: Sequence[str], port: int, errors: dict[str, str]
) -> Iterator[tuple[str, socket.socket]]:
    """Yields a connection to each address as soon as there is one; adds others' errors."""
    deadline = time.monotonic() + CONNECT_S
    with selectors.DefaultSelector() as selector:
        try:
            for address in addresses:
                connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                connection.setblocking(False)
                try:
                    failed = connection.connect_ex((address, port))
                except OSError as error:  # a name that is not known
                    connection.close()
                    errors[address] = _words(error)
                    continue
                if failed in (0, errno.EINPROGRESS):
                    selector.register(connection, selectors.EVENT_WRITE, address)
                else:
                    connection.close()
                    errors[address] = _words(OSError(failed, ""))
            while selector.get_map():
                remaining = deadline - time.monotonic()
                for key, _ in selector.select(max(0.0, remaining)):
                    connection = key.fileobj  # type: ignore[assignment]
                    selector.unregister(connection)
                    if failed := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                        connection.close()
                        errors[key.data] = _words(OSError(failed, ""))
                    else:
                        yield key.data, connection
                if remaining <= 0:
                    break
        finally:
            for key in list(selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
                errors[key.data] = f"no answer within {CONNECT_S:g} s"


def _words(error: OSError) -> str:
    return error.strerror or (os.strerror(error.errno) if error.errno else str(error))
