"""How a run ended: which rank failed or was interrupted first, and why, in words."""

from __future__ import annotations

import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from candle_p1.failure.rank_state import RankState
    from candle_p1.records.types import Failure

SIGNAL_NAMES = {number.value: number.name for number in signal.Signals}
MEMORY = Path("/dev/shm")
HOROVOD_SHUTDOWN = "Horovod has been shut down"
"""The error of Horovod's operations after a stall, and after another rank has died."""
NOT_REACHED = "did not reach the collective"
"""The error of averages in shared memory after a stall."""
LOST_PEER = (
    HOROVOD_SHUTDOWN,
    NOT_REACHED,
    "HorovodInternalError",
    "Connection reset by peer",  # Gloo (Horovod's and JAX's), UCX, libfabric, gRPC
    "Connection closed by peer",
    "Connection refused",  # one that had to be made anew
    "Broken pipe",
    "Socket closed",  # gRPC, Open MPI
    "Gloo ",  # "Gloo all-reduce failed"; also if it has waited too long
    "coordination service",  # JAX's
    "JAX distributed service",
    "MPI_ERR_PROC_",  # failed, aborted
    "MPI_ERR_REVOKED",
    "MPI_ERR_OTHER",  # what most MPI libraries say of a lost connection
    "NCCL",  # "unhandled system error", "remote process exited or there was a network error"
)
"""Parts of messages, whatever the case of the letters, of errors that a rank may have only because
another rank has ended. They come from libraries, whose types are not imported here. One that is
mistaken for a consequence costs a moment, in which the server looks for a cause."""


def may_have_lost_peer(message: str) -> bool:
    """Whether an error, by its class and message, may be the consequence of another rank's end."""
    text = message.lower()
    return any(sign.lower() in text for sign in LOST_PEER)


def has_stalled(message: str) -> bool:
    """Whether an error may be that of a collective which has waited for too long."""
    return HOROVOD_SHUTDOWN in message or NOT_REACHED in message


@dataclass
class Diagnosis:
    """How a run ended, "failed" or "interrupted", and why."""

    status: str
    reason: str
    failed_rank: RankState | None  # that is to blame; None: none, or it is not known which
    reporter: RankState  # that has reported it, or the failed one

    def failure(self, steps: Iterable[int]) -> Failure:
        """Returns what the record says; the steps are those that ranks have begun."""
        from candle_p1.records.types import Failure  # takes too long for the server's start

        rank, error = self.failed_rank, self.reporter.error or {}
        return Failure(
            reason=self.reason,
            rank=rank.rank if rank else None,
            host=rank.host if rank else None,
            pid=rank.pid if rank else None,
            phase=(rank or self.reporter).phase,
            steps=max(steps),
            traceback=error.get("traceback") or None,
        )


def find_cause(ranks: Iterable[RankState]) -> RankState | None:
    """Returns the rank whose end, or what it reports, no other rank's end explains; None so far.

    Other ranks that are lost as well died of it, or the launcher has ended them.
    """
    ranks = list(ranks)
    unexplained = [rank for rank in ranks if rank.is_lost and not rank.ends_itself]
    return (
        next((rank for rank in ranks if rank.fault), None)
        or next((rank for rank in ranks if rank.has_own_error), None)
        or _first_closed(rank for rank in unexplained if not rank.error)
    )


def find_consequence(ranks: Iterable[RankState]) -> RankState | None:
    """Returns the first rank that has ended itself, or has lost another rank; None if none has.

    It is the one to name if there is no cause.
    """
    ranks = list(ranks)
    return _first_closed(rank for rank in ranks if rank.is_lost and not rank.error) or next(
        (rank for rank in ranks if rank.error), None
    )


def _first_closed(ranks: Iterable[RankState]) -> RankState | None:
    return min(ranks, key=lambda rank: rank.closed_s, default=None)


def count_oom_kills() -> int | None:
    """Returns how many processes this host's out-of-memory killer has ended; None if unknown."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return None


class Diagnostician:
    """Finds out which rank is to blame, on the server's host.

    A run may take `save_s` to save and end after a signal.
    """

    def __init__(self, host: str, save_s: float) -> None:
        self._host, self._save_s = host, save_s
        self._oom_kills = count_oom_kills()

    def interrupted(self, rank: RankState) -> Diagnosis:
        """Returns that a rank was interrupted by a signal."""
        name = SIGNAL_NAMES.get(rank.signal or rank.save_signal or 0, "a signal")
        unsaved = ""
        if rank.signal is None:
            unsaved = f"; the run did not save and end within {self._save_s:g} s"
        reason = f"interrupted{_during(rank)} by {name}, which {rank} received first{unsaved}"
        return Diagnosis("interrupted", reason, rank, rank)

    def launcher_died(self, pid: int, reporter: RankState) -> Diagnosis:
        """Returns that the launcher was killed.

        Its ranks do not survive it for long. An error of theirs is a consequence, such as that of a
        terminal which the launcher had opened.
        """
        reporter.error = None
        reason = f"the launcher (host {self._host}, pid {pid}) died{_during(reporter)}"
        return Diagnosis("failed", reason, None, reporter)

    def failed(self, rank: RankState, ranks: Sequence[RankState]) -> Diagnosis:
        """Returns that a rank has failed, or has reported a failure."""
        if rank.fault:
            return self._faulty(rank)
        if rank.error and rank.error.get("stalled"):
            return self._stalled(ranks)
        if rank.error:
            reason = f"{rank} failed{_during(rank)}: {rank.error['message']}"
        elif rank.closed == "unreachable":
            lost = (r for r in ranks if r.host == rank.host and (r.is_lost or not r.is_awake))
            rank = min(lost, key=lambda r: r.rank)
            reason = (
                f"{rank} cannot be reached any more{_during(rank)}: its node is lost or cut off"
                " from the network"
            )
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
        return Diagnosis("failed", reason, rank, rank)

    @staticmethod
    def _faulty(rank: RankState) -> Diagnosis:
        fault = rank.fault
        assert fault is not None
        if fault.launcher:
            who = f"the launcher (host {rank.host}, pid {fault.launcher}) "
            return Diagnosis("failed", f"{who}{fault.what}{_during(rank)}", None, rank)
        if fault.is_common:
            return Diagnosis("failed", f"{fault.what}{_during(rank)}", None, rank)
        begin, colon, rest = fault.what.partition(":")
        return Diagnosis("failed", f"{rank} {begin}{_during(rank)}{colon}{rest}", rank, rank)

    @staticmethod
    def _stalled(ranks: Sequence[RankState]) -> Diagnosis:
        """Returns which rank the others have waited for until Horovod ended the collective.

        It is behind in its steps; or it is the only one that has not got Horovod's error, because
        it was not in that collective.
        """
        limit = "until the time limit (stall_shutdown_s)"
        rank, *others = sorted(ranks, key=lambda rank: rank.progress.steps)
        absent = [each for each in ranks if each.error is None]
        if others and rank.progress.steps == others[0].progress.steps:
            if len(absent) != 1:
                reason = (
                    f"a collective stalled{_during(rank)} {limit}; no rank is behind the others:"
                    " see Horovod's warnings"
                )
                return Diagnosis("failed", reason, None, rank)
            rank = absent[0]
        reason = (
            f"{rank} stalled{_during(rank)}, at step {rank.progress.steps}: the other ranks waited"
            f" for it in a collective {limit}"
        )
        return Diagnosis("failed", reason, rank, rank)

    def _killed_for_memory(self, rank: RankState) -> str:
        if rank.host != self._host or self._oom_kills is None:
            return ""
        num_kills = (count_oom_kills() or 0) - self._oom_kills
        if num_kills <= 0:
            return ""
        return f" (processes that the kernel killed for lack of memory: {num_kills})"

    def _without_room(self, rank: RankState) -> str:
        if rank.host != self._host or not MEMORY.exists():
            return ""
        usage = shutil.disk_usage(MEMORY)
        if not usage.total or usage.free >= 1 << 20:
            return ""
        return (
            f" (the {usage.total >> 20} MiB of {MEMORY} are full: SIGBUS kills a process that then"
            " writes to shared memory; enlarge it, in a container with --shm-size)"
        )


def _during(rank: RankState) -> str:
    return f" during {rank.phase}" if rank.phase else ""
