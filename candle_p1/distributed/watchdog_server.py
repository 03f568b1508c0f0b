"""The watchdog server: a small process that outlives the ranks and records how their run failed.

Rank 0 starts one per run, in a session of its own, so that neither a kill -9 of a rank nor the
launcher's clean-up of its process group reaches it; when a scheduler kills whatever a job has left
behind, the server has a few milliseconds, which suffice. Every rank holds a TCP connection to it
(candle_p1.distributed.watchdog_client). The kernel closes that connection when a rank dies, however
it dies, so the first connection that closes without a goodbye belongs to the rank that failed. A
rank that is stopped, or whose node is lost, closes nothing, so ranks also report who is stopped
(candle_p1.distributed.job_guard), and send something every second. The server then completes the
run record, tells the other ranks to end, and exits.

A run that can save a checkpoint is given time to do so after SIGUSR1 or SIGUSR2. Then it ends by
itself and writes its record; if it does not, the server interrupts it. The same signal again, after
a while in which launchers may have sent it on, interrupts it at once, as other signals do.

A connection begins with a line that holds the token. Nothing is parsed before it, and whoever does
not send it soon is disconnected. Then messages follow, in JSON.

- rank to server, each message with a NUL at its end: hello (rank, host, pid), record (its path),
  phase, steps begun, can_save, trouble (with another process), signal, error, bye; and, anywhere, a
  byte for each signal: its number, which is never that of NUL
- server to rank, as lines: welcome; end (the reason), status, speak (whether this rank should print
  the reason)
"""

from __future__ import annotations

import argparse
import errno
import hmac
import json
import mmap
import os
import resource
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

import psutil

from candle_p1.distributed.job_guard import (
    STOPPED_S,
    STOPPED_VARIABLE,
    Trouble,
    is_gone,
    is_stopped,
    limit_from,
    was_stopped,
)

GRACE_S = 0.5
"""How long to wait, after a signal, for news of a dead rank: launchers signal the survivors."""
CONNECT_LIMIT_S = 120.0
"""How long the server waits for all ranks to connect."""
TOKEN_S = 5.0
"""How long a new connection may take to send the token and the hello."""
MAX_STRANGERS = 1024
"""How many connections may be without a token; a further one replaces the oldest."""
MAX_ACCEPTED = 64
"""How many connections are accepted before the server listens to those it has."""
MAX_MESSAGE_BYTES = 2**20
SPARE_FILES = 32
AWAKE_S = 3.0
"""A rank that has sent something within this time is running."""
SILENT_VARIABLE = "CANDLE_P1_SILENT_S"
SILENT_S = 300.0
"""How long a rank may be silent while others are not; the variable changes it. 0: as long as it
likes. A rank is also silent while code in C holds Python's lock, for instance while a cold file
system loads a large library."""
LOG_NAME = "watchdog.log"
WELCOME = b"welcome\n"
"""The answer to a hello."""
FAREWELL_S = 10.0
"""How long the server waits for the ranks that it told to end."""
TOKEN_VARIABLE = "CANDLE_P1_WATCHDOG_TOKEN"
"""Passed in an environment variable because every user of the machine can read arguments."""
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
SAVE_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
SAVE_VARIABLE = "CANDLE_P1_SAVE_S"
SAVE_S = 45.0
"""How long a run may take to save and end after one of these; the variable changes it. 0: as long
as it likes."""
REPEAT_S = 2.0
"""For this long, the same signal counts once: launchers and job scripts both send it on."""
END_OF_MESSAGE = b"\0"
CONTROLS = bytes(range(1, 32))
"""None of these is in JSON as it is written here, so they are signals."""
COUNTER_BYTES = 8
"""Of the memory in which rank 0 counts its steps."""
SIGNAL_NAMES = {number.value: number.name for number in signal.Signals}


@dataclass(eq=False)
class RankConnection:
    """A connection, and what its rank has reported."""

    connection: socket.socket
    heard_s: float = 0.0  # when, by time.monotonic
    silent_s: float = 0.0  # how long, while others were not
    buffer: bytes = b""
    has_token: bool = False
    rank: int | None = None  # until the hello
    host: str = ""
    pid: int = 0
    phase: str | None = None
    steps: int = 0
    can_save: bool = False
    signal: int | None = None
    save_signal: int | None = None
    save_signalled_s: float = 0.0  # when, by time.monotonic
    error: dict[str, Any] | None = None
    trouble: dict[str, Any] | None = None
    closed: bool = False
    said_bye: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    def take_save_signal(self, number: int) -> None:
        """Takes note of a signal that asks to save; it interrupts a rank that is not able to."""
        now = time.monotonic()
        if self.save_signal is None and self.can_save:
            self.save_signal, self.save_signalled_s = number, now
        elif self.save_signal is None or now - self.save_signalled_s > REPEAT_S:
            self.signal = number

    @property
    def is_lost(self) -> bool:
        """Whether its connection was closed without a goodbye."""
        return self.closed and not self.said_bye

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
        token: The secret with which a connection must begin.
        num_ranks: The number of ranks to expect.
        starter: The process id of rank 0, which started this process.
        max_strangers: How many connections without a hello to keep.
        counter: The steps that rank 0 has begun, int64, shape (1,), in memory that it shares.

    Attributes:
        ranks: The ranks that have said hello.
        record: The run record to complete, once rank 0 has told it.
    """

    listener: socket.socket
    token: str
    num_ranks: int
    starter: int
    max_strangers: int = MAX_STRANGERS
    counter: memoryview | None = None
    ranks: list[RankConnection] = field(default_factory=list)
    record: Path | None = None
    oom_kills: int | None = field(default_factory=lambda: count_oom_kills())

    def watch(self) -> None:
        """Returns when every rank has said bye, or after a failure has been dealt with."""
        self._stopped_limit_s = limit_from(STOPPED_VARIABLE, STOPPED_S)
        self._silent_limit_s = limit_from(SILENT_VARIABLE, SILENT_S)
        self._save_limit_s = limit_from(SAVE_VARIABLE, SAVE_S)
        self._host = socket.gethostname()
        self._strangers: list[RankConnection] = []  # without a hello, the oldest first
        self._launcher: psutil.Process | None = None
        with selectors.DefaultSelector() as self._selector:
            self.listener.setblocking(False)
            self._selector.register(self.listener, selectors.EVENT_READ)
            signalled_at: float | None = None
            orphaned_at: float | None = None
            failed_at: float | None = None
            start = self._looked_s = time.monotonic()
            while True:
                self._process_events()
                ranks, now = self.ranks, time.monotonic()
                # What happens to a rank after a signal is a consequence of it.
                unsignalled = [rank for rank in ranks if rank.signal is None]
                failed = (
                    next((rank for rank in unsignalled if rank.trouble), None)
                    or next((rank for rank in unsignalled if rank.error), None)
                    or next((rank for rank in unsignalled if rank.is_lost), None)
                    or self._find_absent()
                )
                if failed and not failed.error and self._has_no_launcher():
                    # A launcher that is interrupted signals its ranks before it ends.
                    failed_at = failed_at or now
                    if len(unsignalled) < len(ranks) or now - failed_at < GRACE_S:
                        failed = None
                if failed:
                    return self._end(failed, "failed")
                if len(ranks) == self.num_ranks and all(rank.said_bye for rank in ranks):
                    return None
                if os.getppid() != self.starter and not any(rank.rank == 0 for rank in ranks):
                    orphaned_at = orphaned_at or now
                    # After this long, no hello from rank 0 can still be in transit.
                    if now - orphaned_at > GRACE_S:
                        return self._end(self._dead_starter(), "failed")
                if len(ranks) < self.num_ranks and now - start > CONNECT_LIMIT_S:
                    return None  # the ranks could not connect, and have reported that themselves
                signalled = next((rank for rank in ranks if rank.signal is not None), None)
                if signalled:
                    signalled_at = signalled_at or now
                    if now - signalled_at > GRACE_S:
                        return self._end(signalled, "interrupted")
                late = now - self._save_limit_s
                unsaved = (each for each in ranks if each.save_signal is not None)
                if rank := next((each for each in unsaved if each.save_signalled_s < late), None):
                    return self._end(rank, "interrupted")

    def _has_no_launcher(self) -> bool:
        """Whether the launcher has ended, if it is known."""
        return self._launcher is not None and is_gone(self._launcher)

    def _dead_starter(self) -> RankConnection:
        """Returns rank 0, which died before it said hello."""
        return RankConnection(
            socket.socket(), rank=0, host=self._host, pid=self.starter, closed=True
        )

    def _find_absent(self) -> RankConnection | None:
        """Returns a rank that has been silent for too long, or silent and stopped.

        Time counts only while another rank is heard, because a job may be suspended as a whole.
        """
        now = time.monotonic()
        seconds, self._looked_s = min(now - self._looked_s, 1.0), now
        awake = [rank for rank in self.ranks if rank.said_bye or now - rank.heard_s < AWAKE_S]
        for rank in self.ranks:
            if rank in awake:
                rank.silent_s = 0.0
            elif awake:
                rank.silent_s += seconds
            if rank.silent_s > self._stopped_limit_s and self._is_stopped(rank):
                rank.trouble = {"what": was_stopped(self._stopped_limit_s)}
            elif rank.silent_s > self._silent_limit_s:
                rank.trouble = {"what": f"was not heard from for {self._silent_limit_s:g} s"}
            if rank.trouble:
                return rank
        return None

    def _is_stopped(self, rank: RankConnection) -> bool:
        """Whether a rank on this host is stopped; False for one on another host."""
        with suppress(psutil.Error):
            return rank.host == self._host and is_stopped(psutil.Process(rank.pid))
        return False

    def _process_events(self) -> None:
        """Waits a moment for new connections, messages and closed connections."""
        for key, _ in self._selector.select(timeout=0.1):
            if key.fileobj is self.listener:
                self._accept()
            elif key.data.connection.fileno() >= 0 and not self._receive(key.data):
                self._close(key.data)
        late = time.monotonic() - TOKEN_S
        for stranger in [each for each in self._strangers if each.heard_s < late]:
            self._close(stranger)

    def _accept(self) -> None:
        """Accepts connections; too many without a token do not keep those of ranks out."""
        for _ in range(MAX_ACCEPTED):
            try:
                connection = self.listener.accept()[0]
            except BlockingIOError:
                return
            except OSError as error:  # it has gone already, or there are too many open files
                if error.errno in (errno.EMFILE, errno.ENFILE) and self._strangers:
                    self._close(self._strangers[0])
                    continue
                time.sleep(0.01)
                return
            connection.setblocking(True)
            stranger = RankConnection(connection, heard_s=time.monotonic())
            self._strangers.append(stranger)
            self._selector.register(connection, selectors.EVENT_READ, stranger)
            if len(self._strangers) > self.max_strangers:
                self._close(self._strangers[0])

    def _close(self, rank: RankConnection) -> None:
        rank.closed = True
        if rank in self._strangers:
            self._strangers.remove(rank)
        self._selector.unregister(rank.connection)
        rank.connection.close()

    def _receive(self, rank: RankConnection) -> bool:
        """Reads what a connection has sent; returns False if it is to be closed."""
        try:
            data = rank.connection.recv(65536)
        except OSError:
            return False
        rank.buffer += data
        if not rank.has_token:
            line, newline, rank.buffer = rank.buffer.partition(b"\n")
            if not newline:
                rank.buffer = line
                return bool(data) and len(line) <= len(self.token)
            rank.has_token = hmac.compare_digest(line, self.token.encode())
            if not rank.has_token:
                return False
        if rank.rank is not None:
            self._take_signals(rank)
        *messages, rank.buffer = rank.buffer.split(END_OF_MESSAGE)
        understood = all(self._take(rank, message) for message in messages)
        return understood and bool(data) and len(rank.buffer) <= MAX_MESSAGE_BYTES

    @staticmethod
    def _take_signals(rank: RankConnection) -> None:
        """Takes note of signals, which arrive as single bytes, and removes those of all signals."""
        for number in SIGNALS:
            if rank.signal is None and bytes([number]) in rank.buffer:
                rank.signal = number
        for number in SAVE_SIGNALS:
            if rank.signal is None and bytes([number]) in rank.buffer:
                rank.take_save_signal(number)
        rank.buffer = rank.buffer.translate(None, delete=CONTROLS)

    def _take(self, rank: RankConnection, text: bytes) -> bool:
        """Takes note of a message; returns False if no rank sends such a message."""
        try:
            # Before it there may be signals that are not control characters: SIGRTMIN and above.
            message = json.loads(text[text.find(b"{") :] if b"{" in text else b"{}")
            if hello := message.get("hello"):
                self._welcome(rank, hello)
            if rank.rank is None:
                return False
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return False
        rank.heard_s = time.monotonic()
        rank.phase = message.get("phase", rank.phase)
        rank.steps = message.get("steps", rank.steps)
        rank.can_save = message.get("can_save", rank.can_save)
        rank.signal = message.get("signal", rank.signal)
        rank.error = message.get("error", rank.error)
        rank.trouble = message.get("trouble", rank.trouble)
        rank.said_bye = rank.said_bye or "bye" in message
        if "record" in message:
            self._open_log(Path(message["record"]))
        return True

    def _welcome(self, rank: RankConnection, hello: dict[str, Any]) -> None:
        """Makes a connection that of a rank."""
        rank.host, rank.pid, rank.rank = hello["host"], hello["pid"], hello["rank"]
        self._strangers.remove(rank)
        self.ranks.append(rank)
        if hello.get("launcher") and rank.host == self._host:
            with suppress(psutil.Error):
                self._launcher = psutil.Process(hello["launcher"])
        with suppress(OSError):
            rank.connection.sendall(WELCOME)

    def _open_log(self, record: Path) -> None:
        """Begins to look after a record; errors of this process go to a file beside it."""
        self.record = record
        with suppress(OSError), (record.parent / LOG_NAME).open("ab") as log:
            os.dup2(log.fileno(), 2)

    def _end(self, rank: RankConnection, status: str) -> None:
        """Completes the record, tells the ranks to end, and waits until they are gone.

        Args:
            rank: The one that failed or was interrupted first, or that reported the trouble.
            status: "failed" or "interrupted".
        """
        culprit: RankConnection | None = rank
        if rank.trouble:
            culprit = self._in_trouble(rank)
            reason = self._explain_trouble(rank, culprit)
        elif status == "failed" and self._has_no_launcher():
            assert self._launcher is not None
            # It was killed with -9, and its ranks did not survive that for long. An error of theirs
            # is a consequence, such as that of a terminal which the launcher had opened.
            rank.error = None
            culprit, died = None, Trouble("died", self._launcher.pid, is_launcher=True)
            reason = str(died) + (f" during {rank.phase}" if rank.phase else "")
        elif rank.error and rank.error.get("stalled"):
            # The rank that reports a stall waited for another, which is behind if any rank is.
            rank, *others = sorted(self.ranks, key=lambda rank: rank.steps)
            culprit = rank if not others or rank.steps < others[0].steps else None
            reason = self._explain_stall(rank, is_known=culprit is not None)
        else:
            reason = self._explain(rank, status)
        reason += self._end_record(status, reason, culprit, rank)
        told: list[RankConnection] = []
        deadline = time.monotonic() + FAREWELL_S
        while time.monotonic() < deadline:
            # Repeated in every round, because a rank may connect after another one has died.
            for each in sorted(self.ranks, key=lambda each: each.rank or 0):
                if each not in told and not each.closed:
                    each.send({"end": reason, "status": status, "speak": not told})
                    told.append(each)
            self._process_events()
            if sum(each.closed for each in self.ranks) == self.num_ranks:
                return

    def _end_record(
        self, status: str, reason: str, culprit: RankConnection | None, rank: RankConnection
    ) -> str:
        """Completes the record, if there is one; returns what to add to the reason."""
        from candle_p1.errors import RecordError
        from candle_p1.records.record import end_record
        from candle_p1.records.types import Failure

        if self.record is None:
            return ""
        failure = Failure(
            reason=reason,
            rank=culprit.rank if culprit else None,
            host=culprit.host if culprit else None,
            pid=culprit.pid if culprit else None,
            phase=rank.phase,
            steps=max([each.steps for each in self.ranks] + list(self.counter or ())),
            traceback=(rank.error or {}).get("traceback") or None,
        )
        try:
            end_record(self.record, status, failure)
        except (OSError, RecordError) as error:
            return f"; the record cannot be written: {error}"
        return ""

    def _in_trouble(self, reporter: RankConnection) -> RankConnection | None:
        """Returns the rank that a rank has reported, or None if it is the launcher."""
        assert reporter.trouble is not None
        if reporter.trouble.get("is_launcher"):
            return None
        pid = reporter.trouble.get("pid", reporter.pid)
        for rank in self.ranks:
            if (rank.host, rank.pid) == (reporter.host, pid):
                return rank
        return reporter

    @staticmethod
    def _explain_trouble(reporter: RankConnection, culprit: RankConnection | None) -> str:
        assert reporter.trouble is not None
        who = culprit or f"the launcher (host {reporter.host}, pid {reporter.trouble['pid']})"
        phase = (culprit or reporter).phase
        return f"{who} {reporter.trouble['what']}" + (f" during {phase}" if phase else "")

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
            number = rank.signal or rank.save_signal or 0
            name = SIGNAL_NAMES.get(number, str(number))
            unsaved = ""
            if rank.signal is None:
                unsaved = f"; the run did not save and end within {self._save_limit_s:g} s"
            return f"interrupted{when} by {name}, which {rank} received first{unsaved}"
        if rank.error:
            return f"{rank} failed{when}: {rank.error['message']}"
        oom = ""
        if rank.host == self._host and self.oom_kills is not None:
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
    parser.add_argument("--record", required=True, help="where it is expected; see run_state")
    parser.add_argument("--starter", type=int, default=os.getppid())
    parser.add_argument("--counter", type=int, help="file descriptor of rank 0's counted steps")
    arguments = parser.parse_args()
    for number in (*SIGNALS, *SAVE_SIGNALS):
        signal.signal(number, signal.SIG_IGN)
    counter = None
    if arguments.counter is not None:
        counter = memoryview(mmap.mmap(arguments.counter, COUNTER_BYTES)).cast("q")
    num_files = _raise_file_limit(arguments.num_ranks + MAX_STRANGERS + SPARE_FILES)
    max_strangers = max(16, min(MAX_STRANGERS, num_files - arguments.num_ranks - SPARE_FILES))
    address, backlog = (arguments.bind, 0), arguments.num_ranks + MAX_STRANGERS
    with socket.create_server(address, backlog=backlog) as listener:
        print(listener.getsockname()[1], flush=True)
        sys.stdout.close()
        # Ahead of time, because a dying job may leave the server only milliseconds.
        ahead = threading.Thread(target=import_module, args=["candle_p1.records.record"])
        ahead.start()
        token = os.environ[TOKEN_VARIABLE]
        WatchdogServer(
            listener, token, arguments.num_ranks, arguments.starter, max_strangers, counter
        ).watch()


def _raise_file_limit(wanted: int) -> int:
    """Raises this process's limit of open files towards a number; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


if __name__ == "__main__":
    main()
