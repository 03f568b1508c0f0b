"""The watchdog server as a process, with sockets in place of ranks."""

from __future__ import annotations

import math
import mmap
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress

import psutil
import pytest

from candle_p1.failure import progress
from candle_p1.records.record import make_record, write_record
from tests.conftest import wait_until
from tests.records import read_record
from tests.watched_ranks import RUNNING, FakeRank, port_of, start_server

FAILED, INTERRUPTED = 3, 128 + signal.SIGTERM
"""The exit codes that ranks are ordered to end with."""


@pytest.fixture
def record(tmp_path):
    path = tmp_path / "run.json"
    write_record(path, make_record(RUNNING))
    return path


@pytest.fixture
def job(record):
    """Three ranks that have said hello, the server's process, the record and the server's port."""
    with ExitStack() as stack:
        process = stack.enter_context(start_server(record))
        stack.callback(process.kill)
        port = port_of(process)
        ranks = [FakeRank(port, rank) for rank in range(3)]
        ranks[0].say(record=str(record))
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
def test_the_ranks_end_if_rank_0_dies_before_its_hello(tmp_path):
    starter = subprocess.Popen([sys.executable, "-c", ""])
    starter.wait()
    with start_server(tmp_path / "run.json", "--starter", str(starter.pid)) as process:
        port = port_of(process)
        for number in (1, 2, 0):  # those that come later are told, too
            rank = FakeRank(port, number)
            reason = f"rank 0 (host {socket.gethostname()}, pid {starter.pid})"
            assert reason in rank.hear().reason
            rank.die()
        assert process.wait(timeout=20) == 0
    assert not list(tmp_path.iterdir())


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
    assert sorted(order.speak for order in orders) == [False, True]
    assert f"rank {dead} (host node{dead}, pid {100 + dead})" in orders[0].reason
    ended = end(ranks, process, record)
    assert ended["status"] == "failed"
    assert (ended["failure"]["rank"], ended["failure"]["phase"]) == (dead, "load")


def test_a_record_that_is_heard_of_after_a_death_is_completed(record):
    with start_server(record) as process:
        port = port_of(process)
        ranks = [FakeRank(port, rank) for rank in range(3)]
        ranks[1].die()
        assert "rank 1 (host node1" in ranks[2].hear().reason
        ranks[0].say(record=str(record))
        ended = end(ranks, process, record)
    assert (ended["status"], ended["failure"]["rank"]) == ("failed", 1)


def test_the_first_of_dead_ranks_is_named_also_by_a_server_that_comes_late(job):
    """On a busy machine, the launcher may have ended the others before the server runs again."""
    ranks, process, record, _ = job
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, 10)
    for dead in (2, 0):
        ranks[dead].die()
        time.sleep(0.1)
    process.send_signal(signal.SIGCONT)
    assert "rank 2 (host node2" in ranks[1].hear().reason
    assert end(ranks, process, record)["failure"]["rank"] == 2


def test_an_error_is_recorded_with_its_traceback(job):
    ranks, process, record, _ = job
    ranks[2].say(phase="train")
    ranks[2].say(error={"message": "ValueError: no", "traceback": "Traceback …"})
    for rank in ranks:
        reason = rank.hear().reason
        assert "rank 2 (host node2, pid 102)" in reason
        assert "ValueError: no" in reason
    assert end(ranks, process, record)["failure"]["traceback"] == "Traceback …"


@pytest.mark.parametrize(("steps", "blamed"), [((8, 7, 8), 1), ((8, 8, 8), None)])
def test_a_stall_is_blamed_on_the_rank_that_is_behind_if_one_is(job, steps, blamed):
    ranks, process, record, _ = job
    for rank, num_steps in zip(ranks, steps, strict=True):
        rank.say(phase="train")
        rank.beat(num_steps, 0, 0)
    time.sleep(0.5)  # as a rank does before it reports a stall
    ranks[0].say(error={"message": "Horovod has been shut down", "stalled": True})
    assert ("rank 1 (host node1, pid 101)" in ranks[0].hear().reason) == (blamed == 1)
    failure = end(ranks, process, record)["failure"]
    assert (failure["rank"], failure["phase"]) == (blamed, "train")


def test_a_signal_interrupts_the_run(job):
    ranks, process, record, _ = job
    for rank in ranks:
        rank.say(signal=15)
    assert ranks[0].hear().code == INTERRUPTED
    ended = end(ranks, process, record)
    assert ended["status"] == "interrupted"
    assert "SIGTERM" in ended["failure"]["reason"]


def test_a_signal_that_asks_to_save_ends_a_rank_that_cannot(job):
    ranks, process, record, _ = job
    for rank in ranks[:2]:
        rank.say(can_save=True)
    ranks[2].say(phase="load")
    ranks[2].say(signal=10)
    assert ranks[0].hear().code == INTERRUPTED
    failure = end(ranks, process, record)["failure"]
    assert "SIGUSR1" in failure["reason"]
    assert (failure["rank"], failure["phase"]) == (2, "load")


SAVE_CASES = {
    "saves": (True, None),
    "too late": (True, "SIGUSR2.*did not save and end within 2 s"),
    "cannot": (False, "SIGUSR2"),
    "again": (True, "SIGUSR2"),
}
"""Whether the ranks can save, and why the run is interrupted, if it is."""


@pytest.mark.extended
def test_a_run_that_can_save_is_given_time_to_do_so(tmp_path):
    """All cases at the same time, because each takes seconds in which little happens."""
    jobs = {}
    with ExitStack() as stack:
        for case, (can_save, _) in SAVE_CASES.items():
            record = tmp_path / case / "run.json"
            record.parent.mkdir()
            write_record(record, make_record(RUNNING))
            limit_s = 2 if case == "too late" else 60
            process = stack.enter_context(start_server(record, save_s=limit_s))
            stack.callback(process.kill)
            ranks = [FakeRank(port_of(process), 0)]
            ranks += [FakeRank(ranks[0].socket.getpeername()[1], rank) for rank in (1, 2)]
            for rank in ranks:
                stack.callback(rank.die)
                rank.say(can_save=can_save)
            ranks[0].say(record=str(record))
            jobs[case] = ranks, process, record
        time.sleep(0.5)
        for _ in range(2):  # a launcher and a job script both send it on
            for ranks, _, _ in jobs.values():
                for rank in ranks:
                    rank.say(signal=12)
        time.sleep(4)
        for rank in jobs["again"][0]:
            rank.say(signal=12)
        for case, (ranks, process, record) in jobs.items():
            reason = SAVE_CASES[case][1]
            if reason is None:
                for rank in ranks:
                    rank.say(can_save=False)
                    rank.say(bye=True)
                assert end(ranks, process, record)["status"] == "running"
            else:
                assert ranks[1].hear().code == INTERRUPTED, case
                assert re.search(reason, end(ranks, process, record)["failure"]["reason"])


def test_the_steps_that_rank_0_had_begun_are_exact(record):
    """They are in shared memory, because what a rank sends every second may be too old."""
    descriptor = os.memfd_create("steps")
    os.ftruncate(descriptor, progress.NUM_BYTES)
    counter = mmap.mmap(descriptor, progress.NUM_BYTES)
    with start_server(record, "--counter", str(descriptor), pass_fds=[descriptor]) as process:
        os.close(descriptor)
        port = port_of(process)
        ranks = [FakeRank(port, rank) for rank in range(3)]
        ranks[0].say(record=str(record))
        ranks[0].beat(3, 0, 0)
        counter[:8] = (41).to_bytes(8, sys.byteorder)
        ranks[0].die()
        ranks[1].hear()
        assert end(ranks, process, record)["failure"]["steps"] == 41


def test_signals_from_the_launcher_do_not_hide_a_death(job):
    ranks, process, record, _ = job
    ranks[0].say(signal=15)  # a launcher ends the survivors, and its signal may come first
    ranks[1].die()
    assert ranks[0].hear().code == FAILED
    assert end(ranks, process, record)["failure"]["rank"] == 1


def test_a_finished_record_is_not_changed(job):
    ranks, process, record, _ = job
    done = RUNNING | {"status": "failed", "ended": "x", "failure": {"reason": "own", "rank": None}}
    write_record(record, make_record(done))
    ranks[1].die()
    ranks[0].hear()
    assert end(ranks, process, record) == done


STRANGE = [
    b'{"hello": {"rank": 1, "host": "x", "pid": 1}}\n', b"GET / HTTP/1.0\r\n", b"\n", b"\xff\n",
    b"x" * 5000, b"[" * 2000, b"[" * 2000 + b"\n", b"{" * 2**20, b"toke\n", b"token1\n",
    *(b"token\n" + line + b"\n" for line in (
        b"", b"[]", b'{"hello": 1}', b'{"bye": true}', b"[" * 2000, b"\xff", b"x" * 2**21
    )),
]  # fmt: skip


def test_connections_without_token_and_hello_are_closed(job):
    ranks, process, record, port = job
    with ExitStack() as stack:  # all at the same time, because some are closed after seconds
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            for _ in STRANGE
        ]
        for stranger, line in zip(strangers, STRANGE, strict=True):
            with suppress(ConnectionError):  # the server does not wait for the rest
                stranger.sendall(line)
        for stranger in strangers:
            with suppress(ConnectionError):
                assert not stranger.recv(100)
    for rank in ranks:
        rank.say(bye=True)
    assert end(ranks, process, record)["status"] == "running"


@pytest.mark.extended
def test_a_silent_connection_is_closed(job):
    ranks, process, record, port = job
    with socket.create_connection(("127.0.0.1", port), timeout=20) as stranger:
        assert not stranger.recv(100)
    for rank in ranks:
        rank.say(bye=True)
    assert end(ranks, process, record)["status"] == "running"


@pytest.mark.extended
@pytest.mark.parametrize("max_files", [256, 4096])
def test_ranks_get_in_past_a_thousand_silent_connections(record, max_files):
    # Few files: the server has to close connections of strangers to accept those of ranks.
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)

    def limit_files():
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))

    with ExitStack() as stack:
        if limit[0] < 1200:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(2000, limit[1]), limit[1]))
            stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limit)
        process = stack.enter_context(start_server(record, preexec_fn=limit_files))
        stack.callback(process.kill)
        port = port_of(process)
        for _ in range(1000):
            address = ("127.0.0.1", port)
            stack.enter_context(socket.create_connection(address, timeout=20))
        ranks = [FakeRank(port, rank) for rank in range(3)]
        ranks[0].say(record=str(record))
        ranks[1].die()
        assert ranks[0].hear().code == FAILED
        assert end(ranks, process, record)["failure"]["rank"] == 1


def test_hundreds_of_ranks_have_a_connection_each_and_a_silent_node_is_named(tmp_path):
    """Five nodes of 40 ranks, of which the last one says nothing."""
    record, num_ranks, per_node = tmp_path / "run.json", 200, 40
    write_record(record, make_record(RUNNING | {"num_ranks": num_ranks}))
    with ExitStack() as stack:
        process = stack.enter_context(start_server(record, num_ranks=num_ranks, silent_s=4))
        stack.callback(process.kill)
        port = port_of(process)
        ranks = [FakeRank(port, rank, host=f"node{rank // per_node}") for rank in range(num_ranks)]
        ranks[0].say(record=str(record))
        awake = ranks[:-per_node]

        def has_ended():
            for rank in awake:
                with suppress(OSError):
                    rank.beat(8, 8, 0)
            time.sleep(0.5)
            return read_record(record)["status"] == "failed"

        wait_until(has_ended, 30)
        orders = [rank.hear() for rank in awake]
        assert all("39 other ranks of its host" in order.reason for order in orders)
        assert sum(order.speak for order in orders) == 1
        failure = end(ranks, process, record)["failure"]
        assert (failure["rank"], failure["host"], failure["steps"]) == (160, "node4", 8)


def test_what_happens_to_the_launcher_is_no_ranks_fault(job):
    ranks, process, record, _ = job
    ranks[0].say(phase="train")
    ranks[0].say(launcher_fault={"what": "was stopped", "pid": 99})
    assert "the launcher (host node0, pid 99) was stopped during train" in ranks[1].hear().reason
    ended = end(ranks, process, record)
    assert (ended["status"], ended["failure"]["rank"]) == ("failed", None)


class Sleeper:
    """A process in place of a rank, of which the server can see whether it is stopped."""

    def __init__(self, stack):
        self.process = subprocess.Popen(["sleep", "600"])
        stack.callback(self.process.wait)
        stack.callback(self.process.kill)


FAULTS = {"stopped": True, "silent": True, "all suspended": False, "busy": False}
"""What happens to a rank that says nothing, and whether it ends the job."""


@pytest.mark.extended
def test_a_rank_that_is_silent(tmp_path):
    """All faults at the same time, because each takes seconds in which little happens."""
    jobs = {}
    with ExitStack() as stack:
        for fault in FAULTS:
            record = tmp_path / fault / "run.json"
            record.parent.mkdir()
            write_record(record, make_record(RUNNING))
            silent_s = 2 if fault == "silent" else math.inf
            limits = {"stopped_s": 1, "silent_s": silent_s}
            process = stack.enter_context(start_server(record, **limits))
            stack.callback(process.kill)
            port = port_of(process)
            sleepers = [Sleeper(stack).process for _ in range(3)]
            ranks = [
                FakeRank(port, rank, sleeper.pid, host=socket.gethostname())
                for rank, sleeper in enumerate(sleepers)
            ]
            for rank in ranks:
                stack.callback(rank.die)
            ranks[0].say(record=str(record))
            for sleeper in sleepers if fault == "all suspended" else sleepers[:1]:
                if fault in ("stopped", "all suspended"):
                    sleeper.send_signal(signal.SIGSTOP)
            jobs[fault] = ranks, process, record
        for _ in range(70):  # rank 0 says nothing
            for fault, (ranks, _, _) in jobs.items():
                for rank in ranks[1:] if fault != "all suspended" else []:
                    with suppress(OSError):
                        rank.beat(1, 0, 0)
            time.sleep(0.1)
        for fault, (ranks, process, record) in jobs.items():
            if FAULTS[fault]:
                assert ranks[1].hear().code == FAILED, fault
                assert end(ranks, process, record)["failure"]["rank"] == 0
            else:
                for rank in ranks:
                    rank.say(bye=True)
                assert end(ranks, process, record)["status"] == "running", fault


@pytest.fixture
def orphans(record):
    """Three ranks whose launcher was killed, the server's process and the launcher."""
    with ExitStack() as stack:
        process = stack.enter_context(start_server(record))
        stack.callback(process.kill)
        launcher = Sleeper(stack).process
        port = port_of(process)
        here = {"host": socket.gethostname(), "launcher": launcher.pid}
        ranks = [FakeRank(port, rank, **here) for rank in range(3)]
        ranks[0].say(record=str(record))
        launcher.kill()
        launcher.wait()
        yield ranks, process, launcher


@pytest.mark.parametrize("has_error", [False, True])
def test_a_launcher_that_has_gone_is_to_blame_for_its_ranks(orphans, record, has_error):
    ranks, process, launcher = orphans
    if has_error:
        ranks[2].say(error={"message": "OSError: the launcher's terminal is closed"})
    else:
        ranks[2].die()
    host = socket.gethostname()
    assert f"the launcher (host {host}, pid {launcher.pid})" in ranks[0].hear().reason
    ended = end(ranks, process, record)
    assert (ended["status"], ended["failure"]["rank"]) == ("failed", None)


def test_a_script_around_each_rank_is_not_taken_for_the_launcher(record):
    with ExitStack() as stack:
        process = stack.enter_context(start_server(record))
        stack.callback(process.kill)
        scripts = [Sleeper(stack).process for _ in range(3)]
        port, host = port_of(process), socket.gethostname()
        ranks = [FakeRank(port, n, host=host, launcher=scripts[n].pid) for n in range(3)]
        ranks[0].say(record=str(record))
        scripts[2].kill()
        scripts[2].wait()
        ranks[2].die()
        assert f"rank 2 (host {host}, pid 102) died" in ranks[0].hear().reason
        assert end(ranks, process, record)["failure"]["rank"] == 2


@pytest.mark.extended
def test_a_launcher_that_is_interrupted_may_end_before_its_ranks_answer(orphans, record):
    ranks, process, _ = orphans
    ranks[0].say(signal=1)
    ranks[1].die()
    ranks[0].hear()
    assert end(ranks, process, record)["status"] == "interrupted"


@pytest.mark.extended
def test_an_error_after_a_signal_is_an_interruption(job):
    ranks, process, record, _ = job
    ranks[0].say(signal=1)
    ranks[0].say(error={"message": "OSError: the terminal is closed"})
    assert ranks[1].hear().code == INTERRUPTED
    assert end(ranks, process, record)["status"] == "interrupted"


@pytest.mark.extended
def test_a_record_that_cannot_be_written_does_not_keep_the_ranks(job):
    ranks, process, record, _ = job
    record.write_text("{")
    ranks[2].die()
    assert "the record cannot be written" in ranks[0].hear().reason
    for rank in ranks:
        rank.die()
    assert process.wait(timeout=20) == 0
