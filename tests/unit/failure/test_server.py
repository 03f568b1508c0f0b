"""The watchdog server as a process, with sockets in place of ranks."""

from __future__ import annotations

import json
import math
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from typing import NamedTuple

import psutil
import pytest

from candle_p1.failure import progress
from candle_p1.failure.protocol import TOKEN_VARIABLE, WELCOME, encode
from candle_p1.records.record import make_record, write_record
from tests import records
from tests.conftest import wait_until
from tests.records import read_record

pytestmark = pytest.mark.extended  # slow; in `make test`, test_installation.py kills a rank

TOKEN = "token"
HOST = socket.gethostname()
FAILED, INTERRUPTED = 3, 128 + signal.SIGTERM
"""The exit codes that ranks are ordered to end with."""


class Order(NamedTuple):
    """What the server tells a rank: to end with an exit code, and whether to print the reason."""

    code: int
    speak: bool
    reason: str


class FakeRank:
    def __init__(self, port, rank, pid=None, host=None, **hello):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.socket.sendall(f"{TOKEN}\n".encode())
        hello |= {"rank": rank, "host": host or f"node{rank}", "pid": pid or 100 + rank}
        self.say(hello=hello)
        assert self.socket.recv(len(WELCOME), socket.MSG_WAITALL) == WELCOME

    def say(self, **message):
        self.socket.sendall(encode(**message))

    def beat(self, *progress):
        """Says how far it has come: steps, collectives and whether it waits."""
        self.socket.sendall(json.dumps(progress).encode() + b"\n")

    def hear(self):
        """Returns the order that it gets; probes are none."""
        data = b""
        while not data.strip(b"\0") or not data.endswith(b"\0"):
            received = self.socket.recv(4096)
            assert received, "there is no order"
            data += received
        code, speak, reason = data.strip(b"\0").decode().split(" ", 2)
        return Order(int(code), bool(int(speak)), reason)

    def die(self):
        self.socket.close()


class Job:
    """A server, some ranks that have said hello, and their record."""

    def __init__(self, stack, directory):
        self._stack, self.record = stack, directory / "run.json"
        self.ranks = []

    def start(self, *flags, num_ranks=3, preexec_fn=None, pass_fds=(), **limits):
        """Starts the server."""
        write_record(self.record, make_record(records.RUNNING | {"num_ranks": num_ranks}))
        command = [sys.executable, "-m", "candle_p1.failure.server", "--bind", "127.0.0.1"]
        command += [*flags, "--num-ranks", num_ranks, "--record", self.record]
        self.process = subprocess.Popen(
            [*map(str, command), "--limits", json.dumps(limits)],
            stdout=subprocess.PIPE,
            env=os.environ | {TOKEN_VARIABLE: TOKEN},
            preexec_fn=preexec_fn,
            pass_fds=pass_fds,
        )
        self._stack.enter_context(self.process)
        self._stack.callback(self.process.kill)
        self.port = json.loads(self.process.stdout.readline())["port"]

    def join(self, *hellos, says_record=True):
        """Connects ranks, each with what is said of it in its hello; returns them."""
        self.ranks = [FakeRank(self.port, rank, **hello) for rank, hello in enumerate(hellos)]
        for rank in self.ranks:
            self._stack.callback(rank.die)
        if says_record:
            self.ranks[0].say(record=str(self.record))
        return self.ranks

    @staticmethod
    def beat_until(condition, ranks):
        """Lets some ranks say that they are in step 8 until a condition is true."""

        def beat():
            for rank in ranks:
                with suppress(OSError):
                    rank.beat(8, 8, 0)
            return condition()

        wait_until(beat, 30)

    def end(self):
        """Closes all connections and waits for the server; returns the record."""
        for rank in self.ranks:
            rank.die()
        assert self.process.wait(timeout=20) == 0
        return read_record(self.record)

    def say_bye(self):
        """Ends all ranks with success; returns the record."""
        for rank in self.ranks:
            rank.say(bye=True)
        return self.end()

    def stranger(self):
        """Returns a connection that has said nothing."""
        address = ("127.0.0.1", self.port)
        return self._stack.enter_context(socket.create_connection(address, timeout=20))

    def sleeper(self):
        """Returns a process of this host whose state the server can see."""
        process = subprocess.Popen(["sleep", "600"])
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process


@pytest.fixture
def new_job(tmp_path):
    """A job without a server and ranks."""
    with ExitStack() as stack:
        yield Job(stack, tmp_path)


@pytest.fixture
def job(new_job):
    """A job of three ranks."""
    new_job.start()
    new_job.join({}, {}, {})
    return new_job


def test_the_ranks_end_if_rank_0_dies_before_its_hello(new_job):
    starter = subprocess.Popen([sys.executable, "-c", ""])
    starter.wait()
    new_job.start("--starter", starter.pid)
    for number in (1, 2, 0):  # those that come later are told, too
        rank = FakeRank(new_job.port, number)
        assert f"rank 0 (host {HOST}, pid {starter.pid})" in rank.hear().reason
        rank.die()
    assert new_job.end()["status"] == "running"


ERROR = {"message": "ValueError: no", "traceback": "Traceback …"}


@pytest.mark.parametrize(
    ("rank", "words", "status", "reason"),
    [
        (0, None, "failed", "rank 0 (host node0, pid 100) died during load"),
        (1, None, "failed", "rank 1 (host node1, pid 101) died during load"),
        (2, {"error": ERROR}, "failed", "(host node2, pid 102) failed during load: ValueError: no"),
        (1, {"signal": 15}, "interrupted", "SIGTERM, which rank 1"),
    ],
)
def test_the_record_and_all_ranks_that_are_left_are_told_how_a_run_ended(
    job, rank, words, status, reason
):
    job.ranks[rank].say(phase="load")
    if words:
        job.ranks[rank].say(**words)
    else:
        job.ranks[rank].die()
    orders = [each.hear() for each in job.ranks if words or each is not job.ranks[rank]]
    assert {order.code for order in orders} == {FAILED if status == "failed" else INTERRUPTED}
    assert sum(order.speak for order in orders) == 1
    assert all(reason in order.reason for order in orders)
    record = job.end()
    failure = record["failure"]
    assert record["status"] == status
    assert (failure["rank"], failure["phase"], failure.get("traceback")) == (
        rank, "load", "Traceback …" if words == {"error": ERROR} else None,
    )  # fmt: skip


def test_a_record_that_is_heard_of_after_a_death_is_completed(new_job):
    new_job.start()
    ranks = new_job.join({}, {}, {}, says_record=False)
    ranks[1].die()
    assert "rank 1 (host node1" in ranks[2].hear().reason
    ranks[0].say(record=str(new_job.record))
    record = new_job.end()
    assert (record["status"], record["failure"]["rank"]) == ("failed", 1)


def test_the_first_of_dead_ranks_is_named_also_by_a_server_that_comes_late(job):
    """On a busy machine, the launcher may have ended the others before the server runs again."""
    job.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(job.process.pid).status() == psutil.STATUS_STOPPED, 10)
    for dead in (2, 0):
        job.ranks[dead].die()
        time.sleep(0.1)
    job.process.send_signal(signal.SIGCONT)
    assert "rank 2 (host node2" in job.ranks[1].hear().reason
    assert job.end()["failure"]["rank"] == 2


def test_the_steps_that_rank_0_had_begun_are_exact(new_job):
    """They are in shared memory, because what a rank sends every second may be too old."""
    descriptor = os.memfd_create("steps")
    os.ftruncate(descriptor, progress.NUM_BYTES)
    counter = mmap.mmap(descriptor, progress.NUM_BYTES)
    new_job.start("--counter", descriptor, pass_fds=[descriptor])
    os.close(descriptor)
    ranks = new_job.join({}, {}, {})
    ranks[0].beat(3, 0, 0)
    counter[:8] = (41).to_bytes(8, sys.byteorder)
    ranks[0].die()
    ranks[1].hear()
    assert new_job.end()["failure"]["steps"] == 41


STRANGE = [
    b'{"hello": {"rank": 1, "host": "x", "pid": 1}}\n', b"\n", b"x" * 5000, b"toke\n", b"token1\n",
    *(b"token\n" + line + b"\n" for line in (
        b"[]", b'{"hello": 1}', b'{"bye": true}', b"[" * 2000, b"\xff", b"x" * 2**21
    )),
]  # fmt: skip


def test_connections_without_token_and_hello_are_closed(job):
    strangers = [job.stranger() for _ in STRANGE]
    for stranger, line in zip(strangers, STRANGE, strict=True):
        with suppress(ConnectionError):  # the server does not wait for the rest
            stranger.sendall(line)
    for stranger in [*strangers, job.stranger()]:  # one that is silent, some seconds later
        with suppress(ConnectionError):
            assert not stranger.recv(100)
    assert job.say_bye()["status"] == "running"


def test_ranks_get_in_past_a_thousand_silent_connections(new_job):
    """With few files, the server has to close connections of strangers to accept those of ranks."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit[0] < 1200:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(2000, limit[1]), limit[1]))

    def limit_files():
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    new_job.start(preexec_fn=limit_files)
    for _ in range(1000):
        new_job.stranger()
    ranks = new_job.join({}, {}, {})
    ranks[1].die()
    assert ranks[0].hear().code == FAILED
    assert new_job.end()["failure"]["rank"] == 1


def test_a_silent_node_is_named(new_job):
    new_job.start(num_ranks=4, silent_s=4)
    awake = new_job.join(*({"host": f"node{rank // 2}"} for rank in range(4)))[:2]
    new_job.beat_until(lambda: read_record(new_job.record)["status"] == "failed", awake)
    for rank in awake:
        assert "neither was the other rank of its host: it is stopped" in rank.hear().reason
    failure = new_job.end()["failure"]
    assert (failure["rank"], failure["host"], failure["steps"]) == (2, "node1", 8)


def test_a_rank_that_is_stopped_is_killed(new_job):
    victim = new_job.sleeper()
    new_job.start(stopped_s=0, silent_s=math.inf)
    ranks = new_job.join({"pid": victim.pid, "host": HOST}, {}, {})
    victim.send_signal(signal.SIGSTOP)
    new_job.beat_until(lambda: victim.poll() == -signal.SIGKILL, ranks[1:])
    assert ranks[1].hear().code == FAILED
    assert new_job.end()["failure"]["rank"] == 0


@pytest.mark.parametrize(
    ("last_words", "status"),
    [
        ({}, "failed"),
        ({"error": {"message": "OSError: the launcher's terminal is closed"}}, "failed"),
        ({"signal": 1}, "interrupted"),
    ],
)
def test_a_launcher_that_has_gone_is_to_blame_for_its_ranks(new_job, last_words, status):
    new_job.start()
    launcher = new_job.sleeper()
    ranks = new_job.join(*[{"host": HOST, "launcher": launcher.pid}] * 3)
    launcher.kill()
    launcher.wait()
    if last_words:
        ranks[2].say(**last_words)
    if "error" not in last_words:
        ranks[1].die()
    reason = ranks[0].hear().reason
    assert (f"the launcher (host {HOST}, pid {launcher.pid})" in reason) == (status == "failed")
    record = new_job.end()
    assert record["status"] == status
    assert record["failure"]["rank"] == (2 if status == "interrupted" else None)


def test_a_script_around_each_rank_is_not_taken_for_the_launcher(new_job):
    new_job.start()
    scripts = [new_job.sleeper() for _ in range(3)]
    ranks = new_job.join(*({"host": HOST, "launcher": script.pid} for script in scripts))
    scripts[2].kill()
    scripts[2].wait()
    ranks[2].die()
    assert f"rank 2 (host {HOST}, pid 102) died" in ranks[0].hear().reason
    assert new_job.end()["failure"]["rank"] == 2


def test_a_record_that_cannot_be_written_does_not_keep_the_ranks(job):
    job.record.write_text("{")
    job.ranks[2].die()
    assert "the record cannot be written" in job.ranks[0].hear().reason
    for rank in job.ranks:
        rank.die()
    assert job.process.wait(timeout=20) == 0
