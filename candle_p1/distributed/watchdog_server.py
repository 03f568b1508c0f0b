"""The sentinel: a small process that outlives the ranks and says what became of them.

Rank 0 starts one per run, in a session of its own, so that neither a kill -9 of a rank nor the
launcher's clean-up of its process group reaches it; where a scheduler ends all that a job has left,
it has some milliseconds, which suffice. Every rank holds a TCP connection to it
(candle_p1.distributed.watchdog_client). The kernel closes that connection when a rank dies, however
it dies, so the first connection that ends without a goodbye names the rank that failed. The
sentinel then completes the run record, tells the other ranks to end, and ends itself.

Messages are JSON lines.

- rank to sentinel: hello (token, rank, host, pid), phase, steps begun, signal, error, bye
- sentinel to rank: end (reason, speak: whether this rank should say it)
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from candle_p1.files import write_atomically

GRACE_S = 0.5
"""How long a signal waits for news of a dead rank: launchers signal the survivors of one."""
GATHER_S = 120.0
"""How long the sentinel waits for the ranks to connect."""
LONGEST_HELLO_BYTES = 4096
FAREWELL_S = 10.0
"""How long the sentinel stays for the ranks it told to end."""
TOKEN_VARIABLE = "CANDLE_P1_SENTINEL_TOKEN"
"""Not an argument, which every user of the machine could read."""
SIGNAL_NAMES = {number.value: number.name for number in signal.Signals}


@dataclass(eq=False)
class Rank:
    """One connection, and what its rank has said."""

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

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message; a rank that is gone is not an error here."""
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.closed = True


@dataclass
class Sentinel:
    """Watches the ranks of one run.

    Args:
        listener: A listening socket.
        token: What a hello must bring.
        num_ranks: The ranks to expect.
        record: The run record to complete.
        starter: The process of rank 0, which started this one.
    """

    listener: socket.socket
    token: str
    num_ranks: int
    record: Path
    starter: int = field(default_factory=os.getppid)
    ranks: list[Rank] = field(default_factory=list)
    oom_kills: int | None = field(default_factory=lambda: count_oom_kills())

    def watch(self) -> None:
        """Returns when every rank has said bye, or after a failure has been dealt with."""
        with selectors.DefaultSelector() as self._selector:
            self.listener.setblocking(False)
            self._selector.register(self.listener, selectors.EVENT_READ)
            signalled_at: float | None = None
            orphaned_at: float | None = None
            deadline = time.monotonic() + GATHER_S
            while True:
                self._hear()
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
                    if time.monotonic() - orphaned_at > GRACE_S:  # no hello of its is on the way
                        return self._end(self._dead_starter(), "failed")
                if len(known) < self.num_ranks and time.monotonic() > deadline:
                    return None  # the ranks could not gather, and have said so themselves
                signalled = next((rank for rank in known if rank.signal is not None), None)
                if signalled:
                    signalled_at = signalled_at or time.monotonic()
                    if time.monotonic() - signalled_at > GRACE_S:
                        return self._end(signalled, "interrupted")

    def _known(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.rank is not None]

    def _dead_starter(self) -> Rank:
        """Returns rank 0, which died before it said hello."""
        host = socket.gethostname()
        return Rank(socket.socket(), rank=0, host=host, pid=self.starter, closed=True)

    def _hear(self) -> None:
        """Waits a moment for news: new connections, messages, ends of connections."""
        for key, _ in self._selector.select(timeout=0.1):
            if key.fileobj is self.listener:
                with suppress(OSError):  # gone again, or no room for it: it tries once more
                    rank = Rank(self.listener.accept()[0])
                    self.ranks.append(rank)
                    self._selector.register(rank.connection, selectors.EVENT_READ, rank)
            elif not self._receive(key.data):
                self._selector.unregister(key.fileobj)
                key.data.connection.close()

    def _receive(self, rank: Rank) -> bool:
        """Reads what a rank has sent; returns False at the end of its connection."""
        try:
            data = rank.connection.recv(65536)
        except OSError:
            data = b""
        if not data:
            rank.closed = True
            return False
        *lines, rank.buffer = (rank.buffer + data).split(b"\n")
        if rank.rank is None and len(rank.buffer) > LONGEST_HELLO_BYTES:
            self.ranks.remove(rank)
            return False
        for line in lines:
            if rank.rank is None and not self._greet(rank, line):
                self.ranks.remove(rank)
                return False
            message = json.loads(line)
            rank.phase = message.get("phase", rank.phase)
            rank.steps = message.get("steps", rank.steps)
            rank.signal = message.get("signal", rank.signal)
            rank.error = message.get("error", rank.error)
            rank.said_bye = rank.said_bye or "bye" in message
        return True

    def _greet(self, rank: Rank, line: bytes) -> bool:
        """Takes the first line of a connection; returns False if it is no rank of this run."""
        try:
            hello = json.loads(line)["hello"]
            if hello["token"] != self.token:
                return False
            rank.host, rank.pid, rank.rank = hello["host"], hello["pid"], hello["rank"]
        except (ValueError, KeyError, TypeError):
            return False
        return True

    def _end(self, culprit: Rank, status: str) -> None:
        """Completes the record, tells the ranks to end, and waits for them to go."""
        unknown = False
        if culprit.error and culprit.error.get("stalled"):
            # Those who waited report it; the one they waited for is behind, if one is.
            steps = sorted(rank.steps for rank in self._known())
            unknown = len(steps) > 1 and steps[0] == steps[1]
            culprit = min(self._known(), key=lambda rank: rank.steps)
            reason = (
                f"{self._name(culprit)} stalled during {culprit.phase}, at step {culprit.steps}:"
                " the others waited for it in a collective until the time limit (stall_shutdown_s)"
            )
            if unknown:
                reason = (
                    f"a collective stalled during {culprit.phase} until the time limit"
                    " (stall_shutdown_s); no rank is behind the others: see Horovod's warnings"
                )
        else:
            reason = self._reason(culprit, status)
        failure = {
            "reason": reason,
            "rank": None if unknown else culprit.rank,
            "host": None if unknown else culprit.host,
            "pid": None if unknown else culprit.pid,
            "phase": culprit.phase,
        }
        if culprit.error and culprit.error.get("traceback"):
            failure["traceback"] = culprit.error["traceback"]
        complete_record(self.record, status, failure)
        told: list[Rank] = []
        deadline = time.monotonic() + FAREWELL_S
        while time.monotonic() < deadline:
            # A rank may come late, with its connection still on the way when another died.
            for rank in sorted(self._known(), key=lambda rank: rank.rank or 0):
                if rank not in told and not rank.closed:
                    rank.send({"end": reason, "status": status, "speak": not told})
                    told.append(rank)
            self._hear()
            if sum(rank.closed for rank in self._known()) == self.num_ranks:
                return

    @staticmethod
    def _name(rank: Rank) -> str:
        return f"rank {rank.rank} (host {rank.host}, pid {rank.pid})"

    def _reason(self, rank: Rank, status: str) -> str:
        who = self._name(rank)
        when = f" during {rank.phase}" if rank.phase else ""
        if status == "interrupted":
            name = SIGNAL_NAMES.get(rank.signal or 0, str(rank.signal))
            return f"interrupted{when} by {name}, first seen by {who}"
        if rank.error:
            return f"{who} failed{when}: {rank.error['message']}"
        oom = ""
        if rank.host == socket.gethostname() and self.oom_kills is not None:
            kills = (count_oom_kills() or 0) - self.oom_kills
            if kills > 0:
                oom = f"; the kernel's out-of-memory killer struck on this host ({kills} times)"
        return f"{who} died{when} without a word: killed, crashed or out of memory{oom}"


def count_oom_kills() -> int | None:
    """Returns how often the kernel's out-of-memory killer has struck on this host, where known."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return None


def complete_record(path: Path, status: str, failure: dict[str, Any]) -> None:
    """Marks a record that is still running as failed or interrupted; leaves any other as it is."""
    from candle_p1.records.record import utc_now

    record = json.loads(path.read_text(encoding="utf-8"))
    if record["status"] != "running":
        return
    record |= {"status": status, "ended": utc_now(), "failure": failure}
    write_atomically(path, json.dumps(record, indent=2) + "\n")


def main() -> None:
    """Runs the sentinel: prints the port it listens on, then watches."""
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
        Sentinel(
            listener,
            os.environ[TOKEN_VARIABLE],
            arguments.num_ranks,
            arguments.record,
            arguments.starter,
        ).watch()


if __name__ == "__main__":
    main()
