"""What a rank reports to the watchdog, its signals, and the guard of its launcher.

The thread in C++ (native/agent.h) sends what is reported here, and ends the process when it is told
to. Ranks without a watchdog have a server each, in a thread of this process, to which they report
in the same way.
"""

from __future__ import annotations

import atexit
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

import psutil

from candle_p1.failure import _native, progress
from candle_p1.failure.diagnosis import MEMORY, has_stalled, may_have_lost_peer
from candle_p1.failure.protocol import SAVE_SIGNALS, Limits, encode
from candle_p1.failure.server import WatchdogServer
from candle_p1.files import mount_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from candle_p1.failure.protocol import Endpoint


UNWIND_S = 3.0
"""How long the server may take to answer an error, to end this process after a signal, and to end
itself after the last rank."""
MAX_CHARS = 10_000
"""Of an error's message, and of its traceback, whose end says most."""
ABORT_DELAY = "OMPI_MCA_opal_abort_delay"
"""How long Open MPI waits, in s, before it ends a rank that has lost another one or has crashed. By
default it ends it within a millisecond, by `_exit`, which leaves no last word."""
SESSION = re.compile(r"(?:ompi|prted)\.(\d{1,9})")
"""The directories that Open MPI 5's launcher and daemons make, with their process ids."""
LOCAL = ("btrfs", "ext2", "ext3", "ext4", "overlay", "tmpfs", "xfs", "zfs")
"""File systems that only one node uses."""
FIRST_NAMESPACE = "pid:[4026531836]"
"""Linux's name for the namespace that has all processes of a node (PROC_PID_INIT_INO)."""

_agent: _native.Agent | None = None
_is_guarded = False


def _process_agent(terminal: str | None) -> _native.Agent:
    """Returns the agent of this process, which exists once."""
    global _agent
    if _agent is None:
        _agent = _native.Agent(terminal or "")
    return _agent


def _release() -> None:
    """Ends the agent, unless it guards a launcher."""
    global _agent
    if _agent is not None and not _is_guarded:
        _agent.stop()
        _agent = None


@atexit.register
def _clean() -> None:
    """Removes what a launcher has left that died just before this process ends."""
    if _agent is not None:
        _agent.clean()


def guard_launcher(stopped_s: float, terminal: str | None = None) -> None:
    """From now on, ends this process if the launcher that started it dies or is stopped.

    To be called before MPI starts, which then ends no rank before the watchdog knows which one was
    lost first. Until this rank is connected to the watchdog, a stopped rank of its node ends it.
    They may be stopped for `stopped_s`. The terminal is the device that shows the output.
    """
    global _is_guarded
    # Longer than the server waits for news of what may be the cause.
    os.environ.setdefault(ABORT_DELAY, "3")
    if os.getppid() > 1:  # else it is outside of this container
        session = os.fsencode(os.environ.get("PMIX_SERVER_TMPDIR", ""))
        _process_agent(terminal).guard(os.getppid(), session, stopped_s)
        _is_guarded = True


def launcher() -> tuple[int, str]:
    """Returns the process id of the launcher, and its directory; 0 and "" if there is none."""
    pid, session = _agent.launcher if _agent is not None else (0, b"")
    return pid, os.fsdecode(session)


def end_guard() -> None:
    """Ends guarding: this process is not one of several."""
    global _is_guarded
    _is_guarded = False
    _release()


def remove_leftovers() -> None:
    """Removes what killed jobs of this user have left on this node, if Open MPI started this one.

    A launcher does not start while there is a directory that is named after its process id, and
    the files of its ranks take memory. Nothing is removed where not all processes of the node can
    be seen, or other nodes use the directory.
    """
    session = launcher()[1]
    if not session or str(Path("/proc/self/ns/pid").readlink()) != FIRST_NAMESPACE:
        return
    for directory in _old_files(Path(session).parent):
        named = SESSION.fullmatch(directory.name)
        if named and _native.is_gone(int(named[1])):
            rmtree(directory, ignore_errors=True)
    if segments := [path for path in _old_files(MEMORY) if _native.is_segment(path.name)]:
        mapped = set()  # by any process of this user
        for pid in psutil.pids():
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
                mapped |= {line.split(maxsplit=5)[5] for line in lines if str(MEMORY) in line}
        for segment in segments:
            if str(segment) not in mapped:
                segment.unlink(missing_ok=True)


def _old_files(directory: Path) -> list[Path]:
    """Returns what is old and this user's in a directory of this node.

    What is younger than a minute may belong to a job that is starting.
    """
    found: list[Path] = []
    with suppress(OSError), os.scandir(directory) as entries:
        if mount_of(directory)[0] not in LOCAL:
            return found
        for entry in entries:
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if status.st_mtime < time.time() - 60 and status.st_uid == os.getuid():
                    found.append(Path(entry.path))
    return found


class RankAgent:
    """Connects a rank to the watchdog of its run: counts steps, handles signals, reports its end.

    Signals reach the server at once, even while the main thread is inside a collective or a library
    holds Python's lock: Python's C-level handler writes their numbers to the agent's thread.
    Ctrl-C raises KeyboardInterrupt, as usual. After SIGTERM and SIGHUP the server ends this
    process, because a handler could raise its exception anywhere, which crashes the process if
    TensorFlow is tracing a model. SIGUSR1 and SIGUSR2 ask a run that can save (see `saving`) to
    save a checkpoint and end. Elsewhere they interrupt it like SIGTERM.

    Args:
        rank: This rank.
        connection: A connection to the server, which has welcomed this rank.
        endpoint: The server.
        memory: Where this rank counts its progress; int64, shape (3,). Rank 0 shares it with the
            server, which knows the exact number of steps even if all ranks are killed at once.
        server: The server's process, on the rank that has started it.
        stopped_s: How long the launcher and the server may be stopped, in s.
        own_server: The thread of this rank's own server, if there is no watchdog.
        recorder: The command that completes the record if the server dies, apart from its options,
            and the file descriptors that it keeps open; None: that is not this rank's part.
        terminal: The device of the terminal that shows the output; None: none does.
        warnings: What the user should know.

    Attributes:
        save_signal: The number of the signal that asked this rank to save; None so far.
    """

    def __init__(
        self,
        rank: int,
        connection: socket.socket,
        endpoint: Endpoint,
        memory: memoryview,
        *,
        server: subprocess.Popen[bytes] | None = None,
        stopped_s: float = Limits.stopped_s,
        own_server: threading.Thread | None = None,
        recorder: tuple[Sequence[str], Sequence[int]] | None = None,
        terminal: str | None = None,
        warnings: Sequence[str] = (),
    ) -> None:
        self._rank, self._memory, self.warnings = rank, memory, list(warnings)
        self._socket, self._endpoint, self._server = connection, endpoint, server
        self._own_server, self._recorder = own_server, recorder
        self._handlers: dict[int, Any] = {}
        self._old_wakeup_fd: int | None = None
        self._can_save = self._is_interrupted = False
        self.save_signal: int | None = None
        self._native = _process_agent(terminal)
        progress.use(memory)
        host = platform.node()
        self._native.watch(
            connection.fileno(),
            memory,
            host=host,
            name=f"rank {rank} (host {host})",
            server=str(endpoint),
            server_pid=server.pid if server else 0,
            stopped_s=stopped_s,
            # The server of this rank alone needs Python's lock.
            unwind_s=UNWIND_S if own_server is None else 30.0,
        )
        if threading.current_thread() is threading.main_thread():
            self._catch_signals()
        self._thread = threading.Thread(target=self._flush_at_end, name="watchdog", daemon=True)
        self._thread.start()

    @property
    def steps(self) -> int:
        """The training steps that this rank has begun; see `count_steps`."""
        return self._memory[progress.STEPS]

    count_steps = staticmethod(progress.count_steps)

    @property
    def save_requested(self) -> bool:
        """Whether a signal has asked this rank to save and end."""
        return self.save_signal is not None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """In the body, this rank can save: it looks at `save_requested` again and again."""
        self._can_save = True
        self._send(can_save=True)
        try:
            yield
        finally:
            self._can_save = False
            self._send(can_save=False)

    def report_record(self, record: Path) -> None:
        """Reports the record to complete if the run fails; every rank may do so."""
        if self._rank == 0 or self._own_server is not None:
            self._send(record=str(record))
        if self._recorder is not None:
            command, inherited = self._recorder
            reason = f"{self._endpoint} died: the run ended because nobody watched it any more"
            delay_s = 0.0 if self._rank == 0 else 3.0  # the second rank leaves it to rank 0
            words = [*command, "--record", str(record), "--complete", reason]
            self._native.set_recorder(
                [os.fsencode(word) for word in [*words, "--delay", str(delay_s)]],
                inherited,
                speaks=self._rank == 0,
            )

    def report_phase(self, path: tuple[str, ...]) -> None:
        """Reports the phase that this rank has entered."""
        self._send(phase="/".join(path))

    def report_error(self, message: str, traceback: str | None = None) -> bool:
        """Reports that this rank failed, and waits until the server has told the others to end.

        Returns whether the server has done so; some rank has then printed why. An error after
        Ctrl-C is reported as an interruption: libraries through which KeyboardInterrupt propagates
        (TensorFlow, while it traces) raise their own errors instead.

        The message comes after the name of its class if that says something to the user; a bug has
        a traceback.
        """
        if self._is_interrupted:
            self.report_interrupt()
            return True
        self._native.disarm()
        stalled = has_stalled(message)
        if stalled:
            time.sleep(2 * _native.BEAT_S)  # the other ranks' step counts must arrive first
        error: dict[str, Any] = {"message": message[:MAX_CHARS], "stalled": stalled}
        error["lost_peer"] = may_have_lost_peer(message)
        self._send(error=error | {"traceback": traceback and traceback[-MAX_CHARS:]})
        return self._native.await_order(UNWIND_S)

    def report_interrupt(self) -> None:
        """Reports that Ctrl-C has unwound this rank, and waits until that is recorded."""
        self._native.disarm()
        self._send(signal=signal.SIGINT)
        self._native.await_order(UNWIND_S)

    def close(self) -> None:
        """Says bye: the run is over for this rank, with success or with an error of all ranks.

        Signals are handled as before.
        """
        self._native.disarm()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._old_wakeup_fd is not None:
            signal.set_wakeup_fd(self._old_wakeup_fd)
        progress.stop()
        self._native.unwatch(encode(bye=True))
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
        if self._server is not None:
            with suppress(subprocess.TimeoutExpired):  # it waits for the other ranks to say bye
                self._server.wait(timeout=UNWIND_S)
        if self._own_server is not None:
            self._own_server.join()
        _release()

    def _catch_signals(self) -> None:
        fd = self._native.signal_fd
        self._old_wakeup_fd = signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, *SAVE_SIGNALS):
            handler = signal.getsignal(number)
            if handler in (signal.SIG_IGN, None):
                continue  # nohup, or a program that embeds Python, handles it
            self._handlers[number] = handler
            signal.signal(number, self._handle_signal)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if number in SAVE_SIGNALS and (self._can_save or self.save_signal):
            self.save_signal = self.save_signal or number
            return  # the server limits how long this takes
        if number != signal.SIGINT:
            return
        self._is_interrupted = True
        handler = self._handlers[number]
        if callable(handler):
            handler(number, frame)  # Python's own raises KeyboardInterrupt
        else:
            raise KeyboardInterrupt

    def _send(self, **message: Any) -> None:
        self._native.send(encode(**message))

    def _flush_at_end(self) -> None:
        """Runs in a thread, which the agent waits for before it ends this process."""
        if self._native.await_end():
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            self._native.set_flushed()


def connect_to_own_server(
    limits: Limits, token: str, memory: memoryview
) -> tuple[socket.socket, threading.Thread]:
    """Starts a server for this rank alone; returns a connection to it, and its thread."""
    near, far = socket.socketpair()
    server = WatchdogServer(1, limits, token, counter=memory)
    server.connections.add(far)
    thread = threading.Thread(target=server.watch, name="watchdog server", daemon=True)
    thread.start()
    return near, thread
