"""The sentinel as a process, with sockets in the place of ranks."""

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
from candle_p1.records.record import read_record, write_record

TOKEN = "token"
RUNNING = {
    "schema_version": 1,
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


@pytest.fixture
def job(tmp_path):
    """Three ranks that have said hello, the sentinel's process and the record."""
    record = tmp_path / "run.json"
    write_record(record, RUNNING)
    with ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "candle_p1.distributed.watchdog_server",
                 "--bind", "127.0.0.1", "--num-ranks", "3", "--record", str(record)],
                stdout=subprocess.PIPE,
                env=os.environ | {TOKEN_VARIABLE: TOKEN},
            )
        )  # fmt: skip
        stack.callback(process.kill)
        port = int(process.stdout.readline())
        ranks = [FakeRank(port, rank) for rank in range(3)]
        for rank in ranks:
            stack.callback(rank.die)
        yield ranks, process, record, port


def test_a_starter_that_died_before_its_hello_has_failed(tmp_path):
    record = tmp_path / "run.json"
    write_record(record, RUNNING)
    starter = subprocess.Popen([sys.executable, "-c", ""])
    starter.wait()
    subprocess.run(
        [sys.executable, "-m", "candle_p1.distributed.watchdog_server", "--bind", "127.0.0.1",
         "--num-ranks", "3", "--record", str(record), "--starter", str(starter.pid)],
        stdout=subprocess.DEVNULL,
        env=os.environ | {TOKEN_VARIABLE: TOKEN},
        check=True,
        timeout=60,
    )  # fmt: skip
    completed = read_record(record)
    assert completed["status"] == "failed"
    assert (completed["failure"]["rank"], completed["failure"]["pid"]) == (0, starter.pid)
    assert "died without a word" in completed["failure"]["reason"]


def end(ranks, process):
    for rank in ranks:
        rank.die()
    assert process.wait(timeout=20) == 0


def test_ranks_that_say_bye_leave_the_record_alone(job):
    ranks, process, record, _ = job
    for rank in ranks:
        rank.say(phase="train")
        rank.say(bye=True)
    end(ranks, process)
    assert read_record(record)["status"] == "running"


def test_a_rank_that_dies_is_named_and_the_others_are_told_to_end(job):
    ranks, process, record, _ = job
    ranks[1].say(phase="load")
    ranks[1].die()
    orders = [ranks[0].hear(), ranks[2].hear()]
    assert sorted(order["speak"] for order in orders) == [False, True]
    assert "rank 1 (host node1, pid 101) died during load" in orders[0]["end"]
    end(ranks, process)
    ended = read_record(record)
    assert ended["status"] == "failed"
    assert ended["failure"]["rank"] == 1
    assert ended["failure"]["phase"] == "load"


def test_when_rank_0_dies_the_next_one_speaks(job):
    ranks, process, record, _ = job
    ranks[0].die()
    spoken = [ranks[1].hear()["speak"], ranks[2].hear()["speak"]]
    assert sorted(spoken) == [False, True]
    end(ranks, process)
    assert read_record(record)["failure"]["rank"] == 0


def test_an_error_is_recorded_with_its_traceback(job):
    ranks, process, record, _ = job
    ranks[2].say(phase="train")
    ranks[2].say(error={"message": "ValueError: no", "traceback": "Traceback …"})
    for rank in ranks:
        assert (
            "rank 2 (host node2, pid 102) failed during train: ValueError: no" in rank.hear()["end"]
        )
    end(ranks, process)
    assert read_record(record)["failure"]["traceback"] == "Traceback …"


def test_a_stall_is_blamed_on_the_rank_that_is_behind(job):
    ranks, process, record, _ = job
    for rank, steps in zip(ranks, (8, 7, 8), strict=True):
        rank.say(phase="train")
        rank.say(steps=steps)
    time.sleep(0.5)  # as a rank does before it reports a stall
    ranks[0].say(error={"message": "Horovod has been shut down", "stalled": True})
    assert "rank 1 (host node1, pid 101) stalled during train, at step 7" in ranks[0].hear()["end"]
    end(ranks, process)
    assert read_record(record)["failure"]["rank"] == 1


def test_a_stall_without_a_rank_behind_blames_none(job):
    ranks, process, record, _ = job
    for rank in ranks:
        rank.say(steps=8)
    time.sleep(0.5)
    ranks[0].say(error={"message": "Horovod has been shut down", "stalled": True})
    assert "no rank is behind" in ranks[0].hear()["end"]
    end(ranks, process)
    assert read_record(record)["failure"]["rank"] is None


def test_a_signal_is_an_interruption(job):
    ranks, process, record, _ = job
    for rank in ranks:
        rank.say(signal=15)
    assert ranks[0].hear()["status"] == "interrupted"
    end(ranks, process)
    ended = read_record(record)
    assert ended["status"] == "interrupted"
    assert "SIGTERM" in ended["failure"]["reason"]


def test_the_launchers_signals_after_a_death_do_not_hide_it(job):
    ranks, process, record, _ = job
    ranks[0].say(signal=15)  # a launcher ends the survivors, and its signal may be first
    ranks[1].die()
    assert ranks[0].hear()["status"] == "failed"
    end(ranks, process)
    assert read_record(record)["failure"]["rank"] == 1


def test_a_finished_record_is_not_touched(job):
    ranks, process, record, _ = job
    done = RUNNING | {"status": "failed", "ended": "x", "failure": {"reason": "own", "rank": None}}
    write_record(record, done)
    ranks[1].die()
    ranks[0].hear()
    end(ranks, process)
    assert read_record(record) == done


@pytest.mark.parametrize(
    "words",
    [b'{"hello": {"token": "guess", "rank": 1, "host": "x", "pid": 1}}\n', b"GET / HTTP/1.0\r\n",
     b"[]\n", b'{"hello": 1}\n', b'{"bye": true}\n', b"x" * 5000, b"\xff\n"],
)  # fmt: skip
def test_strangers_are_turned_away(job, words):
    ranks, process, record, port = job
    with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
        stranger.sendall(words)
        assert not stranger.recv(100)
    for rank in ranks:
        rank.say(bye=True)
    end(ranks, process)
    assert read_record(record)["status"] == "running"
