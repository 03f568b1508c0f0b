"""The watchdog server: a small process that outlives the ranks and records how their run failed.

Rank 0 starts one per run, in a session of its own, so that neither a kill -9 of a rank nor the
launcher's clean-up of its process group reaches it; when a scheduler kills whatever a job has left
behind, the server has a few milliseconds, which suffice. Every rank holds a TCP connection to it,
or to a hub that holds one (candle_p1.distributed.watchdog.protocol). The kernel closes that
connection when a rank dies, however it dies, so the first one that closes without a goodbye
belongs to the rank that failed. Connections of several may close within a millisecond, in any
order: a rank that ends by itself, maybe because it has lost another one, says so, and the
server waits a moment for news of that one. A rank that is stopped, or whose node is lost, closes
nothing, so ranks also report who is stopped (candle_p1.distributed.job_guard), and give a sign of
life every second. The server then completes the run record, tells the other ranks to end, and
exits.

A run that can save a checkpoint is given time to do so after SIGUSR1 or SIGUSR2. Then it ends by
itself and writes its record; if it does not, the server interrupts it. The same signal again, after
a while in which launchers may have sent it on, interrupts it at once, as other signals do.
"""

from __future__ import annotations

import argparse
import mmap
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from candle_p1.distributed import progress
from candle_p1.distributed.job_guard import end_launcher, is_gone
from candle_p1.distributed.watchdog.absence import AbsenceDetector
from candle_p1.distributed.watchdog.connections import (
    MAX_STRANGERS,
    Connections,
    max_strangers,
)
from candle_p1.distributed.watchdog.listening import listen
from candle_p1.distributed.watchdog.protocol import SAVE_SIGNALS, SIGNALS, TOKEN_VARIABLE
from candle_p1.distributed.watchdog.settings import Limits
from candle_p1.distributed.watchdog.verdict import (
    Judge,
    Verdict,
    count_oom_kills,
    find_cause,
    find_consequence,
)
from candle_p1.distributed.watchdog.watched_rank import WatchedRank

if TYPE_CHECKING:
    from candle_p1.distributed.watchdog.connections import Message, Peer

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
"""How often the server goes through all ranks, of which there may be thousands, without news."""
URGENT = frozenset(("trouble", "error", "signal", "save_signal", "closed"))
"""The messages that may end the run."""
LOG_NAME = "watchdog.log"


@dataclass
class WatchdogServer:
    """Watches the ranks of one run.

    Args:
        listener: A listening socket.
        token: The secret with which a connection must begin.
        num_ranks: The number of ranks to expect.
        starter: The process id of rank 0, which started this process.
        max_strangers: How many connections without a hello to keep.
        counter: The numbers of rank 0's progress, int64, in memory that it shares.

    Attributes:
        ranks: The ranks that have said hello.
    """

    listener: socket.socket
    token: str
    num_ranks: int
    starter: int
    max_strangers: int = MAX_STRANGERS
    counter: memoryview | None = None
    ranks: list[WatchedRank] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = Limits.from_environment()
        self._host = socket.gethostname()
        self._save_s = limits.save_s
        self._judge = Judge(self._host, limits.save_s, count_oom_kills())
        self._absence = AbsenceDetector(limits, self._host, self.num_ranks)
        self._connections = Connections(
            self.listener, self.token, self._take, limits.silent_s, self.max_strangers
        )
        self._rank_of: dict[Peer, WatchedRank] = {}
        self._group_of: dict[Peer, dict[int, WatchedRank]] = {}  # of each hub
        self._launcher: psutil.Process | None = None
        self._launcher_pids: set[int] = set()  # as the ranks of this host name them
        self._session = ""
        self._record: Path | None = None

    def watch(self) -> None:
        """Returns when every rank has said bye, or after a failure has been dealt with."""
        orphaned_at: float | None = None
        start = time.monotonic()
        looked_s = 0.0
        while True:
            self._connections.receive(LAST_NEWS_S if self._suspected_at else 0.1)
            now = time.monotonic()
            if not self._has_news and now - looked_s < LOOK_S:
                continue
            self._has_news, looked_s = False, now
            if verdict := self._find_verdict():
                return self._end(verdict)
            if len(self.ranks) == self.num_ranks and all(rank.said_bye for rank in self.ranks):
                return None
            if os.getppid() != self.starter and not any(rank.rank == 0 for rank in self.ranks):
                orphaned_at = orphaned_at or now
                # After this long, no hello from rank 0 can still be in transit.
                if now - orphaned_at > GRACE_S:
                    dead = WatchedRank(0, self._host, self.starter, closed="gone")
                    return self._end(self._judge.failed(dead, self.ranks))
            if len(self.ranks) < self.num_ranks and now - start > CONNECT_LIMIT_S:
                return None  # the ranks could not connect, and have reported that themselves

    _has_news = False
    _failed_at: float | None = None
    _suspected_at: float | None = None
    _signalled_at: float | None = None

    def _find_verdict(self) -> Verdict | None:
        """Returns how the run has ended, if it has."""
        ranks, now = self.ranks, time.monotonic()
        # What happens to a rank after a signal is a consequence of it.
        unsignalled = [rank for rank in ranks if rank.signal is None]
        signalled = next((rank for rank in ranks if rank.signal is not None), None)
        if signalled:
            self._signalled_at = self._signalled_at or now
        failed = find_cause(unsignalled) or self._absence.find(ranks)
        if failed is None and (failed := find_consequence(unsignalled)):
            self._suspected_at = self._suspected_at or now
            until_s = self._suspected_at + CAUSE_GRACE_S
            if self._signalled_at:
                until_s = min(until_s, self._signalled_at + LAST_NEWS_S)
            if now < until_s and any(rank.closed is None for rank in ranks):
                self._has_news = True  # look again soon
                return None
        if failed and not failed.error and self._has_no_launcher():
            # A launcher that is interrupted signals its ranks before it ends.
            self._failed_at = self._failed_at or now
            if len(unsignalled) < len(ranks) or now - self._failed_at < GRACE_S:
                failed = None
        if failed:
            if not failed.trouble and self._launcher and self._has_no_launcher():
                return self._judge.launcher_died(self._launcher.pid, failed)
            return self._judge.failed(failed, ranks)
        if signalled and self._signalled_at and now - self._signalled_at > GRACE_S:
            return self._judge.interrupted(signalled)
        late = now - self._save_s
        unsaved = (each for each in ranks if each.save_signal is not None)
        if rank := next((each for each in unsaved if each.save_signalled_s < late), None):
            return self._judge.interrupted(rank)
        return None

    def _has_no_launcher(self) -> bool:
        """Whether the launcher has ended, if it is known."""
        return self._launcher is not None and is_gone(self._launcher)

    def _take(self, peer: Peer, message: Message) -> None:
        """Takes note of a message from a rank or a hub."""
        hello = message.get("hello") or {}
        if "hub" in hello:
            self._group_of[peer] = {}
        elif peer in self._group_of:
            self._take_from_hub(self._group_of[peer], peer, message)
        else:
            if hello and peer not in self._rank_of:
                self._rank_of[peer] = self._add(hello, peer)
            self._note(self._rank_of[peer], message)

    def _take_from_hub(self, group: dict[int, WatchedRank], hub: Peer, message: Message) -> None:
        if "of" in message:
            number = message["of"]
            if "hello" in message and number not in group:
                group[number] = self._add(message["hello"], hub)
            self._note(group[number], message)
        elif "stamps" in message:
            for number, stamp in message["stamps"].items():
                group[int(number)].take_stamp(stamp)
        elif "closed" in message:
            closed = "hub" if message["closed"] == "gone" else message["closed"]
            for rank in group.values():
                rank.close(closed)
            self._has_news = True

    def _add(self, hello: Message, peer: Peer) -> WatchedRank:
        rank = WatchedRank.of(hello, peer)
        if hello.get("launcher") and rank.host == self._host:
            self._note_launcher(int(hello["launcher"]), str(hello.get("session", "")))
        self.ranks.append(rank)
        return rank

    def _note_launcher(self, pid: int, session: str) -> None:
        """Notes what a rank takes for the launcher: none if each rank has a script around it."""
        self._launcher_pids.add(pid)
        self._launcher = None
        if len(self._launcher_pids) == 1:
            with suppress(psutil.Error):
                self._launcher, self._session = psutil.Process(pid), session

    def _note(self, rank: WatchedRank, message: Message) -> None:
        rank.take(message)
        self._has_news |= not URGENT.isdisjoint(message) and not rank.said_bye
        if rank.record is not None and rank.record != self._record:
            self._open_log(rank.record)

    def _open_log(self, record: Path) -> None:
        """Begins to look after a record; errors of this process go to a file beside it."""
        self._record = record
        with suppress(OSError), (record.parent / LOG_NAME).open("ab") as log:
            os.dup2(log.fileno(), 2)

    def _end(self, verdict: Verdict) -> None:
        """Completes the record, tells the ranks to end, and waits until they are gone."""
        reason = verdict.reason + self._end_record(verdict)
        order = {"end": reason, "status": verdict.status, "speak": True}
        begin = time.monotonic()
        while time.monotonic() - begin < FAREWELL_S:
            # Repeated in every round, because a rank may connect after another one has died.
            self._connections.tell(order)
            known = self._record
            self._connections.receive()
            if self._record != known:  # rank 0 may have said which before, but was not heard
                order["end"] = verdict.reason + self._end_record(verdict)
            lost = [rank for rank in self.ranks if rank.is_unreachable]
            there = [rank for rank in self.ranks if not rank.closed and rank not in lost]
            if there or len(self.ranks) < self.num_ranks:
                continue
            if not lost:
                return
            if self._launcher and not self._has_no_launcher():
                end_launcher(self._launcher, self._session)
            return

    def _end_record(self, verdict: Verdict) -> str:
        """Completes the record, if there is one; returns what to add to the reason."""
        from candle_p1.errors import RecordError
        from candle_p1.records.record import end_record

        if self._record is None:
            return ""
        counted = [self.counter[progress.STEPS]] if self.counter else []
        failure = verdict.failure([rank.stamp.steps for rank in self.ranks] + counted)
        try:
            end_record(self._record, verdict.status, failure)
        except (OSError, RecordError) as error:
            return f"; the record cannot be written: {error}"
        return ""


def main() -> None:
    """Runs the watchdog server: prints where it listens, then watches."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bind", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--num-ranks", type=int, required=True)
    parser.add_argument("--num-peers", type=int, help="ranks without a hub, and hubs")
    parser.add_argument("--record", required=True, help="where it is expected; see run_state")
    parser.add_argument("--starter", type=int, default=os.getppid())
    parser.add_argument("--counter", type=int, help="file descriptor of rank 0's progress")
    arguments = parser.parse_args()
    for number in (*SIGNALS, *SAVE_SIGNALS):
        signal.signal(number, signal.SIG_IGN)
    counter = None
    if arguments.counter is not None:
        counter = memoryview(mmap.mmap(arguments.counter, progress.NUM_BYTES)).cast("q")
    num_peers = arguments.num_peers or arguments.num_ranks
    strangers = max_strangers(num_peers)
    with listen(arguments.bind, arguments.port, num_peers) as listener:
        # Ahead of time, because a dying job may leave the server only milliseconds.
        ahead = threading.Thread(target=import_module, args=["candle_p1.records.record"])
        ahead.start()
        token = os.environ[TOKEN_VARIABLE]
        WatchdogServer(
            listener, token, arguments.num_ranks, arguments.starter, strangers, counter
        ).watch()


if __name__ == "__main__":
    main()
