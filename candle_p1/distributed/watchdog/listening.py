"""Listening for ranks, and connecting to who listens."""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import selectors
import socket
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from candle_p1.distributed.watchdog.connections import MAX_STRANGERS
from candle_p1.distributed.watchdog.protocol import END_OF_MESSAGE, WELCOME, expect_answers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CONNECT_S = 10.0
"""How long connecting may take, to all addresses."""
ANSWER_S = 10.0
"""How long who has accepted a connection may take to answer a hello."""
LIMIT_S = 20.0
"""How long both may take, with attempts that are repeated."""
RETRY_S = 0.1


@contextmanager
def listen(address: str, port: int, num_peers: int) -> Iterator[socket.socket]:
    """Listens, and prints the port, or why that is impossible, for who started this process."""
    try:
        listener = socket.create_server((address, port), backlog=num_peers + MAX_STRANGERS)
    except OSError as error:
        print(json.dumps({"error": f"port {port} at {address}: {os.strerror(error.errno or 0)}"}))
        sys.exit(1)
    with listener:
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
        sys.stdout.close()
        yield listener


def connect(
    addresses: Sequence[str], port: int, token: str, hello: dict[str, Any], silent_s: float
) -> socket.socket:
    """Connects to the first address that answers, and says hello.

    All addresses are tried at the same time, because one behind a firewall does not answer at all.
    Names are tried if none of the numbers can be reached: they may take long to look up.

    Raises:
        OSError: None answers; the message says for each address why.
    """
    limit = time.monotonic() + LIMIT_S
    errors: dict[str, str] = {}
    numbers = [address for address in addresses if _is_number(address)]
    names = [address for address in addresses if address not in numbers]
    is_reached = True
    while is_reached and time.monotonic() < limit:
        is_reached = False
        for group in (numbers, names):
            for address, connection in _reach(group, port, errors):
                is_reached = True
                try:
                    _greet(connection, token, hello)
                    expect_answers(connection, silent_s)
                    return connection
                except OSError as error:
                    connection.close()  # the server may have had too many connections: try again
                    errors[address] = _words(error)
            if is_reached:
                break
        time.sleep(RETRY_S)
    raise OSError("; ".join(f"{address}:{port}: {why}" for address, why in errors.items()))


def _is_number(address: str) -> bool:
    try:
        ipaddress.IPv4Address(address)
    except ValueError:
        return False
    return True


def _greet(connection: socket.socket, token: str, hello: dict[str, Any]) -> None:
    """Says hello, and waits for the welcome.

    Raises:
        OSError: There is none.
    """
    connection.settimeout(ANSWER_S)
    connection.sendall(f"{token}\n{json.dumps({'hello': hello})}".encode() + END_OF_MESSAGE)
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
                    errors[address] = os.strerror(failed)
            while selector.get_map():
                remaining = deadline - time.monotonic()
                for key, _ in selector.select(max(0.0, remaining)):
                    connection = key.fileobj  # type: ignore[assignment]
                    selector.unregister(connection)
                    if failed := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                        connection.close()
                        errors[key.data] = os.strerror(failed)
                    else:
                        yield key.data, connection
                if remaining <= 0:
                    break
        finally:
            for key in list(selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
                errors[key.data] = f"no answer within {CONNECT_S:g} s"


def _words(error: OSError) -> str:
    return error.strerror or str(error)
