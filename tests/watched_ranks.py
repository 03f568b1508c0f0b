"""Sockets in place of ranks, for tests of the watchdog, and its processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

from candle_p1.distributed.watchdog.protocol import TOKEN_VARIABLE, WELCOME
from tests import records

TOKEN = "token"
RUNNING = records.RUNNING | {"num_ranks": 3}


class FakeRank:
    def __init__(self, port, rank, pid=None, host=None, **hello):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.socket.sendall(f"{TOKEN}\n".encode())
        hello |= {"rank": rank, "host": host or f"node{rank}", "pid": pid or 100 + rank}
        self.say(hello=hello)
        assert self.socket.recv(len(WELCOME), socket.MSG_WAITALL) == WELCOME

    def say(self, **message):
        self.socket.sendall(json.dumps(message).encode() + b"\0")

    def hear(self):
        """Returns the next order, None if there is none before the end; probes are no orders."""
        data = b""
        while not data.strip() or not data.endswith(b"\n"):
            received = self.socket.recv(4096)
            if not received:
                return None
            data += received
        return json.loads(data)

    def die(self):
        self.socket.close()


def start_server(record, *flags, num_ranks=3, preexec_fn=None, pass_fds=(), **variables):
    """Returns the process of a server, which prints where it listens."""
    flags = [*flags, "--num-ranks", num_ranks, "--record", record]
    return start_process("server", flags, variables, preexec_fn=preexec_fn, pass_fds=pass_fds)


def start_hub(server_port, first_rank, num_ranks, **variables):
    """Returns the process of a hub."""
    flags = ["--server", "127.0.0.1", "--server-port", server_port]
    flags += ["--first-rank", first_rank, "--num-ranks", num_ranks]
    return start_process("hub", flags, variables)


def start_process(module, flags, variables, **options):
    command = [sys.executable, "-m", f"candle_p1.distributed.watchdog.{module}"]
    command += ["--bind", "127.0.0.1", *map(str, flags)]
    environment = os.environ | {TOKEN_VARIABLE: TOKEN} | variables
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, **options)


def port_of(process):
    """Returns the port on which a process listens."""
    return json.loads(process.stdout.readline())["port"]
