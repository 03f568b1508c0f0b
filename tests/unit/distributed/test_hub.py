"""Hubs between the watchdog server and groups of ranks, as processes, with sockets as ranks."""

from __future__ import annotations

import errno
import json
import resource
import signal
import socket
import time
from array import array
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import psutil
import pytest

from candle_p1.distributed._heartbeat import Heartbeat
from candle_p1.distributed.watchdog.hub import Hub
from candle_p1.distributed.watchdog.protocol import END_OF_MESSAGE, WELCOME
from candle_p1.records.record import make_record, write_record
from tests.conftest import wait_until
from tests.records import read_record
from tests.watched_ranks import RUNNING, FakeRank, port_of, start_hub, start_server

NUM_RANKS, GROUP = 200, 40


class Job:
    """Ranks in groups: the first one reports to the server, the others to hubs."""

    def __init__(self, stack, directory, **variables):
        self.record = directory / "run.json"
        write_record(self.record, make_record(RUNNING | {"num_ranks": NUM_RANKS}))
        num_peers = GROUP + NUM_RANKS // GROUP - 1
        self.server = self._keep(
            stack,
            start_server(
                self.record,
                *("--num-peers", num_peers),
                num_ranks=NUM_RANKS,
                preexec_fn=limit_files,
                **variables,
            ),
        )
        ports = [port_of(self.server)]
        firsts = range(GROUP, NUM_RANKS, GROUP)
        self.hubs = [
            self._keep(stack, start_hub(ports[0], first, GROUP, **variables)) for first in firsts
        ]
        ports += [port_of(hub) for hub in self.hubs]
        self.ranks = [
            FakeRank(ports[rank // GROUP], rank, host=f"node{rank // GROUP}")
            for rank in range(NUM_RANKS)
        ]
        for rank in self.ranks:
            stack.callback(rank.die)
        self.ranks[0].say(record=str(self.record))
        for rank in self.ranks:
            rank.say(phase="train")

    def _keep(self, stack, process):
        stack.enter_context(process)
        stack.callback(process.kill)
        return process

    def end(self):
        """Closes all connections, and waits for the server and the hubs; returns the record."""
        for rank in self.ranks:
            rank.die()
        assert [process.wait(timeout=20) for process in (self.server, *self.hubs)] == [0] * 5
        return read_record(self.record)


def limit_files():
    # Too few for a connection to each rank.
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))


def hub_of(stack, first_rank, num_ranks):
    """Starts a hub; returns the connection on which it reports, and its port."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    process = stack.enter_context(start_hub(listener.getsockname()[1], first_rank, num_ranks))
    stack.callback(process.kill)
    server = stack.enter_context(listener.accept()[0])
    server.settimeout(20)
    server.recv(4096)
    server.sendall(WELCOME)
    return server, port_of(process)


def test_a_last_word_passes_through_a_hub_before_the_end():
    with ExitStack() as stack:
        server, port = hub_of(stack, 40, 2)
        ranks = [FakeRank(port, rank) for rank in (40, 41)]
        ranks[1].socket.sendall(b"\x7f")
        for rank in reversed(ranks):
            rank.die()
        data = b""
        while received := server.recv(65536):
            data += received
    messages = [json.loads(text) for text in data.split(END_OF_MESSAGE)[:-1]]
    said = [message for message in messages if message.get("of") == 41]
    assert [set(message) - {"of", "before_s"} for message in said] == [
        {"hello"},
        {"last_word"},
        {"closed"},
    ]
    assert not any("last_word" in message for message in messages if message.get("of") == 40)


def test_what_a_beat_and_its_report_cost():
    """As docs/scale.md says: at most 15 bytes from a rank, and 30 from its hub, every second."""
    stamp = [10_000_000, 10_000_000, 1]
    near, far = socket.socketpair()
    heart = Heartbeat(
        near.fileno(), memoryview(array("q", stamp)), period_s=600, patience_s=600, code=1
    )
    beat = far.recv(100)
    heart.stop()
    assert len(beat) <= 15
    with ExitStack() as stack:
        stack.callback(near.close)
        stack.callback(far.close)
        server, port = hub_of(stack, 4000, GROUP)
        ranks = [FakeRank(port, 4000 + rank) for rank in range(GROUP)]
        for rank in ranks:
            stack.callback(rank.die)
        data, report = b"", {"stamps": {}}
        while len(report.get("stamps", ())) < GROUP:
            for rank in ranks:
                rank.socket.sendall(beat)
            *messages, data = (data + server.recv(65536)).split(END_OF_MESSAGE)
            for text in messages:
                report = json.loads(text)
        assert all(numbers == stamp for numbers in report["stamps"].values())
        assert len(text) <= 30 * GROUP


@pytest.mark.parametrize(
    ("number", "is_lost"), [(errno.ETIMEDOUT, True), (errno.EPIPE, False), (None, False)]
)
def test_a_hub_that_is_cut_off_knows_that_from_what_it_could_not_send(number, is_lost):
    """The kernel tells the error once, to who comes first; what is then read is an end."""

    def send(data):
        if number:
            raise OSError(number, "")

    listener = socket.create_server(("127.0.0.1", 0))
    near, far = socket.socketpair()
    with listener, near, far:
        hub = Hub(near, listener, "token", 2, 20.0, 16)
        hub._server = SimpleNamespace(sendall=send, recv=lambda size: b"")
        hub._send({})
        assert not hub._hear()
        hub._connections.close()
    assert (hub._order is not None and hub._order["lost"]) == is_lost
    assert hub._is_alone != is_lost


@pytest.fixture
def job(tmp_path):
    with ExitStack() as stack:
        yield Job(stack, tmp_path)


def test_ranks_of_all_groups_say_bye(job):
    """The server has a connection to each rank of the first group, and to each hub."""
    connections = psutil.Process(job.server.pid).net_connections("tcp")
    assert sum(each.status == "ESTABLISHED" for each in connections) == GROUP + len(job.hubs)
    for rank in job.ranks:
        rank.say(bye=True)
    assert job.end()["status"] == "running"


@pytest.mark.parametrize("dead", [pytest.param(3, marks=pytest.mark.extended), 199])
def test_a_dead_rank_is_named_to_the_ranks_of_all_groups(job, dead):
    job.ranks[dead].say(phase="load")
    job.ranks[dead].die()
    orders = [rank.hear() for rank in job.ranks if rank is not job.ranks[dead]]
    assert all(f"rank {dead} (host node{dead // GROUP}" in order["end"] for order in orders)
    assert sum(order["speak"] for order in orders) == 1
    failure = job.end()["failure"]
    assert (failure["rank"], failure["phase"]) == (dead, "load")


@pytest.mark.extended
def test_signals_errors_and_steps_pass_through_a_hub(job):
    job.ranks[50].socket.sendall(b"\x88\xc0\xc0\xc0\xff")  # a beat: eight steps
    time.sleep(1.5)  # until the hub has reported it
    for rank in job.ranks[40:60]:
        rank.socket.sendall(b"\x0f")
    assert job.ranks[160].hear()["status"] == "interrupted"
    ended = job.end()
    assert ended["status"] == "interrupted"
    assert "SIGTERM" in ended["failure"]["reason"]
    assert ended["failure"]["steps"] == 8


@pytest.mark.extended
def test_a_hub_that_is_killed_ends_the_job(job):
    job.hubs[1].send_signal(signal.SIGKILL)
    assert "the hub of its group has ended" in job.ranks[0].hear()["end"]
    assert job.hubs.pop(1).wait(timeout=20) == -signal.SIGKILL
    for rank in job.ranks:
        rank.die()
    assert [process.wait(timeout=20) for process in (job.server, *job.hubs)] == [0] * 4
    failure = read_record(job.record)["failure"]
    assert 2 * GROUP <= failure["rank"] < 3 * GROUP


@pytest.mark.extended
def test_hubs_end_when_the_server_is_killed_and_the_run_goes_on_unwatched(job):
    job.server.kill()
    assert [hub.wait(timeout=20) for hub in job.hubs] == [0] * 4
    assert job.ranks[-1].hear() is None


@pytest.mark.extended
def test_a_silent_rank_and_a_silent_group_are_named(tmp_path):
    """Two jobs at the same time: in one a rank is silent, in the other all of a hub's are."""
    with ExitStack() as stack:
        jobs = {}
        for silent in (range(50, 51), range(80, 120)):
            directory = tmp_path / str(len(silent))
            directory.mkdir()
            jobs[silent] = Job(stack, directory, CANDLE_P1_SILENT_S="6")
        jobs[range(80, 120)].hubs[1].send_signal(signal.SIGSTOP)
        stack.callback(jobs[range(80, 120)].hubs[1].send_signal, signal.SIGCONT)

        def all_have_ended():
            for silent, job in jobs.items():
                for rank in job.ranks:
                    number = job.ranks.index(rank)
                    if number not in silent:
                        with suppress(OSError):
                            rank.socket.sendall(b"\xc0\xc0\xc0\xff")
            time.sleep(0.5)
            return all(read_record(job.record)["status"] == "failed" for job in jobs.values())

        wait_until(all_have_ended, 30)
        for silent, job in jobs.items():
            failure = read_record(job.record)["failure"]
            assert failure["rank"] == silent[0]
            assert failure["host"] == f"node{silent[0] // GROUP}"
            assert "was not heard from for 6 s" in failure["reason"]
            assert ("39 other ranks of its host" in failure["reason"]) == (len(silent) > 1)
