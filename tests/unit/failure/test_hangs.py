"""Which rank is found absent, from what the ranks have reported, by a clock that tests advance."""

from __future__ import annotations

import itertools
import socket

import pytest

from candle_p1.failure import hangs, rank_state
from candle_p1.failure.connections import Peer
from candle_p1.failure.diagnosis import Diagnostician
from candle_p1.failure.hangs import HangDetector
from candle_p1.failure.progress import FOR_ALL, FOR_DISK, FOR_SOME, NOT_WAITING
from candle_p1.failure.progress import ProgressCounters as At
from candle_p1.failure.protocol import Limits
from candle_p1.failure.rank_state import RankState

LIMITS = Limits(stopped_s=10, silent_s=20, hung_s=300, save_s=45)


class Job:
    """Ranks on two nodes, the clock, and what looks at them."""

    def __init__(self):
        self.now = 1000.0
        self.ranks = [
            RankState(rank, f"node{rank // 2}", 100 + rank, phase="train", heard_s=self.now)
            for rank in range(4)
        ]
        self.diagnostician = Diagnostician("elsewhere", 45)

    def monotonic(self):
        return self.now

    def pass_time(self, seconds, silent=(), stamps=()):
        """Passes time, in which all ranks but the silent ones say their stamps every second."""
        for _ in range(seconds):
            self.now += 1
            for rank in self.ranks:
                if rank.rank not in silent:
                    rank.take(list(stamps[rank.rank] if stamps else rank.progress))
            if found := self.detector.find(self.ranks):
                return self.diagnostician.failed(found, self.ranks)
        return None


@pytest.fixture
def job(monkeypatch):
    job = Job()
    for module in (hangs, rank_state):
        monkeypatch.setattr(module, "time", job)
    job.detector = HangDetector(LIMITS, "elsewhere", len(job.ranks))
    return job


def test_a_silent_node_is_found_within_the_limit(job):
    assert job.pass_time(100) is None
    start = job.now
    assert job.pass_time(1, silent=(3,)) is None
    diagnosis = job.pass_time(100, silent=(2, 3))
    assert job.now - start <= LIMITS.silent_s + 1
    assert (diagnosis.failed_rank.rank, diagnosis.failed_rank.host) == (2, "node1")
    for words in ("rank 2 (host node1, pid 102)", "20 s", "the other rank of its host", "train"):
        assert words in diagnosis.reason


def test_a_job_that_is_suspended_as_a_whole_goes_on(job):
    assert job.pass_time(1000, silent=(0, 1, 2, 3)) is None
    assert job.pass_time(2, silent=(2, 3)) is None, "one node is continued before the other"
    assert job.pass_time(1000) is None


def test_a_short_silence_is_forgiven(job):
    for _ in range(10):
        assert job.pass_time(15, silent=(1,)) is None
        assert job.pass_time(1) is None


LATE = [At(8), At(7), At(8), At(8)]
"""Rank 1 has not begun the step that the others compute."""


@pytest.mark.parametrize(
    ("phases", "stamps", "allowed_s", "blamed", "words"),
    [
        pytest.param("tttt", LATE, 300, 1, "step 7", id="does not begin the next step"),
        pytest.param(  # it may be loading, or making the data for all
            "ssss",
            [At(0, 5, FOR_ALL)] * 3 + [At(0, 4, NOT_WAITING)],
            *(1800, 3, ""),
            id="does not come to a collective",
        ),
        pytest.param(
            "tttt",
            [
                At(0, 5, FOR_ALL),
                At(0, 5, FOR_ALL),
                At(0, 4, FOR_SOME),
                At(0, 4, 2),
            ],
            *(300, None, "all ranks have waited for each other"),
            id="wait for each other",
        ),
        pytest.param(
            *("tttl", [At(0, 5, FOR_SOME)] * 4, 1800, None, "for 1800 s"),
            id="wait for each other, and one loads",
        ),
        pytest.param(
            *(
                "tttt",
                [At(8, 5, FOR_DISK)] + [At(8, 6, FOR_ALL)] * 3,
                1800,
                0,
                "",
            ),
            id="waits for its disk",
        ),
    ],
)
def test_a_rank_that_does_not_go_on_is_found(job, phases, stamps, allowed_s, blamed, words):
    for rank, phase in zip(job.ranks, phases, strict=True):
        rank.phase = {"t": "train", "s": "startup", "l": "load"}[phase]
    assert job.pass_time(allowed_s, stamps=stamps) is None
    diagnosis = job.pass_time(2, stamps=stamps)
    assert (diagnosis.failed_rank and diagnosis.failed_rank.rank) == blamed
    assert words in diagnosis.reason


def test_ranks_that_are_all_busy_are_left_alone(job):
    assert job.pass_time(10_000, stamps=[At(8, 3)] * 4) is None


def test_ranks_that_advance_are_left_alone(job):
    for step in range(1000):
        waiting = FOR_ALL if step % 3 else NOT_WAITING
        stamps = [At(step + (rank > 0), step, waiting * (rank > 1)) for rank in range(4)]
        assert job.pass_time(20, stamps=stamps) is None


def test_a_rank_that_hangs_in_a_collective_which_all_others_have_left_is_found(job):
    for rank in job.ranks:
        rank.phase = "load"
    for beyond in (NOT_WAITING, FOR_SOME):
        stamps = [At(0, 5, beyond)] * 3 + [At(0, 5, FOR_ALL)]
        assert job.pass_time(60, stamps=stamps) is None
        diagnosis = job.pass_time(2, stamps=stamps)
        assert diagnosis.failed_rank.rank == 3
        assert "collective that all other ranks have left" in diagnosis.reason
        job.ranks[3].fault = None
        assert job.pass_time(1, stamps=[At(0, 6)] * 4) is None


def test_the_last_one_in_a_gather_waits_for_those_that_have_not_begun_it(job):
    stamps = [
        At(0, 5, FOR_ALL),
        At(0, 5),
        At(0, 5),
        At(0, 4),
    ]
    assert job.pass_time(299, stamps=stamps) is None


def test_a_rank_that_was_silent_and_then_died_is_not_unreachable(job):
    with socket.socket() as connection:
        rank = job.ranks[0]
        rank.peer = Peer(connection, since_s=0.0, closed=True, probed_s=0.0)
        assert rank.is_unreachable
        rank.take({"closed": "gone"})
        assert not rank.is_unreachable


def test_a_rank_that_has_said_goodbye_is_not_blamed_for_its_lost_node(job):
    job.ranks[2].take({"bye": True})
    for rank in job.ranks[2:]:
        rank.take({"closed": "unreachable"})
    assert job.diagnostician.failed(job.ranks[3], job.ranks).failed_rank.rank == 3


def test_time_in_which_ranks_are_suspended_does_not_count_against_one(job):
    for silent in itertools.islice(itertools.cycle([(0, 1, 2, 3), ()]), 40):
        assert job.pass_time(9, silent=silent, stamps=LATE) is None


@pytest.mark.parametrize(
    ("steps", "reporters", "blamed"),
    [((8, 7, 8, 8), (0, 2, 3), 1), ((8, 8, 8, 8), (0, 2, 3), 1), ((8, 8, 8, 8), (0, 1), None)],
)
def test_horovods_stall_is_blamed_on_who_is_behind_or_was_not_there(job, steps, reporters, blamed):
    for rank in job.ranks:
        rank.take([steps[rank.rank], 0, 0])
        if rank.rank in reporters:
            rank.take({"error": {"message": "Horovod has been shut down", "stalled": True}})
    diagnosis = job.diagnostician.failed(job.ranks[0], job.ranks)
    assert (diagnosis.failed_rank and diagnosis.failed_rank.rank) == blamed
