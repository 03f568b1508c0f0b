"""How a run ended: which rank failed or was interrupted first, and why, in words."""

from __future__ import annotations

import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from candle_p1.distributed.job_guard import Trouble

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from candle_p1.distributed.watchdog.watched_rank import WatchedRank
    from candle_p1.records.types import Failure

SIGNAL_NAMES = {number.value: number.name for number in signal.Signals}
MEMORY = Path("/dev/shm")
NO_DEATH = {
    "unreachable": "cannot be reached any more{}: its node is lost or cut off from the network",
    "hub": "is not watched any more{}: the hub of its group has ended (docs/faults.md)",
}
"""What else may have ended a rank's connection."""


@dataclass
class Verdict:
    """How a run ended.

    Attributes:
        status: "failed" or "interrupted".
        reason: Why.
        culprit: The rank that is to blame; None: none, or it is not known which.
        witness: The rank that has reported it, or the culprit.
    """

    status: str
    reason: str
    culprit: WatchedRank | None
    witness: WatchedRank

    def failure(self, steps: Iterable[int]) -> Failure:
        """Returns what the record says.

        Args:
            steps: The training steps that ranks have begun.
        """
        from candle_p1.records.types import Failure  # takes too long for the server's start

        culprit, error = self.culprit, self.witness.error or {}
        return Failure(
            reason=self.reason,
            rank=culprit.rank if culprit else None,
            host=culprit.host if culprit else None,
            pid=culprit.pid if culprit else None,
            phase=(culprit or self.witness).phase,
            steps=max(steps),
            traceback=error.get("traceback") or None,
        )


def find_cause(ranks: Iterable[WatchedRank]) -> WatchedRank | None:
    """Returns the rank whose end, or what it reports, no other rank's end explains; None so far.

    Other ranks that are lost as well died of it, or the launcher has ended them.
    """
    ranks = list(ranks)
    unexplained = [rank for rank in ranks if rank.is_lost and not rank.ends_itself]
    return (
        next((rank for rank in ranks if rank.trouble), None)
        or next((rank for rank in ranks if rank.has_own_error), None)
        or _first_closed(rank for rank in unexplained if not rank.error)
    )


def find_consequence(ranks: Iterable[WatchedRank]) -> WatchedRank | None:
    """Returns the first rank that has ended itself, or has lost another rank; None if none has.

    It is the one to name if there is no cause.
    """
    ranks = list(ranks)
    return _first_closed(rank for rank in ranks if rank.is_lost and not rank.error) or next(
        (rank for rank in ranks if rank.error), None
    )


def _first_closed(ranks: Iterable[WatchedRank]) -> WatchedRank | None:
    return min(ranks, key=lambda rank: rank.closed_s, default=None)


@dataclass
class Judge:
    """Finds out which rank is to blame.

    Attributes:
        host: The name of this host.
        save_s: How long the run may take to save and end after a signal.
        oom_kills: How many processes the kernel had killed when the run began; None: unknown.
    """

    host: str
    save_s: float
    oom_kills: int | None

    def interrupted(self, rank: WatchedRank) -> Verdict:
        """Returns that a rank was interrupted by a signal."""
        name = SIGNAL_NAMES.get(rank.signal or rank.save_signal or 0, "a signal")
        unsaved = ""
        if rank.signal is None:
            unsaved = f"; the run did not save and end within {self.save_s:g} s"
        reason = f"interrupted{_during(rank)} by {name}, which {rank} received first{unsaved}"
        return Verdict("interrupted", reason, rank, rank)

    def launcher_died(self, pid: int, witness: WatchedRank) -> Verdict:
        """Returns that the launcher was killed.

        Its ranks do not survive it for long. An error of theirs is a consequence, such as that of a
        terminal which the launcher had opened.
        """
        witness.error = None
        reason = f"{Trouble('died', pid, is_launcher=True)}{_during(witness)}"
        return Verdict("failed", reason, None, witness)

    def failed(self, rank: WatchedRank, ranks: Sequence[WatchedRank]) -> Verdict:
        """Returns that a rank has failed, or has reported a failure."""
        if rank.trouble:
            return self._in_trouble(rank, ranks)
        if rank.error and rank.error.get("stalled"):
            return self._stalled(ranks)
        if rank.error:
            reason = f"{rank} failed{_during(rank)}: {rank.error['message']}"
        elif how := NO_DEATH.get(rank.closed or ""):
            lost = (r for r in ranks if r.host == rank.host and (r.is_lost or not r.is_awake))
            rank = min(lost, key=lambda r: r.rank)
            reason = f"{rank} {how.format(_during(rank))}"
        elif rank.ends_itself:
            reason = (
                f"{rank} ended{_during(rank)} by itself: its program, or a library such as MPI,"
                " called exit or abort"
            )
        else:
            reason = (
                f"{rank} died{_during(rank)}: it was killed, crashed or ran out of memory"
                f"{self._killed_for_memory(rank)}{self._without_room(rank)}"
            )
        return Verdict("failed", reason, rank, rank)

    def _in_trouble(self, reporter: WatchedRank, ranks: Sequence[WatchedRank]) -> Verdict:
        assert reporter.trouble is not None
        what, pid = reporter.trouble["what"], reporter.trouble.get("pid", reporter.pid)
        if reporter.trouble.get("is_launcher"):
            who = f"the launcher (host {reporter.host}, pid {pid}) "
            return Verdict("failed", f"{who}{what}{_during(reporter)}", None, reporter)
        if reporter.trouble.get("is_common"):
            return Verdict("failed", f"{what}{_during(reporter)}", None, reporter)
        seen = (rank for rank in ranks if (rank.host, rank.pid) == (reporter.host, pid))
        culprit = next(seen, reporter)
        begin, colon, rest = what.partition(":")
        return Verdict(
            "failed", f"{culprit} {begin}{_during(culprit)}{colon}{rest}", culprit, reporter
        )

    @staticmethod
    def _stalled(ranks: Sequence[WatchedRank]) -> Verdict:
        """Returns which rank the others have waited for until Horovod ended the collective.

        It is behind in its steps; or it is the only one that has not got Horovod's error, because
        it was not in that collective.
        """
        limit = "until the time limit (stall_shutdown_s)"
        rank, *others = sorted(ranks, key=lambda rank: rank.stamp.steps)
        absent = [each for each in ranks if each.error is None]
        if others and rank.stamp.steps == others[0].stamp.steps:
            if len(absent) != 1:
                reason = (
                    f"a collective stalled{_during(rank)} {limit}; no rank is behind the others:"
                    " see Horovod's warnings"
                )
                return Verdict("failed", reason, None, rank)
            rank = absent[0]
        reason = (
            f"{rank} stalled{_during(rank)}, at step {rank.stamp.steps}: the other ranks waited for"
            f" it in a collective {limit}"
        )
        return Verdict("failed", reason, rank, rank)

    def _killed_for_memory(self, rank: WatchedRank) -> str:
        if rank.host != self.host or self.oom_kills is None:
            return ""
        num_kills = (count_oom_kills() or 0) - self.oom_kills
        if num_kills <= 0:
            return ""
        return f" (processes that the kernel killed for lack of memory: {num_kills})"

    def _without_room(self, rank: WatchedRank) -> str:
        if rank.host != self.host or not MEMORY.exists():
            return ""
        usage = shutil.disk_usage(MEMORY)
        if not usage.total or usage.free >= 1 << 20:
            return ""
        return (
            f" (the {usage.total >> 20} MiB of {MEMORY} are full: SIGBUS kills a process that then"
            " writes to shared memory; enlarge it, in a container with --shm-size)"
        )


def _during(rank: WatchedRank) -> str:
    return f" during {rank.phase}" if rank.phase else ""


def count_oom_kills() -> int | None:
    """Returns how many processes this host's out-of-memory killer has ended; None if unknown."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return None
