"""Runs a command up to a time limit, and ends it together with every process it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO

import psutil

from candle_p1.failure.protocol import SAVE_SIGNALS

GRACE_S = 30.0
"""How long a command may take to end after SIGTERM."""
SHOW_CURSOR = "\x1b[?25h"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GUARD = """\
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.getppid() != int(parent):  # the parent died before prctl took effect
        sys.exit(128 + signal.SIGTERM)
os.execvp(command[0], command)
"""
"""Executes a command, which gets SIGTERM when the process that started it dies, even by kill -9.

The kernel sends the signal; a launcher then ends its ranks. Only Linux offers this (prctl(2),
PR_SET_PDEATHSIG, which survives execve); elsewhere the command runs without it. This is a program
of its own because Python code cannot safely run between fork and exec in a process that has
threads.
"""


def guarded(command: Sequence[str], parent: int) -> list[str]:
    """Returns a command that runs another one, which ends with the process `parent` (GUARD)."""
    return [sys.executable, "-I", "-S", "-c", GUARD, str(parent), *command]


class Interrupted(BaseException):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Makes SIGNALS raise Interrupted; those that are ignored, as under nohup, stay ignored."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_to_end(
    command: Sequence[str],
    variables: Mapping[str, str],
    output: IO[bytes],
    limit_s: float | None = None,
    grace_s: float = GRACE_S,
) -> tuple[int, bool]:
    """Runs a command in an environment until it ends, or is asked to end after `limit_s`.

    If it takes longer than `grace_s` then, it is killed. No process that it started survives this
    call, even if an exception ends it. If this process is killed, the command gets SIGTERM (see
    `GUARD`); for that, call this function from the main thread, which is what the kernel watches.

    Returns:
        Its exit code, negative for a signal, and whether it reached the limit.
    """
    this = psutil.Process()
    others = this.children()
    process: subprocess.Popen[bytes] | None = None
    try:
        process = subprocess.Popen(
            guarded(command, os.getpid()),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(variables),
            start_new_session=True,  # Ctrl-C in the terminal reaches this process alone
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.returncode = _end(psutil.Process(process.pid), grace_s)
            return process.returncode, True
        _end_orphans(process.pid, grace_s)
        return code, False
    finally:
        # A signal may have interrupted Popen when the process had started already.
        for child in this.children():
            if child not in others:
                _end(child, grace_s)
        if process:
            process.poll()


def run_in_terminal(command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Runs a launcher in the foreground of a terminal; returns the exit code for a shell.

    After Ctrl-C, the launcher ends with any code, without a message, and with the cursor hidden.
    It gets SIGTERM if this process is killed.
    """
    process = subprocess.Popen(guarded(command, os.getpid()), env=dict(variables))
    numbers = (*SIGNALS, *SAVE_SIGNALS, signal.SIGCHLD)
    caught = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    signal.pthread_sigmask(signal.SIG_BLOCK, caught)
    ended_by = 0
    while process.poll() is None:
        info = signal.sigtimedwait(caught, 1.0)
        if info is None or info.si_signo == signal.SIGCHLD:
            continue
        # The terminal sends Ctrl-C to the launcher, too, which a second one would kill.
        if info.si_signo != signal.SIGINT or info.si_code <= 0:
            process.send_signal(info.si_signo)
        if info.si_signo in SIGNALS:
            ended_by = ended_by or info.si_signo
    if not (ended_by and process.returncode):
        return process.returncode if process.returncode >= 0 else 128 - process.returncode
    with suppress(OSError):  # of a terminal that was closed
        name = signal.Signals(ended_by).name
        print(f"{SHOW_CURSOR}\ncandle-p1: interrupted by {name}", flush=True)
    return 128 + ended_by


def _session(leader: int) -> list[psutil.Process]:
    members = []
    for process in psutil.process_iter():
        with suppress(OSError):
            if process.pid != leader and os.getsid(process.pid) == leader:
                members.append(process)
    return members


def _end_orphans(leader: int, grace_s: float) -> None:
    """Kills what a command that has ended left behind, unless it ends by itself.

    A launcher that was killed leaves its ranks; they notice, and complete their record.
    """
    with suppress(Interrupted):
        psutil.wait_procs(_session(leader), timeout=grace_s)
    for member in _session(leader):
        with suppress(psutil.NoSuchProcess):
            member.kill()


def _end(process: psutil.Process, grace_s: float) -> int:
    """Ends a process and all it started: SIGTERM to its group, then SIGKILL to what is left.

    A launcher that has lost a node, or one that is stopped, ignores SIGTERM. A further signal to
    this process cuts the wait between the two short. Returns the exit code.
    """
    family = process.children(recursive=True)
    deadline = time.monotonic() + grace_s
    try:
        os.killpg(process.pid, signal.SIGTERM)
    except ProcessLookupError:  # it has no group of its own yet
        process.terminate()
    with suppress(psutil.TimeoutExpired, Interrupted):
        process.wait(grace_s)
        # The watchdog server, which completes the record, ends last.
        psutil.wait_procs(family, timeout=max(0.0, deadline - time.monotonic()))
    for member in (process, *family, *_session(process.pid)):
        with suppress(psutil.NoSuchProcess):
            member.kill()
    return int(process.wait())
