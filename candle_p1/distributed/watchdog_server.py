"""The watchdog server: a small process that outlives the ranks and records how their run failed.

Rank 0 starts one per run, in a session of its own, so that neither a kill -9 of a rank nor the
launcher's clean-up of its process group reaches it; when a scheduler kills whatever a job has left
behind, the server has a few milliseconds, which suffice. Every rank holds a TCP connection to it
(candle_p1.distributed.watchdog_client). The kernel closes that connection when a rank dies, however
it dies, so the first connection that closes without a goodbye belongs to the rank that failed. The
server then completes the run record, tells the other ranks to end, and exits.

Messages are JSON lines.

- rank to server: hello (token, rank, host, pid), phase, steps begun, signal, error, bye
- server to rank: end (the reason), status, speak (whether this rank should print the reason)
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

GRACE_S = 0.5
"""How long to wait, after a signal, for news of a dead rank: launchers signal the survivors."""
CONNECT_LIMIT_S = 120.0
"""How long the server waits for all ranks to connect."""
MAX_HELLO_BYTES = 4096
FAREWELL_S = 10.0
"""How long the server waits for the ranks that it told to end."""
TOKEN_VARIABLE = "CANDLE_P1_WATCHDOG_TOKEN"
"""Passed in an environment variable because every user of the machine can read arguments."""
SIGNAL_NAMES = {number.value: number.name for number in signal.Signals}


@dataclass(eq=False)
class RankConnection:
    """A connection, and what its rank has reported."""

    connection: socket.socket
    buffer: bytes = b""
    rank: int | None = None  # until the hello
    host: str = ""
    pid: int = 0
    phase: str | None = None
    steps: int = 0
    signal: int | None = None
    error: dict[str, Any] | None = None
    closed: bool = False
    said_bye: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message, if the rank is still there."""
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.closed = True


@dataclass
class WatchdogServer:
    """Watches the ranks of one run.

    Args:
        listener: A listening socket.
        token: The secret that a hello must contain.
        num_ranks: The number of ranks to expect.
        record: The run record to complete.
        starter: The process id of rank 0, which started this process.
    """

    listener: socket.socket
    token: str
    num_ranks: int
    record: Path
    starter: int
    ranks: list[RankConnection] = field(default_factory=list)
    oom_kills: int | None = field(default_factory=lambda: count_oom_kills())

    def watch(self) -> None:
        """Returns when every rank has said bye, or after a failure has been dealt with."""
        with selectors.DefaultSelector() as self._selector:
            self.listener.setblocking(False)
            self._selector.register(self.listener, selectors.EVENT_READ)
            signalled_at: float | None = None
            orphaned_at: float | None = None
            deadline = time.monotonic() + CONNECT_LIMIT_S
            while True:
                self._process_events()
                known = self._known()
                failed = next((rank for rank in known if rank.error), None) or next(
                    (r for r in known if r.closed and not r.said_bye and r.signal is None), None
                )
                if failed:
                    return self._end(failed, "failed")
                if len(known) == self.num_ranks and all(rank.said_bye for rank in known):
                    return None
                if os.getppid() != self.starter and not any(rank.rank == 0 for rank in known):
                    orphaned_at = orphaned_at or time.monotonic()
                    # After this long, no hello from rank 0 can still be in transit.
                    if time.monotonic() - orphaned_at > GRACE_S:
                        return self._end(self._dead_starter(), "failed")
                if len(known) < self.num_ranks and time.monotonic() > deadline:
                    return None  # the ranks could not connect, and have reported that themselves
                signalled = next((rank for rank in known if rank.signal is not None), None)
                if signalled:
                    signalled_at = signalled_at or time.monotonic()
                    if time.monotonic() - signalled_at > GRACE_S:
                        return self._end(signalled, "interrupted")

    def _known(self) -> list[RankConnection]:
        return [rank for rank in self.ranks if rank.rank is not None]

    def _dead_starter(self) -> RankConnection:
        """Returns rank 0, which died before it said hello."""
        host = socket.gethostname()
        return RankConnection(socket.socket(), rank=0, host=host, pid=self.starter, closed=True)

    def _process_events(self) -> None:
        """Waits a moment for new connections, messages and closed connections."""
        for key, _ in self._selector.select(timeout=0.1):
            if key.fileobj is self.listener:
                with suppress(OSError):  # already gone, or too many open files: the rank retries
                    rank = RankConnection(self.listener.accept()[0])
                    self.ranks.append(rank)
                    self._selector.register(rank.connection, selectors.EVENT_READ, rank)
            elif not self._receive(key.data):
                self._selector.unregister(key.fileobj)
                key.data.connection.close()

    def _receive(self, rank: RankConnection) -> bool:
        """Reads what a rank has sent; returns False if its connection is to be closed."""
        try:
            data = rank.connection.recv(65536)
        except OSError:
            data = b""
        if not data:
            rank.closed = True
            return False
        *lines, rank.buffer = (rank.buffer + data).split(b"\n")
        if rank.rank is None and len(rank.buffer) > MAX_HELLO_BYTES:
            self.ranks.remove(rank)
            return False
        for line in lines:
            if rank.rank is None and not self._accept_hello(rank, line):
                self.ranks.remove(rank)
                return False
            message = json.loads(line)
            rank.phase = message.get("phase", rank.phase)
            rank.steps = message.get("steps", rank.steps)
            rank.signal = message.get("signal", rank.signal)
            rank.error = message.get("error", rank.error)
            rank.said_bye = rank.said_bye or "bye" in message
        return True

    def _accept_hello(self, rank: RankConnection, line: bytes) -> bool:
        """Reads a connection's first line; returns False unless it is a rank of this run."""
        try:
            hello = json.loads(line)["hello"]
            if hello["token"] != self.token:
                return False
            rank.host, rank.pid, rank.rank = hello["host"], hello["pid"], hello["rank"]
        except (ValueError, KeyError, TypeError):
            return False
        return True

    def _end(self, rank: RankConnection, status: str) -> None:
        """Completes the record, tells the ranks to end, and waits until they are gone.

        Args:
            rank: The one that failed or was interrupted first.
            status: "failed" or "interrupted".
        """
        from candle_p1.records.record import end_record
        from candle_p1.records.types import Failure

        is_known = True
        if rank.error and rank.error.get("stalled"):
            # The rank that reports a stall waited for another, which is behind if any rank is.
            first, *others = sorted(self._known(), key=lambda rank: rank.steps)
            rank, is_known = first, not others or first.steps < others[0].steps
            reason = self._explain_stall(first, is_known=is_known)
        else:
            reason = self._explain(rank, status)
        failure = Failure(
            reason=reason,
            rank=rank.rank if is_known else None,
            host=rank.host if is_known else None,
            pid=rank.pid if is_known else None,
            phase=rank.phase,
            traceback=(rank.error or {}).get("traceback") or None,
        )
        end_record(self.record, status, failure)
        told: list[RankConnection] = []
        deadline = time.monotonic() + FAREWELL_S
        while time.monotonic() < deadline:
            # Repeated in every round, because a rank may connect after another one has died.
            for each in sorted(self._known(), key=lambda each: each.rank or 0):
                if each not in told and not each.closed:
                    each.send({"end": reason, "status": status, "speak": not told})
                    told.append(each)
            self._process_events()
            if sum(each.closed for each in self._known()) == self.num_ranks:
                return

    @staticmethod
    def _explain_stall(rank: RankConnection, *, is_known: bool) -> str:
        if not is_known:
            return (
                f"a collective stalled during {rank.phase} until the time limit (stall_shutdown_s);"
                " no rank is behind the others: see Horovod's warnings"
            )
        return (
            f"{rank} stalled during {rank.phase}, at step {rank.steps}: the other ranks waited for"
            " it in a collective until the time limit (stall_shutdown_s)"
        )

    def _explain(self, rank: RankConnection, status: str) -> str:
        when = f" during {rank.phase}" if rank.phase else ""
        if status == "interrupted":
            name = SIGNAL_NAMES.get(rank.signal or 0, str(rank.signal))
            return f"interrupted{when} by {name}, which {rank} received first"
        if rank.error:
            return f"{rank} failed{when}: {rank.error['message']}"
        oom = ""
        if rank.host == socket.gethostname() and self.oom_kills is not None:
            num_kills = (count_oom_kills() or 0) - self.oom_kills
            if num_kills > 0:
                oom = f" (processes that the kernel killed for lack of memory: {num_kills})"
        return f"{rank} died{when}: it was killed, crashed or ran out of memory{oom}"


def count_oom_kills() -> int | None:
    """Returns how many processes this host's out-of-memory killer has ended; None if unknown."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return None


def main() -> None:
    """Runs the watchdog server: prints the port on which it listens, then watches."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bind", required=True)
    parser.add_argument("--num-ranks", type=int, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--starter", type=int, default=os.getppid())
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with socket.create_server((arguments.bind, 0), backlog=arguments.num_ranks + 16) as listener:
        print(listener.getsockname()[1], flush=True)
        sys.stdout.close()
        # Ahead of time, because a dying job may leave the server only milliseconds.
        ahead = threading.Thread(target=import_module, args=["candle_p1.records.record"])
        ahead.start()
        WatchdogServer(
            listener,
            os.environ[TOKEN_VARIABLE],
            arguments.num_ranks,
            arguments.record,
            arguments.starter,
        ).watch()


if __name__ == "__main__":
    main()
