"""The watchdog server as a process, with sockets in place of ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from candle_p1.distributed.watchdog_server import TOKEN_VARIABLE
from candle_p1.records.record import make_record, write_record
from tests.records import read_record

TOKEN = "token"
RUNNING = {
    "schema_version": 2,
    "status": "running",
    "benchmark": "nt3",
    "started": "2019-08-05T00:00:00+00:00",
    "num_ranks": 3,
    "parameters": {},
}


class FakeRank:
    def __init__(self, port, rank, token=TOKEN):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.say(hello={"token": token, "rank": rank, "host": f"node{rank}", "pid": 100 + rank})

    def say(self, **message):
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self):
        data = b""
        while not data.endswith(b"\n"):
            received = self.socket.recv(4096)
            if not received:
                return None
            data += received
        return json.loads(data)

    def die(self):
        self.socket.close()


def start_server(record, *flags):
    command = [sys.executable, "-m", "candle_p1.distributed.watchdog_server", *flags]
    command += ["--bind", "127.0.0.1", "--num-ranks", "3", "--record", str(record)]
    environment = os.environ | {TOKEN_VARIABLE: TOKEN}
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)


@pytest.fixture
def job(tmp_path):
    """Three ranks that have said hello, the server's process, the record and the server's port."""
    record = tmp_path / "run.json"
    write_record(record, make_record(RUNNING))
    with ExitStack() as stack:
        process = stack.enter_context(start_server(record))
        stack.callback(process.kill)
        port = int(process.stdout.readline())
        ranks = [FakeRank(port, rank) for rank in range(3)]
        for rank in ranks:
            stack.callback(rank.die)
        yield ranks, process, record, port


def end(ranks, process, record):
    """Closes all connections and waits for the server; returns the record."""
    for rank in ranks:
        rank.die()
    assert process.wait(timeout=20) == 0
    return read_record(record)


@pytest.mark.extended
def test_rank_0_has_failed_if_it_dies_before_its_hello(tmp_path):
    record = tmp_path / "run.json"
    write_record(record, make_record(RUNNING))
    starter = subprocess.Popen([sys.executable, "-c", ""])
    starter.wait()
    with start_server(record, "--starter", str(starter.pid)) as process:
        ended = end([], process, record)
    assert ended["status"] == "failed"
    assert (ended["failure"]["rank"], ended["failure"]["pid"]) == (0, starter.pid)


def test_ranks_that_say_bye_leave_the_record_unchanged(job):
    ranks, process, record, _ = job
    for rank in ranks:
        rank.say(phase="train")
        rank.say(bye=True)
    assert end(ranks, process, record)["status"] == "running"


@pytest.mark.parametrize("dead", [0, 1])
def test_a_dead_rank_is_named_and_the_others_are_told_to_end(job, dead):
    ranks, process, record, _ = job
    ranks[dead].say(phase="load")
    ranks[dead].die()
    orders = [rank.hear() for rank in ranks if rank is not ranks[dead]]
    assert sorted(order["speak"] for order in orders) == [False, True]
    assert f"rank {dead} (host node{dead}, pid {100 + dead})" in orders[0]["end"]
    ended = end(ranks, process, record)
    assert ended["status"] == "failed"
    assert (ended["failure"]["rank"], ended["failure"]["phase"]) == (dead, "load")


def test_an_error_is_recorded_with_its_traceback(job):
    ranks, process, record, _ = job
    ranks[2].say(phase="train")
    ranks[2].say(error={"message": "ValueError: no", "traceback": "Traceback …"})
    for rank in ranks:
        reason = rank.hear()["end"]
        assert "rank 2 (host node2, pid 102)" in reason
        assert "ValueError: no" in reason
    assert end(ranks, process, record)["failure"]["traceback"] == "Traceback …"


@pytest.mark.parametrize(("steps", "blamed"), [((8, 7, 8), 1), ((8, 8, 8), None)])
def test_a_stall_is_blamed_on_the_rank_that_is_behind_if_one_is(job, steps, blamed):
    ranks, process, record, _ = job
    for rank, num_steps in zip(ranks, steps, strict=True):
        rank.say(phase="train")
        rank.say(steps=num_steps)
    time.sleep(0.5)  # as a rank does before it reports a stall
    ranks[0].say(error={"message": "Horovod has been shut down", "stalled": True})
    assert ("rank 1 (host node1, pid 101)" in ranks[0].hear()["end"]) == (blamed == 1)
    failure = end(ranks, process, record)["failure"]
    assert (failure["rank"], failure["phase"]) == (blamed, "train")


def test_a_signal_interrupts_the_run(job):
    ranks, process, record, _ = job
    for rank in ranks:
        rank.say(signal=15)
    assert ranks[0].hear()["status"] == "interrupted"
    ended = end(ranks, process, record)
    assert ended["status"] == "interrupted"
    assert "SIGTERM" in ended["failure"]["reason"]


def test_signals_from_the_launcher_do_not_hide_a_death(job):
    ranks, process, record, _ = job
    ranks[0].say(signal=15)  # a launcher ends the survivors, and its signal may come first
    ranks[1].die()
    assert ranks[0].hear()["status"] == "failed"
    assert end(ranks, process, record)["failure"]["rank"] == 1


def test_a_finished_record_is_not_changed(job):
    ranks, process, record, _ = job
    done = RUNNING | {"status": "failed", "ended": "x", "failure": {"reason": "own", "rank": None}}
    write_record(record, make_record(done))
    ranks[1].die()
    ranks[0].hear()
    assert end(ranks, process, record) == done


@pytest.mark.parametrize(
    "line",
    [b'{"hello": {"token": "guess", "rank": 1, "host": "x", "pid": 1}}\n', b"GET / HTTP/1.0\r\n",
     b"[]\n", b'{"hello": 1}\n', b'{"bye": true}\n', b"x" * 5000, b"\xff\n"],
)  # fmt: skip
def test_connections_without_the_token_are_closed(job, line):
    ranks, process, record, port = job
    with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
        stranger.sendall(line)
        assert not stranger.recv(100)
    for rank in ranks:
        rank.say(bye=True)
    assert end(ranks, process, record)["status"] == "running"
