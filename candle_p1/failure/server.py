"""The watchdog server: a small process that outlives the ranks and records how their run failed.

Rank 0 starts one per run, in a session of its own, so that neither a kill -9 of a rank nor the
launcher's clean-up of its process group reaches it; when a scheduler kills whatever a job has left
behind, the server has a few milliseconds, which suffice. Every rank holds a TCP connection to it
(candle_p1.failure.protocol). The kernel closes that connection when a rank dies, however it dies,
so the first one that closes without a goodbye belongs to the rank that failed. Connections of
several may close within a millisecond, in any order: a rank that ends by itself, maybe because it
has lost another one, says so, and the server waits a moment for news of that one. A rank that is
stopped, or whose node is lost, closes nothing, but says nothing any more, either. The server then
completes the run record, tells the other ranks to end, and exits.

Without a network that the server could use, each rank has a server of its own for itself alone, in
a thread: it records errors and signals, but not that its rank is killed.

A run that can save a checkpoint is given time to do so after SIGUSR1 or SIGUSR2. Then it ends by
itself and writes its record; if it does not, the server interrupts it. The same signal again, after
a while in which launchers may have sent it on, interrupts it at once, as other signals do.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import shutil
import signal
import socket
import sys
import time
from contextlib import closing, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from candle_p1.failure import _native, progress
from candle_p1.failure.connections import MAX_STRANGERS, Connections, RankState, make_room
from candle_p1.failure.diagnosis import (
    STOPPED,
    Diagnosis,
    Diagnostician,
    HangDetector,
    find_cause,
    find_consequence,
)
from candle_p1.failure.protocol import SAVE_SIGNALS, SIGNALS, TOKEN_VARIABLE, Limits, encode_order

if TYPE_CHECKING:
    from candle_p1.failure.connections import Peer
    from candle_p1.failure.protocol import Message

GRACE_S = 0.5
"""How long to wait, after a signal, for news of a dead rank: launchers signal the survivors."""
CAUSE_GRACE_S = 2.0
"""How long to wait, after what may be the consequence of another rank's end, for that end; and
after a stall, for the other ranks that have noticed it."""
LAST_NEWS_S = 0.05
"""How long to wait for it once ranks are signalled: the launcher has seen the end of one, and kills
the others a quarter of a second later, after which nobody could print the reason."""
CONNECT_LIMIT_S = 120.0
"""How long the server waits for all ranks to connect."""
FAREWELL_S = 10.0
"""How long the server waits for the ranks that it told to end."""
LOOK_S = 0.25
"""How often the server looks at all ranks, of which there may be thousands, without news."""
OPEN_MPI = ("mpirun", "mpiexec", "orterun", "prterun", "prted")
"""The launcher of Open MPI, and its daemon on other nodes."""
LOG_NAME = "watchdog.log"


class WatchdogServer:
    """Watches the ranks of one run.

    Args:
        num_ranks: The number of ranks to expect.
        limits: The time limits.
        token: The secret with which a connection must begin.
        listener: A listening socket; None: a connection is added.
        starter: The process id of rank 0 if it started this process, else 0.
        counter: The numbers of rank 0's progress, int64, in memory that it shares.
        max_strangers: How many connections without a hello to keep.

    Attributes:
        ranks: The ranks that have said hello.
        connections: Theirs, and those of strangers.
    """

    def __init__(
        self,
        num_ranks: int,
        limits: Limits,
        token: str,
        *,
        listener: socket.socket | None = None,
        starter: int = 0,
        counter: memoryview | None = None,
        max_strangers: int = MAX_STRANGERS,
    ) -> None:
        self._num_ranks, self._limits, self._starter = num_ranks, limits, starter
        self._counter = counter
        self._host = platform.node()
        self.ranks: list[RankState] = []
        self._rank_of: dict[Peer, RankState] = {}
        self._diagnostician = Diagnostician(self._host, limits.save_s)
        self._hangs = HangDetector(limits, self._host, num_ranks)
        self.connections = Connections(token, self._take, limits.silent_s, listener, max_strangers)
        self._launcher: psutil.Process | None = None
        self._launcher_pids: set[int] = set()  # as the ranks of this host name them
        self._session = ""
        self._record: Path | None = None
        self._has_news = False
        self._failed_at: float | None = None
        self._suspected_at: float | None = None
        self._signalled: RankState | None = None  # the first one
        self._signalled_at = 0.0

    def watch(self) -> None:
        """Returns when every rank has said bye, or after a failure has been dealt with."""
        with closing(self.connections):
            if diagnosis := self._await_end():
                self._end(diagnosis)

    def _await_end(self) -> Diagnosis | None:
        orphaned_at: float | None = None
        start = time.monotonic()
        looked_s = 0.0
        can_record = False
        while True:
            self.connections.receive(LAST_NEWS_S if self._suspected_at else 0.1)
            now = time.monotonic()
            if not self._has_news and now - looked_s < LOOK_S:
                continue
            self._has_news, looked_s = False, now
            if not can_record and self._record is not None:
                # Ahead of time, because a dying job may leave the server only milliseconds; but not
                # before the ranks, which wait for an answer, have connected.
                can_record = True
                with suppress(Exception):  # it fails again when a record has to be completed
                    import_module("candle_p1.records.record")
            if diagnosis := self.diagnose():
                return diagnosis
            if len(self.ranks) == self._num_ranks and all(rank.said_bye for rank in self.ranks):
                return None
            is_orphan = self._starter and os.getppid() != self._starter
            if is_orphan and not any(rank.rank == 0 for rank in self.ranks):
                orphaned_at = orphaned_at or now
                # After this long, no hello from rank 0 can still be in transit.
                if now - orphaned_at > GRACE_S:
                    dead = RankState(0, self._host, self._starter, closed="gone")
                    return self._diagnostician.failed(dead, self.ranks)
            if len(self.ranks) < self._num_ranks and now - start > CONNECT_LIMIT_S:
                return None  # the ranks could not connect, and have reported that themselves

    def diagnose(self) -> Diagnosis | None:
        """Returns how the run has ended, if it has."""
        ranks, now = self.ranks, time.monotonic()
        # What happens to a rank after a signal is a consequence of it.
        unsignalled = [rank for rank in ranks if rank.signal is None]
        if self._signalled is None and len(unsignalled) < len(ranks):
            self._signalled = next(rank for rank in ranks if rank.signal is not None)
            self._signalled_at = now
        failed = find_cause(unsignalled) or self._hangs.find(ranks)
        if failed is None and (failed := find_consequence(unsignalled)):
            self._suspected_at = self._suspected_at or now
            until_s = self._suspected_at + CAUSE_GRACE_S
            if self._signalled:
                until_s = min(until_s, self._signalled_at + LAST_NEWS_S)
            if now < until_s and any(rank.closed is None for rank in ranks):
                self._has_news = True  # look again soon
                return None
        if failed and not failed.error and _is_gone(self._launcher):
            # A launcher that is interrupted signals its ranks before it ends.
            self._failed_at = self._failed_at or now
            if len(unsignalled) < len(ranks) or now - self._failed_at < GRACE_S:
                failed = None
        if failed:
            if not failed.fault and self._launcher and _is_gone(self._launcher):
                return self._diagnostician.launcher_died(self._launcher.pid, failed)
            return self._diagnostician.failed(failed, ranks)
        if self._signalled and now - self._signalled_at > GRACE_S:
            return self._diagnostician.interrupted(self._signalled)
        unsaved = [rank for rank in ranks if rank.save_signal is not None]
        first = min(unsaved, key=lambda rank: rank.save_signalled_s, default=None)
        if first and now - first.save_signalled_s > self._limits.save_s:
            return self._diagnostician.interrupted(first)
        return None

    def _take(self, peer: Peer, message: Any) -> None:
        """Takes note of a message from a rank."""
        if peer not in self._rank_of:
            self._rank_of[peer] = self._add_rank(message["hello"], peer)
            return
        rank = self._rank_of[peer]
        rank.take(message)
        if isinstance(message, dict):  # these may end the run
            urgent = {"launcher_fault", "error", "signal", "closed"} & message.keys()
            self._has_news |= bool(urgent) and not rank.said_bye
        if rank.record is not None and rank.record != self._record:
            self._record = rank.record
            self._open_log()

    def _add_rank(self, hello: Message, peer: Peer) -> RankState:
        rank = RankState.from_hello(hello, peer)
        if hello.get("launcher") and rank.host == self._host:
            self._note_launcher(int(hello["launcher"]), str(hello.get("session", "")))
        # One that got no answer in time has tried again.
        again = [each for each in self.ranks if (each.rank, each.pid) == (rank.rank, rank.pid)]
        for each in again:
            self.ranks.remove(each)
        self.ranks.append(rank)
        return rank

    def _note_launcher(self, pid: int, session: str) -> None:
        """Notes what a rank takes for the launcher: none if each rank has a script around it."""
        self._launcher_pids.add(pid)
        self._launcher = None
        if len(self._launcher_pids) == 1:
            with suppress(psutil.Error):
                self._launcher, self._session = psutil.Process(pid), session

    def _open_log(self) -> None:
        """Sends errors of this process to a file beside the record."""
        if self._starter:
            assert self._record is not None
            with suppress(OSError), (self._record.parent / LOG_NAME).open("ab") as log:
                os.dup2(log.fileno(), 2)

    def _end(self, diagnosis: Diagnosis) -> None:
        """Completes the record, tells the ranks to end, and waits until they are gone."""
        reason = diagnosis.reason + self._end_record(diagnosis)
        is_failed = diagnosis.status == "failed"
        code = _native.FAILED if is_failed else _native.INTERRUPTED
        # In a run that nobody watches, each rank's own server tells that rank of a signal.
        speaks = is_failed or any(rank.rank == 0 for rank in self.ranks)

        def order(is_first: bool) -> bytes:
            return encode_order(code, reason, speak=is_first and speaks)

        begin = time.monotonic()
        lost: list[RankState] = []
        while time.monotonic() - begin < FAREWELL_S:
            # Repeated in every round, because a rank may connect after another one has died.
            self.connections.tell(order)
            known = self._record
            self.connections.receive()
            if self._record != known:  # rank 0 may have said which before, but was not heard
                reason = diagnosis.reason + self._end_record(diagnosis)
            lost = [rank for rank in self.ranks if rank.is_unreachable]
            there = [rank for rank in self.ranks if not rank.closed and rank not in lost]
            if not there and len(self.ranks) == self._num_ranks:
                break
            # After that, their launcher ends the others, which may still have to print the reason.
            if time.monotonic() - begin > 1.0:
                self._kill_stopped()
        self._end_launcher(has_lost_node=bool(lost))

    def _kill_stopped(self) -> None:
        """Kills the ranks of this host that are stopped, and so do not obey."""
        for rank in self.ranks:
            is_here = rank.host == self._host and not rank.closed
            if is_here and _native.process_state(rank.pid) == STOPPED:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(rank.pid, signal.SIGKILL)

    def _end_launcher(self, *, has_lost_node: bool) -> None:
        """Kills a launcher that cannot end, because it is stopped or waits for a lost node.

        It ignores SIGTERM. Its directory would keep a later one of the same process id from
        starting.
        """
        launcher, until = self._launcher, time.monotonic() + _native.LAUNCHER_S
        if launcher is None:
            return
        with suppress(psutil.Error):
            while has_lost_node or launcher.status() == psutil.STATUS_STOPPED:
                if _is_gone(launcher):
                    return
                if time.monotonic() > until:
                    if has_lost_node and launcher.name() not in OPEN_MPI:
                        return
                    launcher.kill()
                    if self._session:
                        shutil.rmtree(self._session, ignore_errors=True)
                    return
                time.sleep(0.1)

    def _end_record(self, diagnosis: Diagnosis) -> str:
        """Completes the record, if there is one; returns what to add to the reason."""
        if self._record is None:
            return ""
        counted = [self._counter[progress.STEPS]] if self._counter else []
        failure = diagnosis.failure([rank.progress.steps for rank in self.ranks] + counted)
        return _end_record(self._record, diagnosis.status, failure)


def _end_record(path: Path, status: str, failure: Any) -> str:
    """Completes a record; returns the reason why it cannot be written, in words, or nothing."""
    from candle_p1.errors import RecordError
    from candle_p1.records.record import end_record

    try:
        end_record(path, status, failure)
    except (OSError, RecordError) as error:
        return f"; the record cannot be written: {error}"
    return ""


def _is_gone(process: psutil.Process | None) -> bool:
    """Whether a process has ended, if it is known."""
    if process is None:
        return False
    try:
        return not process.is_running() or bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:  # one of another user, where these are hidden
        return False


def main() -> None:
    """Runs the watchdog server: prints where it listens, then watches.

    With --complete, it completes the record of a run whose server has died, unless another rank
    does so first.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--bind")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--num-ranks", type=int)
    parser.add_argument("--record", type=Path, help="where studies.state looks for it")
    parser.add_argument("--limits", type=json.loads, default={}, help="the fields of Limits")
    parser.add_argument("--starter", type=int, default=os.getppid())
    parser.add_argument("--counter", type=int, help="file descriptor of rank 0's progress")
    parser.add_argument("--complete", help="no server: completes the record, for this reason")
    parser.add_argument("--delay", type=float, default=0.0, help="with --complete, in s")
    parser.add_argument("steps", type=int, nargs="?", default=0, help="with --complete")
    arguments = parser.parse_args()
    for number in (*SIGNALS, *SAVE_SIGNALS):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):  # rank 0 may keep to some cores, where its threads compute
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    if arguments.complete:
        from candle_p1.records.types import Failure

        time.sleep(arguments.delay)
        failure = Failure(reason=arguments.complete, rank=None, steps=arguments.steps)
        _end_record(arguments.record, "failed", failure)
        return
    counter = None
    if arguments.counter is not None:
        counter = memoryview(mmap.mmap(arguments.counter, progress.NUM_BYTES)).cast("q")
    strangers = make_room(arguments.num_ranks)
    address = (arguments.bind, arguments.port)
    try:
        listener = socket.create_server(address, backlog=arguments.num_ranks + MAX_STRANGERS)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        print(json.dumps({"error": f"port {arguments.port} at {arguments.bind}: {why}"}))
        sys.exit(1)
    with listener:
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
        sys.stdout.close()
        WatchdogServer(
            arguments.num_ranks,
            Limits(**arguments.limits),
            os.environ[TOKEN_VARIABLE],
            listener=listener,
            starter=arguments.starter,
            counter=counter,
            max_strangers=strangers,
        ).watch()


if __name__ == "__main__":
    main()
