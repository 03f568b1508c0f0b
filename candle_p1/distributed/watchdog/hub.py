"""A hub: a process that watches the ranks of a group, and speaks for them to the watchdog server.

The server of a large job would need more open files than a process may have, and would hear
thousands of beats every second. So the first rank of each group but the first starts a hub on its
node, in a session of its own, like the server. The ranks of the group connect to it as they would
to the server. It passes on what they report, and once a second, in one message, how far each has
come that it has heard; and it passes the server's order to end to all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import time
from math import isfinite
from typing import TYPE_CHECKING

from candle_p1.distributed.watchdog.connections import GONE, Connections, Peer, max_strangers
from candle_p1.distributed.watchdog.listening import connect, listen
from candle_p1.distributed.watchdog.protocol import (
    BEAT_S,
    END_OF_MESSAGE,
    SAVE_SIGNALS,
    SIGNALS,
    TOKEN_VARIABLE,
)
from candle_p1.distributed.watchdog.settings import SILENT_S

if TYPE_CHECKING:
    from candle_p1.distributed.watchdog.connections import Message

CONNECT_LIMIT_S = 120.0
"""How long the hub waits for the ranks of its group to connect."""
FAREWELL_S = 10.0
"""How long it waits for the ranks that were told to end."""


class Hub:
    """Stands between the ranks of a group and the watchdog server.

    Args:
        server: The connection to the server, on which the hub has said hello.
        listener: A listening socket.
        token: The secret with which a connection must begin.
        num_ranks: The number of ranks to expect.
        silent_s: How long a connection may be without an answer, in s.
        strangers: How many connections without a hello to keep.
    """

    def __init__(
        self,
        server: socket.socket,
        listener: socket.socket,
        token: str,
        num_ranks: int,
        silent_s: float,
        strangers: int,
    ) -> None:
        self._server, self._num_ranks = server, num_ranks
        self._connections = Connections(listener, token, self._take, silent_s, strangers)
        self._connections.listen_to(server, self._hear)
        self._number_of: dict[Peer, int] = {}
        self._stamps: dict[
            int, list[int]
        ] = {}  # of the ranks that were heard since the last report
        self._num_closed = 0
        self._from_server = b""
        self._error: OSError | None = None  # of the connection to the server, the first one
        self._order: Message | None = None
        self._ordered_s = float("inf")
        self._is_alone = False

    def relay(self) -> None:
        """Returns when all ranks of the group have gone."""
        start = reported_s = time.monotonic()
        while self._num_closed < self._num_ranks and not self._is_alone:
            self._connections.receive()
            if self._order:
                self._connections.tell(self._order)
            now = time.monotonic()
            if now - reported_s >= BEAT_S:
                reported_s = now
                self._send({"stamps": self._stamps})
                self._stamps = {}
            if len(self._number_of) < self._num_ranks and now - start > CONNECT_LIMIT_S:
                return
            if now - self._ordered_s > FAREWELL_S:
                return

    def _take(self, peer: Peer, message: Message) -> None:
        """Passes on what a rank has sent."""
        if "hello" in message and peer not in self._number_of:
            self._number_of[peer] = int(message["hello"]["rank"])
        number = self._number_of[peer]
        if "stamp" in message:
            self._stamps[number] = list(message["stamp"])
            return
        self._num_closed += "closed" in message
        self._send({"of": number} | message)

    def _send(self, message: Message) -> None:
        text = json.dumps(message, separators=(",", ":"))
        try:
            self._server.sendall(text.encode() + END_OF_MESSAGE)
        except OSError as error:  # the kernel tells it once, so `_hear` only learns it from here
            self._error = self._error or error

    def _hear(self) -> bool:
        """Reads what the server sends; returns whether it is still there."""
        data = b""
        try:
            data = self._server.recv(65536)
        except OSError as error:
            self._error = self._error or error
        error_number = self._error.errno if self._error else None
        if not data and error_number not in (None, *GONE):
            # The ranks end, like those that have lost the server themselves.
            self._obey(
                {
                    "end": f"{socket.gethostname()} cannot reach the watchdog any more"
                    f" ({os.strerror(error_number or 0)}): the node of rank 0 is lost, or this one"
                    " is cut off from the network",
                    "status": "failed",
                    "speak": True,
                    "lost": True,
                }
            )
            return False
        if not data:  # it was killed; nobody watches any more, and the run goes on
            self._is_alone = self._order is None
            return False
        *lines, self._from_server = (self._from_server + data).split(b"\n")
        for line in filter(None, lines):
            self._obey(json.loads(line))
        return True

    def _obey(self, order: Message) -> None:
        self._order, self._ordered_s = self._order or order, time.monotonic()


def main() -> None:
    """Runs a hub: connects to the server, prints where it listens, then relays."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bind", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--server", required=True, nargs="+", help="the server's addresses")
    parser.add_argument("--server-port", type=int, required=True)
    parser.add_argument("--first-rank", type=int, required=True)
    parser.add_argument("--num-ranks", type=int, required=True)
    parser.add_argument("--silent-s", type=float, default=SILENT_S)
    arguments = parser.parse_args()
    for number in (*SIGNALS, *SAVE_SIGNALS):
        signal.signal(number, signal.SIG_IGN)
    token, silent_s = os.environ[TOKEN_VARIABLE], arguments.silent_s
    hello = {"hub": arguments.first_rank, "host": socket.gethostname(), "pid": os.getpid()}
    strangers = max_strangers(arguments.num_ranks + 1)
    try:
        server = connect(arguments.server, arguments.server_port, token, hello, silent_s)
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        sys.exit(1)
    server.settimeout(silent_s if isfinite(silent_s) else None)
    with listen(arguments.bind, arguments.port, arguments.num_ranks) as listener:
        Hub(server, listener, token, arguments.num_ranks, silent_s, strangers).relay()


if __name__ == "__main__":
    main()
