"""Watches, from within each rank, the other processes of the job on its node.

A rank that dies closes its connection to the watchdog server. A rank that is stopped (SIGSTOP) does
not, and neither the launcher nor MPI notices it; nor does anyone notice that the launcher has been
killed or stopped, and then nobody ends the ranks. So a thread of every rank looks once a second at
its launcher, which is its parent, and at the next one of the launcher's children, which are the
ranks of the node. It begins before MPI does, where a missing rank would leave the others waiting.
MPI's start holds Python's lock meanwhile, so until then a child process looks instead.

It counts its looks, not the time between them, in which this process may itself be stopped. A job
that is suspended as a whole (Ctrl-Z, `scontrol suspend`) and continued later therefore goes on. A
process that a debugger has halted has another state than a stopped one, and may remain in it.
"""

from __future__ import annotations

import atexit
import os
import platform
import shutil
import signal
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from candle_p1.distributed.launch_environment import read_number
from candle_p1.errors import EXIT_CODE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHARED_SEGMENTS = ("sm_segment.", "vader_segment.")
"""How the names of the files begin through which ranks of a node exchange messages: Open MPI's."""
STOPPED_VARIABLE = "CANDLE_P1_STOPPED_S"
STOPPED_S = 10.0
"""How long a process of the job may be stopped while others run; the variable changes it. 0: as
long as it likes."""
LOOK_S = 1.0
OPEN_MPI = ("mpirun", "mpiexec", "orterun", "prterun", "prted")
"""The launcher of Open MPI, and its daemon on other nodes."""
ABORT_DELAY = "OMPI_MCA_opal_abort_delay"
"""How long Open MPI waits, in s, before it ends a rank that has lost another one or has crashed."""
ABORT_DELAY_S = 3
"""Longer than the watchdog waits for news of what may be the cause."""
LOST_S = 3.0
"""How long these may take to end once a node is lost."""


@dataclass(frozen=True)
class Trouble:
    """What has happened to another process of the job.

    Attributes:
        what: "died" or "was stopped …".
        pid: Its process id.
        is_launcher: Whether it is the launcher.
    """

    what: str
    pid: int
    is_launcher: bool

    def __str__(self) -> str:
        who = "the launcher" if self.is_launcher else "a rank"
        return f"{who} (host {platform.node()}, pid {self.pid}) {self.what}"


def limit_from(variable: str, default_s: float) -> float:
    """Returns a time limit, in s, that the environment may change; infinite for 0.

    Raises:
        SetupError: The variable is not a number of seconds.
    """
    return read_number(variable, default_s, "a number of seconds; 0 means no limit") or inf


def was_stopped(seconds: float) -> str:
    """Returns what has happened to a process, for a message."""
    return f"was stopped (SIGSTOP) for {seconds:g} s"


def is_stopped(process: psutil.Process) -> bool:
    """Whether a signal has stopped a process; False if it has gone or cannot be seen."""
    try:
        return process.is_running() and bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def is_gone(process: psutil.Process) -> bool:
    """Whether a process has ended."""
    try:
        return not process.is_running() or bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


class JobGuard:
    """A thread that reports once what happens to the launcher or to a neighbour.

    A process that was stopped is killed after the report, because its launcher may be unable to.

    Raises:
        SetupError: The time limit in the environment is not a number.
    """

    def __init__(self) -> None:
        self._limit_s = limit_from(STOPPED_VARIABLE, STOPPED_S)
        self._report: Callable[[Trouble], None] | None = None
        self._ended = threading.Event()
        self._rank = psutil.Process()
        self._launcher: psutil.Process | None = None
        with suppress(psutil.Error):  # it may be outside of this container
            self._launcher = psutil.Process(os.getppid()) if os.getppid() > 1 else None
        self.has_launcher = self._launcher is not None
        self._stopped_s: dict[psutil.Process, float] = {}

    @contextmanager
    def begin(self) -> Iterator[None]:
        """Guards the job: from a child process during the body, afterwards from the thread."""
        child = os.fork()
        if child == 0:
            try:
                self._run_as_child()
            finally:
                os._exit(0)
        try:
            yield
        finally:
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        threading.Thread(target=self._run, name="job guard", daemon=True).start()

    def _run_as_child(self) -> None:
        for number in (signal.SIGUSR1, signal.SIGUSR2):  # Slurm sends them to all processes
            signal.signal(number, signal.SIG_IGN)
        since = time.monotonic()
        while self._rank.pid == os.getppid():
            time.sleep(0.1)
            if time.monotonic() - since < LOOK_S:
                continue
            since = time.monotonic()
            # While the rank is stopped, it would not look either.
            troubles = [] if is_stopped(self._rank) else self._look()
            if troubles:
                if troubles[0].is_launcher:
                    self._remove_files()
                _say(troubles[0])
                for trouble in troubles:
                    _kill_stopped(trouble.pid)
                self._rank.kill()

    def report_to(self, report: Callable[[Trouble], None] | None) -> None:
        """Passes trouble on to a function; None: says so and ends this process."""
        self._report = report

    def end(self) -> None:
        """Ends the thread."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            if troubles := self._look():
                if troubles[0].is_launcher:
                    self._remove_files()
                _kill_soon(troubles)
                (self._report or _say)(troubles[0])
                if self._report is None:
                    os._exit(EXIT_CODE + 1)
                return

    def remove_leftovers(self) -> None:
        """Removes what a launcher that has been killed would have removed; nothing if it is there.

        Open MPI 5 names its directory after the launcher's pid, and while it is there, a later
        launcher of the same pid does not start. The files of the shared memory that this rank has
        mapped keep their memory until they are removed.
        """
        if self._launcher is None or self._rank.ppid() == self._launcher.pid:
            return
        self._remove_files()

    def end_lost(self) -> None:
        """Sees to it that the launcher ends, which waits for a node that it has lost forever."""
        if self._launcher is not None:
            end_launcher(self._launcher, session_directory())
            remove_shared_memory()

    def _remove_files(self) -> None:
        assert self._launcher is not None
        remove_session(session_directory(), self._launcher.pid)
        remove_shared_memory()

    def _look(self) -> list[Trouble]:
        assert self._launcher is not None
        if self._rank.ppid() != self._launcher.pid:
            return [Trouble("died", self._launcher.pid, is_launcher=True)]
        self._stopped_s = {
            process: self._stopped_s.get(process, -LOOK_S) + LOOK_S
            for process in [self._launcher, *self._next_sibling()]
            if is_stopped(process)
        }
        what = was_stopped(self._limit_s)
        return [
            Trouble(what, process.pid, is_launcher=process == self._launcher)
            for process, stopped_s in self._stopped_s.items()
            if stopped_s > self._limit_s
        ]

    def _next_sibling(self) -> list[psutil.Process]:
        """Returns the next child of the launcher in the order of process ids, cyclically."""
        assert self._launcher is not None
        pids: list[int] = []
        with suppress(OSError, ValueError):  # not on Linux, or the process has gone meanwhile
            for children in Path(f"/proc/{self._launcher.pid}/task").glob("*/children"):
                pids += map(int, children.read_text().split())
        mine = self._rank.pid
        pids.sort(key=lambda pid: (pid <= mine, pid))
        with suppress(psutil.Error):
            return [psutil.Process(pid) for pid in pids[:1] if pid != mine]
        return []


def session_directory() -> str:
    """Returns the directory of the launcher's files on this node; empty if it is not known."""
    return os.environ.get("PMIX_SERVER_TMPDIR", "")


def remove_session(directory: str, launcher: int) -> None:
    """Removes the directory of a launcher, unless it is not named after its process id."""
    if Path(directory).name == f"ompi.{launcher}":
        shutil.rmtree(directory, ignore_errors=True)


def end_launcher(launcher: psutil.Process, session: str) -> None:
    """Kills Open MPI's launcher or its daemon on this node a moment later, if it is still there.

    Once it has lost another node, it does not end by itself, and ignores SIGTERM.
    """
    with suppress(psutil.Error):
        if launcher.name() in OPEN_MPI:
            removed = session if Path(session).name == f"ompi.{launcher.pid}" else ""
            _detach('sleep "$1"; kill -KILL "$2"; rm -rf "$3"', LOST_S, launcher.pid, removed)


def remove_shared_memory() -> None:
    """Removes the files of the shared memory through which this rank exchanges messages.

    For a job that ends: a launcher ends the other ranks as soon as one exits with a code that is
    not 0, before MPI removes these files. What is mapped already stays usable.
    """
    for segment in _shared_segments(os.getpid()):
        with suppress(OSError):  # another rank was faster
            segment.unlink()


def _shared_segments(pid: int) -> set[Path]:
    """Returns the files of MPI's shared memory that a process has mapped and that have a name."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    paths = {Path(fields[5]) for line in lines if len(fields := line.split(maxsplit=5)) > 5}
    return {path for path in paths if path.name.startswith(SHARED_SEGMENTS)}


def _kill_stopped(pid: int) -> None:
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        if is_stopped(process):
            process.kill()


def _kill_soon(troubles: list[Trouble]) -> None:
    """Starts a process that kills what is stopped, because the report may end this one at once."""
    pids = []
    for trouble in troubles:
        with suppress(psutil.NoSuchProcess):
            if is_stopped(psutil.Process(trouble.pid)):
                pids.append(str(trouble.pid))
    if pids:
        _detach('sleep "$1"; shift; kill -KILL "$@"', LOOK_S, *pids)


def _detach(script: str, *arguments: object) -> None:
    """Starts a process that executes shell commands, and outlives this one."""
    subprocess.Popen(
        ["sh", "-c", script, "sh", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _say(trouble: Trouble) -> None:
    with suppress(OSError):
        os.write(2, f"\ncandle-p1: the job ends: {trouble} outside of a run\n".encode())


_guard: JobGuard | None = None


@contextmanager
def begin() -> Iterator[None]:
    """Guards the job, if a launcher started this process, from the begin of the body on.

    The body starts MPI, which holds Python's lock while it waits for the other ranks. Open MPI ends
    a rank that has lost another one within a millisecond, by `_exit`, which leaves no last word, so
    it is told to wait until the watchdog has noticed which one was lost first.

    Raises:
        SetupError: The time limit in the environment is not a number.
    """
    global _guard
    guard = JobGuard()
    os.environ.setdefault(ABORT_DELAY, str(ABORT_DELAY_S))
    if guard.has_launcher:
        with guard.begin():
            yield
        _guard = guard
        atexit.register(remove_leftovers)
    else:
        yield


def report_to(report: Callable[[Trouble], None] | None) -> None:
    """Passes trouble on to a function, as long as there is a run; None: ends this process."""
    if _guard is not None:
        _guard.report_to(report)


def remove_leftovers() -> None:
    """Removes what a killed launcher has left, before this process ends; see JobGuard."""
    if _guard is not None:
        with suppress(psutil.Error):
            _guard.remove_leftovers()


def end_lost() -> None:
    """Ends the launcher on this node, which is cut off, and removes what it and MPI would leave."""
    if _guard is not None:
        _guard.end_lost()


def end() -> None:
    """Ends guarding: this process is not one of several."""
    global _guard
    if _guard is not None:
        _guard.end()
    _guard = None
