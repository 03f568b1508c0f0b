"""The agent of a rank, in processes that are stuck, killed, stopped, or lose their launcher."""

import ctypes
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from array import array
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from candle_p1.failure import agent
from candle_p1.failure._native import Agent
from candle_p1.failure.agent import ABORT_DELAY
from candle_p1.failure.protocol import Inbox, encode_order
from tests.conftest import wait_until

pytestmark = pytest.mark.extended  # slow; in `make test`, test_installation.py kills a rank

NAMES = {"host": "here", "name": "rank 1 (host here)", "server": "the watchdog"}
NAMES |= {"server_pid": 0, "stopped_s": 10, "unwind_s": 3}


@pytest.fixture
def ends():
    near, far = socket.socketpair()
    with near, far:
        far.settimeout(20)
        yield near, far


def lines_of(far):
    """Yields the messages that arrive, until the other end closes."""
    inbox = Inbox()
    while data := far.recv(4096):
        yield from inbox.take(data)


def is_gone(process):
    with suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


def test_beats_say_how_far_the_process_has_come_and_go_on_while_it_holds_pythons_lock(ends):
    near, far = ends
    numbers = memoryview(array("q", [1, 2, 0]))
    native = Agent("")
    native.watch(near.fileno(), numbers, **NAMES)
    lines = lines_of(far)
    assert next(lines) == [1, 2, 0]
    numbers[0] = 2**62
    native.send(b'{"phase": "train"}\n')
    assert {"phase": "train"} in list(itertools.islice(lines, 2))
    ctypes.PyDLL(None).sleep(3)  # unlike CDLL, it keeps the lock
    far.setblocking(False)
    assert far.recv(65536).count(b"[4611686018427387904,2,0]\n") >= 2
    far.settimeout(20)
    native.unwatch(b'{"bye": true}\n')
    near.close()
    assert list(lines_of(far))[-1] == {"bye": True}
    native.stop()


def test_messages_may_arrive_in_any_pieces():
    inbox, text = Inbox(), b'{"phase": "load"}\n\n[1,2,3]\n'
    found = [each for i in range(len(text)) for each in inbox.take(text[i : i + 1])]
    assert found == [{"phase": "load"}, [1, 2, 3]]


PROCESS = """
import array, ctypes, os, signal, socket, sys
from candle_p1.failure._native import Agent

what = sys.argv[2]
connection = socket.socket(fileno=int(sys.argv[1]))
numbers = array.array("q", [5, 0, 0])
native = Agent("")
if what == "aborts, which is handled":  # as a log does, or MPI
    signal.signal(signal.SIGABRT, lambda *arguments: os._exit(9))
native.watch(connection.fileno(), numbers, host="h", name="rank 1", server="w", server_pid=0,
             stopped_s=10, unwind_s=3)
libc = ctypes.CDLL(None)
if what == "disarmed":
    native.disarm()
os.write(1, b"ready")
if what == "disarmed":
    sys.exit(native.await_order(600) * 5)
if what == "signalled":
    os.write(native.signal_fd, bytes([signal.SIGTERM]))
if what in ("stuck", "signalled"):
    ctypes.PyDLL(None).sleep(600)  # holds Python's lock
if what == "has a child":
    os.fork() or libc.exit(0)
    os.wait()
    os._exit(6)
if what == "has said bye":
    native.unwatch(b"")
    libc.exit(5)
if what == "exits":
    libc.exit(5)
if what in ("crashes", "is killed"):
    os.kill(os.getpid(), signal.SIGSEGV if what == "crashes" else signal.SIGKILL)
os.kill(os.getpid(), signal.SIGABRT)
"""


@pytest.fixture
def begin(ends):
    """Returns a function that starts a process with an agent, to which `far` is connected."""
    near, far = ends
    with ExitStack() as stack:

        def begin(what):
            command = [sys.executable, "-c", PROCESS, str(near.fileno()), what]
            process = subprocess.Popen(
                command, pass_fds=[near.fileno()], stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            near.close()
            assert process.stdout.read(5) == b"ready"
            return process, far

        yield begin


LAST_WORD, SIGNALLED = {"last_word": True}, {"signal": signal.SIGTERM}


@pytest.mark.parametrize(
    ("what", "order", "code", "printed", "told"),
    [  # It ends as it is told, even if it is stuck.
        ("stuck", b"\0" + encode_order(3, "why\n\0not", speak=True), 3, "why\nnot", None),
        ("stuck", encode_order(143, "x", speak=False), 143, "", None),
        ("signalled", b"", 143, "", SIGNALLED),
        ("disarmed", encode_order(3, "x", speak=False), 5, "", None),  # it ends by itself
        # One that ends itself leaves a last word.
        ("exits", b"", 5, "", LAST_WORD),
        ("aborts", b"", -signal.SIGABRT, "", LAST_WORD),
        ("aborts, which is handled", b"", 9, "", LAST_WORD),
        ("crashes", b"", -signal.SIGSEGV, "", None),
        ("is killed", b"", -signal.SIGKILL, "", None),
        ("has a child", b"", 6, "", None),
        ("has said bye", b"", 5, "", None),
    ],
)
def test_how_a_process_ends_is_told_and_printed(begin, what, order, code, printed, told):
    process, far = begin(what)
    far.sendall(order)
    lines = [each for each in lines_of(far) if each in (LAST_WORD, SIGNALLED)]
    assert process.wait(timeout=30) == code
    assert lines == [told] * bool(told)
    text = process.stderr.read().decode()
    assert text == (f"\ncandle-p1: the job ends: {printed}\n" if printed else "")


RANK = """
import mmap, os, sys, time
from candle_p1.failure import agent

segment = os.path.join(os.environ["SEGMENTS"], f"sm_segment.host.0.1234.{os.getpid()}")
with open(segment, "w+b") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)  # as MPI does

agent.guard_launcher(1)
os.write(1, f"{os.getpid()}\\n".encode())  # at once: ranks share the pipe
if sys.argv[1] == "ending":
    launcher = os.getppid()
    while os.getppid() == launcher:
        time.sleep(0.001)
    sys.exit()  # before the agent looks again
time.sleep(600)
"""
LAUNCHER = """
import os, subprocess, sys
os.environ["PMIX_SERVER_TMPDIR"] = f"{os.environ['SESSIONS']}/ompi.{os.getpid()}"
os.makedirs(os.environ["PMIX_SERVER_TMPDIR"] + "/1")
script = ["sh", "-c", '"$@"; true', "sh"] if sys.argv[2] == "in a script" else []
ranks = [subprocess.Popen([*script, sys.executable, "-c", *sys.argv[1:]]) for _ in range(3)]
codes = [rank.wait() for rank in ranks]
"""


@pytest.fixture
def launch(tmp_path):
    """Returns a function that starts a launcher with three ranks, which have not started MPI."""
    with ExitStack() as stack:

        def launch(mode):
            (tmp_path / "segments").mkdir()
            places = {name.upper(): str(tmp_path / name) for name in ("sessions", "segments")}
            process = subprocess.Popen(
                [sys.executable, "-c", LAUNCHER, RANK, mode],
                stdout=subprocess.PIPE,
                env=os.environ | places,
            )
            stack.callback(process.communicate)
            launcher = psutil.Process(process.pid)
            stack.callback(kill, launcher)
            ranks = [psutil.Process(int(process.stdout.readline())) for _ in range(3)]
            for rank in ranks:
                stack.callback(kill, rank)
            return launcher, ranks

        yield launch


def kill(process):
    with suppress(psutil.NoSuchProcess):
        process.kill()


@pytest.mark.parametrize(
    ("mode", "number"),
    [
        *itertools.product(("plain", "in a script"), (signal.SIGSTOP, signal.SIGKILL)),
        ("ending", signal.SIGKILL),
    ],
)
def test_ranks_end_with_their_launcher_and_leave_nothing(launch, tmp_path, mode, number):
    launcher, ranks = launch(mode)
    launcher.send_signal(number)
    wait_until(lambda: all(map(is_gone, [launcher, *ranks])), 30)
    assert not list((tmp_path / "sessions").iterdir())
    assert not list((tmp_path / "segments").iterdir())


def test_a_job_that_is_suspended_as_a_whole_goes_on(launch):
    launcher, ranks = launch("plain")
    for process in (launcher, *ranks):
        process.suspend()
    time.sleep(4)
    for process in (*ranks, launcher):  # the launcher last, as if it were still stopped
        process.resume()
    time.sleep(3)
    assert not any(map(is_gone, ranks))


def test_what_killed_jobs_have_left_is_removed_and_nothing_else(tmp_path, monkeypatch):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    own, memory = tmp_path / f"ompi.{os.getpid()}", tmp_path / "memory"
    old = [own, tmp_path / f"prted.{ended.pid}", tmp_path / f"ompi.host.{ended.pid}"]
    old += [tmp_path / f"other.{ended.pid}", memory / "sm_segment.h.old", memory / "table"]
    new = [tmp_path / f"ompi.{ended.pid}", memory / "sm_segment.h.new"]
    for path in (*old, *new):
        (path / "1" if path.parent == tmp_path else memory).mkdir(parents=True, exist_ok=True)
        if path.parent == memory:
            path.write_text("")
    for path in old:
        os.utime(path, (0, 0))
    monkeypatch.setattr(agent, "MEMORY", memory)
    monkeypatch.setattr(agent, "launcher", lambda: (os.getpid(), str(own)))
    monkeypatch.setattr(agent, "FIRST_NAMESPACE", str(Path("/proc/self/ns/pid").readlink()))
    agent.remove_leftovers()
    gone = [path.name for path in (*old, *new) if not path.exists()]
    assert gone == [f"prted.{ended.pid}", "sm_segment.h.old"]


@pytest.mark.parametrize(("chosen", "delay"), [("", "3"), (f"{ABORT_DELAY}=9", "9")])
def test_mpi_waits_before_it_ends_a_rank_unless_the_user_wants_another_delay(chosen, delay):
    script = "import os; from candle_p1.failure import agent\n"
    script += f"agent.guard_launcher(10); print(os.environ[{ABORT_DELAY!r}])"
    command = ["env", "-u", ABORT_DELAY, *chosen.split(), sys.executable, "-c", script]
    assert subprocess.check_output(command, text=True) == f"{delay}\n"
