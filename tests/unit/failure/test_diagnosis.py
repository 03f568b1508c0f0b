"""Whom the server blames, by what ranks have reported and a clock that tests advance."""

import itertools
import os
import platform
import re
import signal
import socket
import subprocess
from collections import namedtuple

import pytest

from candle_p1.failure import connections, diagnosis, server
from candle_p1.failure.connections import RankState
from candle_p1.failure.progress import FOR_ALL, FOR_DISK, FOR_SOME, NOT_WAITING
from candle_p1.failure.progress import ProgressCounters as At
from candle_p1.failure.protocol import Limits
from candle_p1.failure.server import CAUSE_GRACE_S, WatchdogServer

pytestmark = pytest.mark.extended  # slow; in `make test`, test_installation.py kills a rank

LIMITS = Limits(stopped_s=10, silent_s=20, hung_s=300, save_s=45)
START_S, STEP_S = 1000.0, 0.001
GONE = {"closed": "gone"}
UNREACHABLE = {"closed": "unreachable"}
WORD = {"last_word": True}
SIGTERM = {"signal": 15}
LOST_PEER = {"error": {"message": "Connection reset by peer", "lost_peer": True}}
STALLED = {"error": {"message": "Horovod has been shut down", "stalled": True}}
OWN = {"error": {"message": "ValueError: no"}}
BYE = {"bye": True}
STOPPED = {"what": "was stopped", "pid": 99}


class Job:
    """The server, four ranks on two nodes, and their clock, which it has from then on."""

    def __init__(self, monkeypatch):
        self.now = START_S
        for module in (connections, diagnosis, server):
            monkeypatch.setattr(module, "time", self)
        self.server = WatchdogServer(4, LIMITS, "token")
        self.ranks = self.server.ranks
        for rank in range(4):
            place = f"node{rank // 2}", 100 + rank
            self.ranks.append(RankState(rank, *place, phase="train", heard_s=self.now))

    def monotonic(self):
        return self.now

    def diagnose(self, news):
        """Passes on the news, a moment apart; returns the diagnosis, and when it was, in s."""
        for rank, message in news:
            self.ranks[rank].take(message)
            if diagnosis := self.server.diagnose():
                return diagnosis, self.now - START_S
            self.now += STEP_S
        while not (diagnosis := self.server.diagnose()):
            self.now += STEP_S
        return diagnosis, self.now - START_S

    def pass_time(self, seconds, silent=(), stamps=()):
        """Passes time, in which all ranks but the silent ones say their stamps every second."""
        for _ in range(seconds):
            self.now += 1
            for rank in self.ranks:
                if rank.rank not in silent:
                    rank.take(list(stamps[rank.rank] if stamps else rank.progress))
            if diagnosis := self.server.diagnose():
                return diagnosis
        return None


@pytest.fixture
def job(monkeypatch):
    return Job(monkeypatch)


def blamed(diagnosis):
    return diagnosis.failed_rank and diagnosis.failed_rank.rank


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


@pytest.mark.parametrize(
    ("named", "news"),
    [
        (3, {3: [GONE], 0: [WORD, GONE]}),  # MPI ends another
        (3, {3: [GONE], **{rank: [WORD, GONE] for rank in range(3)}}),
        (3, {3: [GONE], 0: [LOST_PEER, BYE, GONE]}),
        (3, {3: [GONE], 0: [STALLED], 1: [STALLED, WORD, GONE]}),
        (3, {3: [GONE], 0: [LOST_PEER], 1: [WORD, GONE], 2: [SIGTERM, GONE]}),
        (3, {3: [UNREACHABLE], 0: [WORD, GONE], 1: [LOST_PEER]}),
        (2, {2: [OWN], 0: [LOST_PEER, GONE], 1: [WORD, GONE]}),
        (1, {1: [WORD, GONE], 0: [LOST_PEER]}),
        (1, {1: [WORD, GONE], **{rank: [SIGTERM, GONE] for rank in (0, 2, 3)}}),
        (0, {0: [LOST_PEER], 1: [SIGTERM]}),  # a peer that is there
    ],
)
def test_the_rank_whose_end_no_other_explains_is_named_in_every_order(named, news, monkeypatch):
    for order in orders_of(news):
        diagnosis, when_s = Job(monkeypatch).diagnose(order)
        assert (diagnosis.status, blamed(diagnosis)) == ("failed", named), order
        assert when_s < CAUSE_GRACE_S + 1


def stalled(steps, reporters):
    """Returns the news of a collective that Horovod has ended, of ranks that have come so far."""
    told = [(rank, [number, 0, 0]) for rank, number in enumerate(steps)]
    return [*told, *((rank, STALLED) for rank in reporters)]


@pytest.mark.parametrize(
    ("news", "status", "named", "words"),
    [
        ([(2, WORD), (1, WORD), (2, GONE), (1, GONE)], "failed", 2, "by itself"),
        ([(2, SIGTERM), (2, OWN), (1, SIGTERM)], "interrupted", 2, "SIGTERM"),
        ([(0, {"launcher_fault": STOPPED})], "failed", None, "(host node0, pid 99) was stopped"),
        ([(2, BYE), (2, UNREACHABLE), (3, UNREACHABLE)], "failed", 3, "cannot be reached"),
        # Horovod's stall is blamed on who is behind, or was not there.
        (stalled((8, 7, 8, 8), (0, 2, 3)), "failed", 1, "at step 7"),
        (stalled((8, 8, 8, 8), (0, 2, 3)), "failed", 1, "at step 8"),
        (stalled((8, 8, 8, 8), (0, 1)), "failed", None, "no rank is behind"),
    ],
)
def test_what_ranks_have_said_decides_who_is_named(job, news, status, named, words):
    diagnosis, _ = job.diagnose(news)
    assert (diagnosis.status, blamed(diagnosis)) == (status, named)
    assert words in diagnosis.reason


def test_news_of_a_cause_is_not_waited_for_in_vain(monkeypatch):
    """The launcher kills what is left, and a scheduler may leave the server only milliseconds."""
    first = [(0, WORD), (0, GONE)]
    assert Job(monkeypatch).diagnose(first)[1] >= CAUSE_GRACE_S
    others = [(rank, each) for rank in (1, 2, 3) for each in (SIGTERM, GONE)]
    for more, limit_s in ([others[::2], 0.1], [others, 8.5 * STEP_S]):
        diagnosis, when_s = Job(monkeypatch).diagnose(first + more)
        assert (diagnosis.status, blamed(diagnosis)) == ("failed", 0)
        assert when_s < limit_s
    assert Job(monkeypatch).diagnose([(3, GONE)])[1] == 0
    assert Job(monkeypatch).diagnose([*first, (3, GONE)])[1] == pytest.approx(2 * STEP_S)


@pytest.mark.parametrize(
    ("can_save", "waits_s", "reason"),
    [
        (False, 2, "during train by SIGUSR2, which rank 0"),
        (True, 4, "by SIGUSR2, which rank 0"),  # sent again
        (True, 46, "SIGUSR2.*rank 0.*within 45 s"),
    ],
)
def test_a_run_is_given_time_to_save(job, can_save, waits_s, reason):
    for rank in job.ranks:
        rank.take({"can_save": can_save})
    for rank in 2 * job.ranks:  # a launcher and a job script both send it on
        rank.take({"signal": 12})
    assert job.pass_time(waits_s - 1) is None
    if waits_s == 4:
        job.ranks[0].take({"signal": 12})
        assert job.server.diagnose() is None
    diagnosis = job.pass_time(1)
    assert diagnosis.status == "interrupted"
    assert re.search(reason, diagnosis.reason)


Usage = namedtuple("Usage", "total free")


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
    assert ("64 MiB of /dev/shm are full" in reason) == named


def test_a_silent_node_is_found_within_the_limit(job):
    assert job.pass_time(100) is None
    start = job.now
    assert job.pass_time(1, silent=(3,)) is None
    diagnosis = job.pass_time(100, silent=(2, 3))
    assert job.now - start <= LIMITS.silent_s + 1
    for words in ("rank 2 (host node1, pid 102)", "20 s", "the other rank of its host", "train"):
        assert words in diagnosis.reason


def test_a_rank_that_is_stopped_is_named_but_not_one_that_a_debugger_halts(job, monkeypatch):
    job.ranks[1].host = platform.node()
    with subprocess.Popen(["sleep", "600"]) as process:
        job.ranks[1].pid = process.pid
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        with monkeypatch.context() as patch:
            patch.setattr("candle_p1.failure.diagnosis.process_state", lambda pid: "t")
            assert job.pass_time(100, silent=(1,)) is None
        assert job.pass_time(1) is None
        assert job.pass_time(12, silent=(1,)) is None
        diagnosis = job.pass_time(1, silent=(1,))
        process.kill()
    assert blamed(diagnosis) == 1
    assert "10 s" in diagnosis.reason


def test_a_job_that_is_suspended_as_a_whole_goes_on(job):
    assert job.pass_time(1000, silent=(0, 1, 2, 3)) is None
    assert job.pass_time(2, silent=(2, 3)) is None, "one node is continued before the other"
    assert job.pass_time(1000) is None
    for silent in itertools.islice(itertools.cycle([(0, 1, 2, 3), ()]), 40):
        assert job.pass_time(9, silent=silent, stamps=LATE) is None


def test_a_short_silence_is_forgiven(job):
    for _ in range(10):
        assert job.pass_time(15, silent=(1,)) is None
        assert job.pass_time(1) is None


LATE = [At(8), At(7), At(8), At(8)]
"""Rank 1 has not begun the step that the others compute."""
IN_FIFTH = At(0, 5, FOR_ALL)


@pytest.mark.parametrize(
    ("phases", "stamps", "allowed_s", "to_blame", "words"),
    [
        (["train"] * 4, LATE, 300, 1, "step 7"),
        (["startup"] * 4, [IN_FIFTH] * 3 + [At(0, 4)], 1800, 3, ""),  # it may load for all
        (["train"] * 4, [IN_FIFTH] * 2 + [At(0, 4, FOR_SOME)] * 2, 300, None, "for each other"),
        (["train"] * 3 + ["load"], [At(0, 5, FOR_SOME)] * 4, 1800, None, "for 1800 s"),
        (["train"] * 4, [At(8, 5, FOR_DISK)] + [At(8, 6, FOR_ALL)] * 3, 1800, 0, ""),
        (["load"] * 4, [At(0, 5)] * 3 + [IN_FIFTH], 60, 3, "all other ranks have left"),
        (["load"] * 4, [At(0, 5, FOR_SOME)] * 3 + [IN_FIFTH], 60, 3, "all other ranks have left"),
    ],
)
def test_a_rank_that_does_not_go_on_is_found(job, phases, stamps, allowed_s, to_blame, words):
    for rank, phase in zip(job.ranks, phases, strict=True):
        rank.phase = phase
    assert job.pass_time(allowed_s, stamps=stamps) is None
    diagnosis = job.pass_time(2, stamps=stamps)
    assert blamed(diagnosis) == to_blame
    assert words in diagnosis.reason


def test_ranks_that_advance_or_are_all_busy_are_left_alone(job):
    for step in range(1000):
        waiting = FOR_ALL if step % 3 else NOT_WAITING
        stamps = [At(step + (rank > 0), step, waiting * (rank > 1)) for rank in range(4)]
        assert job.pass_time(20, stamps=stamps) is None
    assert job.pass_time(10_000, stamps=[At(2000, 2000)] * 4) is None


def test_the_last_one_in_a_gather_waits_for_those_that_have_not_begun_it(job):
    assert job.pass_time(299, stamps=[IN_FIFTH, At(0, 5), At(0, 5), At(0, 4)]) is None


def test_a_rank_that_was_silent_and_then_died_is_not_unreachable():
    with socket.socket() as connection:
        peer = connections.Peer(connection, since_s=0.0, closed=True, probed_s=0.0)
        rank = RankState(0, "here", 1, peer)
        assert rank.is_unreachable
        rank.take(GONE)
        assert not rank.is_unreachable
