"""How a run ended: which rank hangs, failed or was interrupted first, and why, in words.

A rank hangs if it is silent, stopped, or does not come to where the others wait for it. Time counts
only while other ranks are heard, or all of them, because a job may be suspended as a whole. A rank
that hangs still says how far it has come, and one that is busy for long does not advance, either.
So what counts is that others wait for it: in a collective or a step of training that it has not
begun, or after a collective that all but it have left.
"""

from __future__ import annotations

import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from candle_p1.failure._native import process_state, was_stopped
from candle_p1.failure.connections import ProcessFault
from candle_p1.failure.progress import FOR_ALL, FOR_DISK, NOT_WAITING
from candle_p1.failure.protocol import AWAKE_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from candle_p1.failure.connections import RankState
    from candle_p1.failure.protocol import Limits
    from candle_p1.records.types import Failure

STOPPED, HALTED = "T", "t"
"""States of processes in Linux's /proc: by a signal, and by a debugger."""


class HangDetector:
    """Looks at the ranks again and again, and at the processes of those on this host."""

    def __init__(self, limits: Limits, host: str, num_ranks: int) -> None:
        self._limits, self._host, self._num_ranks = limits, host, num_ranks
        self._looked_s = time.monotonic()

    def find(self, ranks: Sequence[RankState]) -> RankState | None:
        """Returns a rank that has been silent, stopped or waited for too long, with its fault."""
        now = time.monotonic()
        seconds, self._looked_s = min(now - self._looked_s, 1.0), now
        silent = [rank for rank in ranks if not rank.is_awake]
        # Those that have connected first have nothing to say until all others have.
        some_awake = len(silent) < len(ranks) == self._num_ranks
        all_awake = not silent
        for rank in ranks:
            rank.silent_s = rank.silent_s + seconds * some_awake if not rank.is_awake else 0.0
            rank.idle_s += seconds * all_awake
        for rank in silent:
            if rank.peer and some_awake:
                rank.peer.probe()
            state = process_state(rank.pid) if rank.host == self._host else ""
            if state == HALTED:
                continue
            if state == STOPPED and rank.silent_s > self._limits.stopped_s:
                rank.fault = ProcessFault(was_stopped(self._limits.stopped_s))
            elif rank.silent_s > 0 and rank.silent_s + AWAKE_S > self._limits.silent_s:
                # The ranks of a lost node were heard last at different moments.
                rank = min((r for r in silent if r.host == rank.host), key=lambda r: r.rank)
                rank.fault = ProcessFault(self._explain_silence(rank, silent))
            if rank.fault:
                return rank
        return self._find_hung(ranks) if all_awake and len(ranks) == self._num_ranks else None

    def _explain_silence(self, rank: RankState, silent: Sequence[RankState]) -> str:
        what = f"was not heard from for {self._limits.silent_s:g} s"
        num_others = sum(each.host == rank.host for each in silent) - 1
        if num_others:
            ranks = "the other rank" if num_others == 1 else f"{num_others} other ranks"
            what += f", and neither was {ranks} of its host"
        answers = rank.peer.answers if rank.peer else None
        if answers is None:
            return f"{what}: it is stopped, or its node is lost or cut off from the network"
        if answers:
            return f"{what}, although its node answers: it is stopped"
        return f"{what}: its node is lost or cut off from the network"

    def _find_hung(self, ranks: Sequence[RankState]) -> RankState | None:
        if len(ranks) < 2 or any(rank.said_bye for rank in ranks):
            return None
        if found := self._find_left_behind(ranks):
            return found
        idle_s = min(rank.idle_s for rank in ranks)
        if idle_s <= self._limits.hung_s:
            return None
        awaited = self._awaited(ranks)
        if not awaited:
            limit_s = self._limit_s(ranks)
            if idle_s <= limit_s:
                return None
            reporter = min(ranks, key=lambda rank: (rank.progress.position, rank.rank))
            what = f"all ranks have waited for each other for {limit_s:g} s"
            reporter.fault = ProcessFault(what, is_common=True)
            return reporter
        if len(awaited) == len(ranks):
            return None
        rank = min(awaited, key=lambda rank: (rank.progress.waiting, rank.rank))
        limit_s = self._limit_s([rank])
        if idle_s <= limit_s:
            return None
        others = f" and {len(awaited) - 1} more" if len(awaited) > 1 else ""
        rank.fault = ProcessFault(
            f"hangs{others}: the other ranks have waited for it for {limit_s:g} s, at its"
            f" step {rank.progress.steps}"
        )
        return rank

    def _limit_s(self, ranks: Sequence[RankState]) -> float:
        """Returns how long ranks may take: longer outside of training, and for their disks.

        One rank may make the data, or have to load its libraries from a slow file system.
        """
        is_training = all((rank.phase or "").split("/")[0] == "train" for rank in ranks)
        is_writing = any(rank.progress.waiting == FOR_DISK for rank in ranks)
        return self._limits.hung_s * (1 if is_training and not is_writing else 6)

    def _find_left_behind(self, ranks: Sequence[RankState]) -> RankState | None:
        """Returns the rank that is still in a collective which all others have left.

        It only has to receive.
        """
        first, second = sorted(ranks, key=lambda rank: rank.progress.position)[:2]
        limit_s = min(self._limits.hung_s, 60.0)
        is_behind = first.progress.position < second.progress.position
        if first.progress.waiting != FOR_ALL or not is_behind or first.idle_s <= limit_s:
            return None
        first.fault = ProcessFault(
            f"hangs in a collective that all other ranks have left for {limit_s:g} s"
        )
        return first

    @staticmethod
    def _awaited(ranks: Sequence[RankState]) -> list[RankState]:
        """Returns the ranks that do not wait for others."""
        fewest_steps = min(rank.progress.steps for rank in ranks)
        return [
            rank
            for rank in ranks
            if rank.progress.waiting in (NOT_WAITING, FOR_DISK)
            and rank.progress.steps == fewest_steps
        ]


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
        number = rank.signal or rank.save_signal or 0
        name = next((each.name for each in signal.Signals if each == number), "a signal")
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
