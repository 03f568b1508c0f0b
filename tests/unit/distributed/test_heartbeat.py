"""Signs of life, whatever the rest of the process does."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from array import array

import pytest

from candle_p1.distributed._heartbeat import Heartbeat
from candle_p1.distributed.watchdog.protocol import (
    LAST_WORD,
    Inbox,
    ProtocolError,
    Stamp,
    decode_beat,
)
from tests.conftest import wait_until

LIMITS = {"period_s": 0.02, "patience_s": 600, "code": 3}


def memory_of(*numbers):
    return memoryview(array("q", numbers))


@pytest.fixture
def ends():
    near, far = socket.socketpair()
    with near, far:
        far.settimeout(20)
        yield near, far


def test_beats_say_how_far_the_process_has_come(ends):
    near, far = ends
    stamp = memory_of(0, 63, 64)
    heart, inbox = Heartbeat(near.fileno(), stamp, **LIMITS), Inbox()
    try:
        assert inbox.take(far.recv(5)).stamp is None  # 1 + 2 + 3 + 1 bytes
        assert inbox.take(far.recv(2)).stamp == Stamp(0, 63, 64)
        stamp[0] = 2**62
        while inbox.take(far.recv(4096)).stamp != Stamp(2**62, 63, 64):
            pass
    finally:
        heart.stop()
        heart.stop()
    near.close()
    while far.recv(4096):
        pass


def test_beats_go_on_while_the_main_thread_holds_pythons_lock(ends):
    near, far = ends
    heart = Heartbeat(near.fileno(), memory_of(0, 0, 0), **LIMITS)
    ctypes.PyDLL(None).usleep(999_999)  # unlike CDLL, it keeps the lock
    far.setblocking(False)
    assert far.recv(65536).count(b"\xff") > 2
    heart.stop()


def test_beats_signals_and_last_words_do_not_disturb_messages():
    arrived = Inbox().take(b'{"a\xc0\xc0\x81\xc0\xff": \x0f\xc0\x831\x7f}\0{\xc0')
    assert arrived.messages == [b'{"a": 1}']
    assert arrived.signals == [signal.SIGTERM]
    assert arrived.stamp == Stamp(0, 0, 1)
    assert arrived.has_last_word


@pytest.mark.parametrize("beat", [b"", b"\xc0\xc0", b"\xc0\xc0\xc0\xc0", b"\xc0\xc0\xe0\xc0"])
def test_what_is_no_beat_is_refused(beat):
    with pytest.raises(ProtocolError):
        decode_beat(beat)


PROCESS = """
import array, ctypes, socket, sys
from candle_p1.distributed._heartbeat import Heartbeat

connection = socket.socket(fileno=int(sys.argv[1]))
stamp = array.array("q", [0, 0, 0])
heart = Heartbeat(connection.fileno(), stamp, period_s=0.05, patience_s=0.2, code=7)
sys.argv[2] == "spared" and heart.spare()
sys.argv[2] == "doomed" and heart.end_soon()
ctypes.PyDLL(None).sleep(3 if sys.argv[2] == "spared" else 600)
"""


@pytest.fixture
def hung(ends):
    """Returns a function that starts a process which holds Python's lock and never reacts."""
    near, far = ends

    def hung(what):
        command = [sys.executable, "-c", PROCESS, str(near.fileno()), what]
        process = subprocess.Popen(command, pass_fds=[near.fileno()])
        assert far.recv(1)
        return process, far

    return hung


@pytest.mark.parametrize("what", ["told", "doomed"])
def test_a_process_that_ignores_an_order_is_ended(hung, what):
    process, far = hung(what)
    if what == "told":
        far.sendall(b'\n\n{"end": "x"}\n')
    assert process.wait(timeout=20) == 7


def test_a_process_that_ends_by_itself_is_not_ended(hung):
    process, far = hung("spared")
    far.sendall(b'{"end": "x"}\n')
    assert process.wait(timeout=20) == 0


def test_a_process_that_was_told_nothing_is_not_ended(hung):
    process, far = hung("alive")
    far.sendall(b"\n")
    time.sleep(1)
    assert process.poll() is None
    process.kill()
    process.wait()


ENDING = """
import ctypes, os, signal, socket, sys
from array import array
from candle_p1.distributed._heartbeat import Heartbeat

connection = socket.socket(fileno=int(sys.argv[1]))
if sys.argv[2] == "raises its handled signal":  # as a log does, or MPI
    signal.signal(signal.SIGABRT, lambda *arguments: os._exit(9))
heart = Heartbeat(connection.fileno(), array("q", [0] * 3), period_s=0.05, patience_s=600, code=7)
libc, kill = ctypes.CDLL(None), lambda number: os.kill(os.getpid(), number)
if sys.argv[2] == "has a child":
    os.fork() or libc.exit(0)
    os.wait()
    sys.argv[2] = "is killed"
if sys.argv[2] == "stops":
    heart.stop()
    libc.exit(5)
{
    "exits": lambda: libc.exit(5),
    "aborts": libc.abort,
    "raises its handled signal": lambda: kill(signal.SIGABRT),
    "is killed": lambda: kill(signal.SIGKILL),
    "crashes": lambda: kill(signal.SIGSEGV),
    "leaves": lambda: os._exit(5),
}[sys.argv[2]]()
"""
ENDS = {
    "exits": (5, True),
    "aborts": (-signal.SIGABRT, True),
    "raises its handled signal": (9, True),
    "is killed": (-signal.SIGKILL, False),
    "has a child": (-signal.SIGKILL, False),
    "crashes": (-signal.SIGSEGV, False),
    "leaves": (5, False),
    "stops": (5, False),
}
"""The exit code of a process that ends in this way, and whether it leaves a last word."""


@pytest.mark.parametrize("what", ENDS)
def test_a_process_that_ends_itself_leaves_a_last_word(what):
    near, far = socket.socketpair()
    with far:
        with near:
            command = [sys.executable, "-c", ENDING, str(near.fileno()), what]
            process = subprocess.Popen(command, pass_fds=[near.fileno()])
        far.settimeout(20)
        data = b""
        while received := far.recv(4096):
            data += received
    code, has_word = ENDS[what]
    assert process.wait(timeout=20) == code
    assert data.count(LAST_WORD) == has_word
    assert Inbox().take(data).has_last_word == has_word


def test_a_stopped_process_gives_no_sign_of_life(hung):
    process, far = hung("alive")
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    far.setblocking(False)
    while True:
        try:
            far.recv(65536)
        except BlockingIOError:
            break
    time.sleep(0.5)
    with pytest.raises(BlockingIOError):
        far.recv(1)
    process.send_signal(signal.SIGCONT)
    far.settimeout(20)
    wait_until(lambda: far.recv(4096), 20)
    process.kill()
    process.wait()
