"""Sockets in place of ranks, for tests of the watchdog, and its processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import NamedTuple

from candle_p1.failure.protocol import TOKEN_VARIABLE, WELCOME, encode
from tests import records

TOKEN = "token"
RUNNING = records.RUNNING | {"num_ranks": 3}


class Order(NamedTuple):
    """What the server tells a rank: to end with an exit code, and whether to print the reason."""

    code: int
    speak: bool
    reason: str


class FakeRank:
    def __init__(self, port, rank, pid=None, host=None, **hello):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.socket.sendall(f"{TOKEN}\n".encode())
        hello |= {"rank": rank, "host": host or f"node{rank}", "pid": pid or 100 + rank}
        self.say(hello=hello)
        assert self.socket.recv(len(WELCOME), socket.MSG_WAITALL) == WELCOME

    def say(self, **message):
        self.socket.sendall(encode(**message))

    def beat(self, *progress):
        """Says how far it has come: steps, collectives and whether it waits."""
        self.socket.sendall(json.dumps(progress).encode() + b"\n")

    def hear(self):
        """Returns the next order, None if there is none before the end; probes are no orders."""
        data = b""
        while not data.strip(b"\0") or not data.endswith(b"\0"):
            received = self.socket.recv(4096)
            if not received:
                return None
            data += received
        code, speak, reason = data.strip(b"\0").decode().split(" ", 2)
        return Order(int(code), bool(int(speak)), reason)

    def die(self):
        self.socket.close()


def start_server(record, *flags, num_ranks=3, preexec_fn=None, pass_fds=(), **limits):
    """Returns the process of a server, which prints where it listens."""
    command = [sys.executable, "-m", "candle_p1.failure.server", "--bind", "127.0.0.1"]
    command += [*flags, "--num-ranks", str(num_ranks), "--record", str(record)]
    command += ["--limits", json.dumps(limits)]
    environment = os.environ | {TOKEN_VARIABLE: TOKEN}
    return subprocess.Popen(
        [*map(str, command)],
        stdout=subprocess.PIPE,
        env=environment,
        preexec_fn=preexec_fn,
        pass_fds=pass_fds,
    )


def port_of(process):
    """Returns the port on which a process listens."""
    return json.loads(process.stdout.readline())["port"]
