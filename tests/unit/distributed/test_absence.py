"""Which rank is found absent, from what the ranks have reported, by a clock that tests advance."""

from __future__ import annotations

import itertools
import socket

import pytest

from candle_p1.distributed.progress import FOR_ALL, FOR_DISK, FOR_SOME, NOT_WAITING
from candle_p1.distributed.watchdog import absence, watched_rank
from candle_p1.distributed.watchdog.absence import AbsenceDetector
from candle_p1.distributed.watchdog.connections import Peer
from candle_p1.distributed.watchdog.protocol import Stamp
from candle_p1.distributed.watchdog.settings import Limits
from candle_p1.distributed.watchdog.verdict import Judge
from candle_p1.distributed.watchdog.watched_rank import WatchedRank

LIMITS = Limits(stopped_s=10, silent_s=20, hung_s=300, save_s=45)


class Job:
    """Ranks on two nodes, the clock, and what looks at them."""

    def __init__(self, num_ranks=4, phase="train"):
        self.now = 1000.0
        self.ranks = [
            WatchedRank(rank, f"node{rank // 2}", 100 + rank, phase=phase, heard_s=self.now)
            for rank in range(num_ranks)
        ]
        self.phase = phase
        self.judge = Judge("elsewhere", 45, None)

    def monotonic(self):
        return self.now

    def pass_time(self, seconds, silent=(), stamps=()):
        """Passes time, in which all ranks but the silent ones say their stamps every second."""
        for _ in range(seconds):
            self.now += 1
            for rank in self.ranks:
                if rank.rank not in silent:
                    rank.take_stamp(stamps[rank.rank] if stamps else rank.stamp)
            if found := self.detector.find(self.ranks):
                return self.judge.failed(found, self.ranks)
        return None


@pytest.fixture
def job(monkeypatch):
    job = Job()
    for module in (absence, watched_rank):
        monkeypatch.setattr(module, "time", job)
    job.detector = AbsenceDetector(LIMITS, "elsewhere", len(job.ranks))
    return job


def test_a_silent_node_is_found_within_the_limit(job):
    assert job.pass_time(100) is None
    start = job.now
    assert job.pass_time(1, silent=(3,)) is None
    verdict = job.pass_time(100, silent=(2, 3))
    assert job.now - start <= LIMITS.silent_s + 1
    assert (verdict.culprit.rank, verdict.culprit.host) == (2, "node1")
    for words in ("rank 2 (host node1, pid 102)", "20 s", "the other rank of its host", "train"):
        assert words in verdict.reason


def test_a_job_that_is_suspended_as_a_whole_goes_on(job):
    assert job.pass_time(1000, silent=(0, 1, 2, 3)) is None
    assert job.pass_time(2, silent=(2, 3)) is None, "one node is continued before the other"
    assert job.pass_time(1000) is None


def test_a_short_silence_is_forgiven(job):
    for _ in range(10):
        assert job.pass_time(15, silent=(1,)) is None
        assert job.pass_time(1) is None


def test_a_rank_that_does_not_begin_the_next_step_is_found(job):
    stamps = [Stamp(8), Stamp(7), Stamp(8), Stamp(8)]
    assert job.pass_time(300, stamps=stamps) is None
    verdict = job.pass_time(2, stamps=stamps)
    assert verdict.culprit.rank == 1
    assert "step 7" in verdict.reason


def test_a_rank_that_does_not_come_to_a_collective_is_found_after_a_longer_time(job):
    """It may be loading, or making the data for all."""
    for rank in job.ranks:
        rank.phase = "startup"
    stamps = [Stamp(0, 5, FOR_ALL)] * 3 + [Stamp(0, 4, NOT_WAITING)]
    assert job.pass_time(1800, stamps=stamps) is None
    assert job.pass_time(2, stamps=stamps).culprit.rank == 3


def test_ranks_that_are_all_busy_are_left_alone(job):
    assert job.pass_time(10_000, stamps=[Stamp(8, 3)] * 4) is None


def test_ranks_that_advance_are_left_alone(job):
    for step in range(1000):
        waiting = FOR_ALL if step % 3 else NOT_WAITING
        stamps = [Stamp(step + (rank > 0), step, waiting * (rank > 1)) for rank in range(4)]
        assert job.pass_time(20, stamps=stamps) is None


def test_a_rank_that_hangs_in_a_collective_which_all_others_have_left_is_found(job):
    for rank in job.ranks:
        rank.phase = "load"
    for beyond in (NOT_WAITING, FOR_SOME):
        stamps = [Stamp(0, 5, beyond)] * 3 + [Stamp(0, 5, FOR_ALL)]
        assert job.pass_time(60, stamps=stamps) is None
        verdict = job.pass_time(2, stamps=stamps)
        assert verdict.culprit.rank == 3
        assert "collective that all other ranks have left" in verdict.reason
        job.ranks[3].trouble = None
        assert job.pass_time(1, stamps=[Stamp(0, 6)] * 4) is None


def test_the_last_one_in_a_gather_waits_for_those_that_have_not_begun_it(job):
    stamps = [Stamp(0, 5, FOR_ALL), Stamp(0, 5), Stamp(0, 5), Stamp(0, 4)]
    assert job.pass_time(299, stamps=stamps) is None


def test_ranks_that_wait_for_each_other_are_not_blamed(job):
    stamps = [Stamp(0, 5, FOR_ALL), Stamp(0, 5, FOR_ALL), Stamp(0, 4, FOR_SOME), Stamp(0, 4, 2)]
    assert job.pass_time(300, stamps=stamps) is None
    verdict = job.pass_time(2, stamps=stamps)
    assert verdict.culprit is None
    assert "all ranks have waited for each other" in verdict.reason


def test_ranks_that_load_may_wait_for_each_other_for_longer(job):
    job.ranks[3].phase = "load"
    stamps = [Stamp(0, 5, FOR_SOME)] * 4
    assert job.pass_time(1800, stamps=stamps) is None
    assert "for 1800 s" in job.pass_time(2, stamps=stamps).reason


def test_a_rank_that_waits_for_its_disk_is_given_longer(job):
    stamps = [Stamp(8, 5, FOR_DISK)] + [Stamp(8, 6, FOR_ALL)] * 3
    assert job.pass_time(1800, stamps=stamps) is None
    assert job.pass_time(2, stamps=stamps).culprit.rank == 0


def test_a_rank_that_was_silent_and_then_died_is_not_unreachable(job):
    with socket.socket() as connection:
        rank = job.ranks[0]
        rank.peer = Peer(connection, heard_s=0.0, closed=True, probed_s=0.0)
        assert rank.is_unreachable
        rank.take({"closed": "gone"})
        assert not rank.is_unreachable


def test_a_rank_that_has_said_goodbye_is_not_blamed_for_its_lost_node(job):
    job.ranks[2].take({"bye": True})
    for rank in job.ranks[2:]:
        rank.take({"closed": "unreachable"})
    assert job.judge.failed(job.ranks[3], job.ranks).culprit.rank == 3


def test_time_in_which_ranks_are_suspended_does_not_count_against_one(job):
    stamps = [Stamp(8), Stamp(7), Stamp(8), Stamp(8)]
    for silent in itertools.islice(itertools.cycle([(0, 1, 2, 3), ()]), 40):
        assert job.pass_time(9, silent=silent, stamps=stamps) is None


@pytest.mark.parametrize(
    ("steps", "reporters", "blamed"),
    [((8, 7, 8, 8), (0, 2, 3), 1), ((8, 8, 8, 8), (0, 2, 3), 1), ((8, 8, 8, 8), (0, 1), None)],
)
def test_horovods_stall_is_blamed_on_who_is_behind_or_was_not_there(job, steps, reporters, blamed):
    for rank in job.ranks:
        rank.take({"steps": steps[rank.rank]})
        if rank.rank in reporters:
            rank.take({"error": {"message": "Horovod has been shut down", "stalled": True}})
    verdict = job.judge.failed(job.ranks[0], job.ranks)
    assert (verdict.culprit and verdict.culprit.rank) == blamed
