"""Which rank the watchdog server names, for every order in which the news of ranks may arrive."""

from __future__ import annotations

from collections import namedtuple

import pytest

from candle_p1.failure import diagnosis, hangs, rank_state, server
from candle_p1.failure.protocol import Limits
from candle_p1.failure.rank_state import RankState
from candle_p1.failure.server import CAUSE_GRACE_S, WatchdogServer

Usage = namedtuple("Usage", "total free")
STEP_S = 0.001
GONE = {"closed": "gone"}
UNREACHABLE = {"closed": "unreachable"}
WORD = {"last_word": True}
SIGTERM = {"signal": 15}
LOST_PEER = {"error": {"message": "Connection reset by peer", "lost_peer": True}}
STALLED = {"error": {"message": "Horovod has been shut down", "stalled": True}}
OWN = {"error": {"message": "ValueError: no"}}
BYE = {"bye": True}

CASES = {
    "one is killed, MPI ends another": (3, {3: [GONE], 0: [WORD, GONE]}),
    "one is killed, MPI ends all others": (
        3,
        {3: [GONE], **{rank: [WORD, GONE] for rank in range(3)}},
    ),
    "one is killed, another notices": (3, {3: [GONE], 0: [LOST_PEER, BYE, GONE]}),
    "one is killed, Horovod ends": (3, {3: [GONE], 0: [STALLED], 1: [STALLED, WORD, GONE]}),
    "one is killed, all kinds of ends": (
        3,
        {3: [GONE], 0: [LOST_PEER], 1: [WORD, GONE], 2: [SIGTERM, GONE]},
    ),
    "a node is lost": (3, {3: [UNREACHABLE], 0: [WORD, GONE], 1: [LOST_PEER]}),
    "an error, others notice": (2, {2: [OWN], 0: [LOST_PEER, GONE], 1: [WORD, GONE]}),
    "one ends itself, another notices": (1, {1: [WORD, GONE], 0: [LOST_PEER]}),
    "one ends itself, others are ended": (
        1,
        {1: [WORD, GONE], **{rank: [SIGTERM, GONE] for rank in (0, 2, 3)}},
    ),
    "one has lost a peer that is there": (0, {0: [LOST_PEER], 1: [SIGTERM]}),
}
"""Who is to be named, and what each rank says, in its order."""


def orders_of(news):
    """Returns all orders of (rank, message) in which each rank's messages keep theirs."""
    if not any(news.values()):
        return [[]]
    return [
        [(rank, messages[0]), *rest]
        for rank, messages in news.items()
        if messages
        for rest in orders_of(news | {rank: messages[1:]})
    ]


class Job:
    """The server, four ranks on two nodes, and their clock."""

    def __init__(self):
        self.now = 1000.0
        self.server = WatchdogServer(4, Limits(), "token")
        self.ranks = [
            RankState(rank, f"node{rank // 2}", 100 + rank, heard_s=self.now) for rank in range(4)
        ]
        self.server.ranks.extend(self.ranks)

    def monotonic(self):
        return self.now

    def diagnose(self, news):
        """Passes on the news, a moment apart; returns the diagnosis, and when it was, in s."""
        for rank, message in news:
            self.ranks[rank].take(message)
            if diagnosis := self.server.diagnose():
                return diagnosis, self.now - 1000.0
            self.now += STEP_S
        while not (diagnosis := self.server.diagnose()):
            self.now += STEP_S
        return diagnosis, self.now - 1000.0


@pytest.fixture
def diagnose(monkeypatch):
    """Returns a function that diagnoses news, each time by another server."""

    def diagnose(news):
        job = Job()
        for module in (hangs, server, rank_state):
            monkeypatch.setattr(module, "time", job)
        return job.diagnose(news)

    return diagnose


@pytest.mark.parametrize("case", CASES)
def test_the_rank_whose_end_no_other_explains_is_named_in_every_order(case, diagnose):
    named, news = CASES[case]
    for order in orders_of(news):
        diagnosis, when_s = diagnose(order)
        assert (diagnosis.status, diagnosis.failed_rank.rank) == ("failed", named), order
        assert when_s < CAUSE_GRACE_S + 1


def test_of_ranks_that_end_themselves_the_first_is_named(diagnose):
    diagnosis, _ = diagnose([(2, WORD), (1, WORD), (2, GONE), (1, GONE)])
    assert diagnosis.failed_rank.rank == 2
    assert "by itself" in diagnosis.reason


def test_news_of_a_cause_is_not_waited_for_in_vain(diagnose):
    """The launcher kills what is left, and a scheduler may leave the server only milliseconds."""
    first = [(0, WORD), (0, GONE)]
    assert diagnose(first)[1] >= CAUSE_GRACE_S
    diagnosis, when_s = diagnose([*first, (1, SIGTERM), (2, SIGTERM), (3, SIGTERM)])
    assert (diagnosis.status, diagnosis.failed_rank.rank) == ("failed", 0)
    assert when_s < 0.1  # before the launcher kills who could print the reason
    others = [(rank, each) for rank in (1, 2, 3) for each in (SIGTERM, GONE)]
    diagnosis, when_s = diagnose(first + others)
    assert (diagnosis.status, diagnosis.failed_rank.rank) == ("failed", 0)
    assert when_s <= len(first + others) * STEP_S


def test_a_rank_that_is_killed_is_named_at_once(diagnose):
    assert diagnose([(3, GONE)])[1] == 0
    assert diagnose([(0, WORD), (0, GONE), (3, GONE)])[1] == pytest.approx(2 * STEP_S)


@pytest.mark.parametrize(
    ("host", "usage", "named"),
    [
        ("here", Usage(1 << 26, 4096), True),
        ("here", Usage(1 << 26, 1 << 25), False),
        ("here", Usage(0, 0), False),  # no limit
        ("there", Usage(1 << 26, 0), False),
    ],
)
def test_a_death_where_shared_memory_is_full_may_be_a_bus_error(monkeypatch, host, usage, named):
    monkeypatch.setattr(diagnosis.shutil, "disk_usage", lambda path: usage)
    dead = RankState(1, host, 7, closed="gone")
    reason = diagnosis.Diagnostician("here", 1.0).failed(dead, [dead]).reason
    assert ("64 MiB of /dev/shm are full" in reason) == ("SIGBUS" in reason) == named
