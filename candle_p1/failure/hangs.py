"""Finds ranks that are silent, stopped, or do not come to where the others wait for them.

Time counts only while other ranks are heard, or all of them, because a job may be suspended as a
whole. A rank that hangs still says how far it has come, and one that is busy for long does not
advance, either. So what counts is that others wait for it: in a collective or a step of training
that it has not begun, or after a collective that all but it have left.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from candle_p1.failure._native import process_state, was_stopped
from candle_p1.failure.progress import FOR_ALL, FOR_DISK, NOT_WAITING
from candle_p1.failure.protocol import AWAKE_S
from candle_p1.failure.rank_state import ProcessFault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from candle_p1.failure.protocol import Limits
    from candle_p1.failure.rank_state import RankState

LEFT_S = 60.0
"""How long a rank may remain in a collective that all others have left: it only has to receive."""
OUTSIDE_TRAINING = 6
"""So many times as long as in training, ranks may wait in other phases: one rank may make the data,
or have to load its libraries from a slow file system."""
TRAINING = "train"
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
        """Returns how long ranks may take: longer outside of training, and for their disks."""
        is_training = all((rank.phase or "").split("/")[0] == TRAINING for rank in ranks)
        is_writing = any(rank.progress.waiting == FOR_DISK for rank in ranks)
        return self._limits.hung_s * (1 if is_training and not is_writing else OUTSIDE_TRAINING)

    def _find_left_behind(self, ranks: Sequence[RankState]) -> RankState | None:
        """Returns the rank that is still in a collective which all others have left."""
        first, second = sorted(ranks, key=lambda rank: rank.progress.position)[:2]
        limit_s = min(self._limits.hung_s, LEFT_S)
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
