"""A rank's connection to the watchdog server: the rank reports to it, and ends when told to."""

from __future__ import annotations

import json
import mmap
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from candle_p1.distributed import job_guard
from candle_p1.distributed.launch_environment import module_command, terminal
from candle_p1.distributed.watchdog_server import (
    COUNTER_BYTES,
    END_OF_MESSAGE,
    SAVE_SIGNALS,
    TOKEN_VARIABLE,
    WELCOME,
)
from candle_p1.errors import EXIT_CODE, DistributedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from candle_p1.distributed.comm import Communicator
    from candle_p1.distributed.job_guard import Trouble

UNWIND_S = 3.0
"""How long the main thread may take to unwind after Ctrl-C, or the server to end this process after
another signal. The process then ends itself."""
CONNECT_S = 10.0
RETRY_S = 0.1
SEND_S = 60.0
"""How long the server may take to read what a rank sends."""
HEARTBEAT_S = 1.0
"""How often a rank reports the number of steps that it has begun, by which it is known to run."""
MAX_CHARS = 10_000
"""Of an error's message, and of its traceback, whose end says most."""
HOROVOD_SHUTDOWN = "Horovod has been shut down"
"""The error of Horovod's operations after a stall, and after another rank has died."""


class WatchdogClient:
    """Connects a rank to the watchdog server of its run, which rank 0 starts. Collective.

    Signals reach the server at once, even while the main thread is inside a collective or a library
    holds Python's lock: the connection is the wake-up file descriptor, to which Python's C-level
    handler writes the number of the signal. After SIGTERM and SIGHUP, the server ends the process,
    because a handler could raise its exception anywhere, which crashes the process if TensorFlow is
    tracing a model. Ctrl-C raises KeyboardInterrupt, as usual.

    SIGUSR1 and SIGUSR2 ask a run that can save (see `saving`) to save a checkpoint and end.
    Elsewhere they interrupt it like SIGTERM.

    Args:
        comm: The ranks of the run.
        record: Where rank 0 expects to write the run record; see `report_record`.
        kept_open: File descriptors of rank 0 that the server keeps open as long as it lives.

    Attributes:
        save_signal: The number of the signal that asked this rank to save; None so far.

    Raises:
        DistributedError: Some rank cannot connect; the same on every rank.
    """

    def __init__(self, comm: Communicator, record: Path, kept_open: Sequence[int] = ()) -> None:
        # Kept to print why a job ended: ranks other than 0 redirect their output to a file.
        self._stderr = os.dup(2)
        self._counter, counter_fd = _make_counter()
        try:
            self._server, where = (
                _start_server(comm, record, counter_fd, kept_open)
                if comm.rank == 0
                else (None, None)
            )
        finally:
            os.close(counter_fd)
        addresses, port, token = comm.broadcast(where) or ([], 0, "")
        hello = {"rank": comm.rank, "host": socket.gethostname(), "pid": os.getpid()}
        if comm.size > 1:
            hello["launcher"] = os.getppid()
        error: str | None = None
        try:
            self._socket = _connect_any(addresses, port, token, hello)
        except OSError as caught:
            error = f"{socket.gethostname()}: {caught}"
        errors = [text for _, text in comm.collect(error)]
        if errors:
            if self._server is not None:
                self._server.kill()
                self._server.wait()
            if error is None:
                self._socket.close()
            os.close(self._stderr)
            raise DistributedError(
                f"{len(errors)} of {comm.size} ranks cannot reach rank 0 by TCP at"
                f" {', '.join(addresses) or 'any address'} ({errors[0]}): the nodes of a job must"
                " be able to connect to each other"
            ).on_all_ranks()
        self._send_lock = threading.Lock()
        self._handlers: dict[int, Any] = {}
        self._old_wakeup_fd = -1
        self._signalled_s: float | None = None
        self._interrupted = False
        self._can_save = False
        self.save_signal: int | None = None
        if threading.current_thread() is threading.main_thread():
            self._catch_signals()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="watchdog", daemon=True)
        self._thread.start()
        if comm.size > 1:
            job_guard.report_to(self._report_trouble)

    def report_record(self, record: Path) -> None:
        """Reports the record to complete if the run fails; for rank 0."""
        self._send(record=str(record))

    @property
    def steps(self) -> int:
        """The training steps that this rank has begun; see `count_step`."""
        return self._counter[0]

    def count_step(self) -> None:
        """Counts a training step that begins.

        Rank 0 counts in memory that it shares with the server, which knows the exact number even if
        all ranks are killed at once.
        """
        self._counter[0] += 1

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

    def report_phase(self, path: tuple[str, ...]) -> None:
        """Reports the phase that this rank has entered."""
        self._send(phase="/".join(path))

    def report_error(self, message: str, traceback: str | None = None) -> bool:
        """Reports that this rank failed, and waits until the server has told the others to end.

        Returns whether the server has done so; some rank has then printed why.

        An error after Ctrl-C is reported as an interruption: libraries through which
        KeyboardInterrupt propagates (TensorFlow, while it traces) raise their own errors instead.
        """
        if self._interrupted:
            self.report_interrupt()
            return True
        self._ending.set()  # this rank ends by raising, so nobody has to end it
        stalled = HOROVOD_SHUTDOWN in message
        if stalled:
            self._send(steps=self.steps)
            # The other ranks' step counts, and news of a dead rank, must arrive first.
            time.sleep(2 * HEARTBEAT_S)
        error: dict[str, Any] = {"message": message[:MAX_CHARS], "stalled": stalled}
        self._send(error=error | {"traceback": traceback and traceback[-MAX_CHARS:]})
        self._thread.join(timeout=UNWIND_S)
        return not self._thread.is_alive()

    def report_interrupt(self) -> None:
        """Reports that Ctrl-C has unwound this rank, and waits until that is recorded."""
        self._ending.set()
        self._send(signal=signal.SIGINT)
        self._thread.join(timeout=UNWIND_S)

    def close(self) -> None:
        """Says bye: the run is over for this rank, with success or with an error of all ranks."""
        job_guard.report_to(None)
        self._ending.set()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._handlers:
            signal.set_wakeup_fd(self._old_wakeup_fd)
        self._send(bye=True)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=UNWIND_S)
        self._socket.close()
        os.close(self._stderr)
        if self._server is not None:
            with suppress(subprocess.TimeoutExpired):  # it waits for the other ranks to say bye
                self._server.wait(timeout=UNWIND_S)

    def _report_trouble(self, trouble: Trouble) -> None:
        self._send(trouble=asdict(trouble))

    def _send(self, **message: Any) -> None:
        with self._send_lock, suppress(OSError):  # nobody listens once the server has exited
            self._socket.sendall(json.dumps(message).encode() + END_OF_MESSAGE)

    def _catch_signals(self) -> None:
        self._old_wakeup_fd = signal.set_wakeup_fd(self._socket.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, *SAVE_SIGNALS):
            handler = signal.getsignal(number)
            if handler in (signal.SIG_IGN, None):
                continue  # nohup, or a program that embeds Python, handles it
            self._handlers[number] = handler
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handles Ctrl-C; after other signals, the server or `_listen` ends this process."""
        if number in SAVE_SIGNALS and (self._can_save or self.save_requested):
            self.save_signal = self.save_signal or number
            return  # the server sees to it that this takes no longer than it may
        self._signalled_s = time.monotonic()
        if number != signal.SIGINT:
            return
        self._interrupted = True
        handler = self._handlers[number]
        if callable(handler):
            handler(number, frame)  # Python's own raises KeyboardInterrupt
        else:
            raise KeyboardInterrupt

    def _listen(self) -> None:
        """Runs in a thread: gives signs of life, and ends the process when told to."""
        buffer = b""
        connected, next_beat = True, 0.0
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while not (self._ending.is_set() and not connected):
                ready = (
                    selector.select(HEARTBEAT_S) if connected else self._ending.wait(HEARTBEAT_S)
                )
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + HEARTBEAT_S
                    self._send(steps=self.steps)
                if connected and ready:
                    try:
                        data = self._socket.recv(65536)
                    except OSError:
                        data = b""
                    if not data:  # this rank has closed the connection, or the server has exited
                        selector.unregister(self._socket)
                        connected = False
                    buffer += data
                    if b"\n" in buffer:
                        self._obey(json.loads(buffer.split(b"\n")[0]))
                        return
                signalled_s = self._signalled_s
                late = signalled_s is not None and time.monotonic() - signalled_s > UNWIND_S
                if late and not self._ending.is_set():
                    os._exit(128 + signal.SIGTERM)

    def _obey(self, order: dict[str, Any]) -> None:
        """Ends this process at once: its main thread may be stuck in a collective."""
        if order["speak"]:
            with suppress(OSError):
                os.write(self._stderr, f"\ncandle-p1: the job ends: {order['end']}\n".encode())
            with suppress(OSError):
                _show_cursor()
        if self._ending.is_set():
            return
        interrupted = order["status"] == "interrupted"
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        job_guard.remove_leftovers()
        job_guard.remove_shared_memory()
        os._exit(128 + signal.SIGTERM if interrupted else EXIT_CODE + 1)


def _make_counter() -> tuple[memoryview, int]:
    """Returns a counter in memory, int64, shape (1,), and the file descriptor of this memory."""
    descriptor = os.memfd_create("candle-p1-steps")
    os.ftruncate(descriptor, COUNTER_BYTES)
    return memoryview(mmap.mmap(descriptor, COUNTER_BYTES)).cast("q"), descriptor


def _start_server(
    comm: Communicator, record: Path, counter_fd: int, kept_open: Sequence[int]
) -> tuple[subprocess.Popen[bytes] | None, tuple[list[str], int, str] | None]:
    """Starts the server; returns its process, and the addresses to try, its port and the token.

    Returns None for both if it does not start.
    """
    token = secrets.token_hex(16)
    one_node = comm.num_nodes == 1
    command = module_command("candle_p1.distributed.watchdog_server")
    command += ["--bind", "127.0.0.1" if one_node else "0.0.0.0"]
    command += ["--num-ranks", str(comm.size), "--record", str(record.resolve())]
    command += ["--starter", str(os.getpid()), "--counter", str(counter_fd)]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            # Until there is a record, beside which its log is.
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[counter_fd, *kept_open],
            env=_environment_without_launcher() | {TOKEN_VARIABLE: token},
        )
    except OSError:
        return None, None
    assert process.stdout is not None
    port = int(process.stdout.readline() or 0)
    process.stdout.close()
    return process, (["127.0.0.1"] if one_node else _addresses(), port, token)


def _show_cursor() -> None:
    """Shows the terminal's cursor again, which the progress bar of a killed rank had hidden."""
    if device := terminal():
        with Path(device).open("wb") as screen:
            screen.write(b"\x1b[?25h")


def _connect_any(
    addresses: list[str], port: int, token: str, hello: dict[str, Any]
) -> socket.socket:
    """Connects to the first address that answers, and says hello.

    Raises:
        OSError: None answers; this is the error of the last one.
    """
    last = OSError("the watchdog server did not start")
    for address in addresses if port else ():
        deadline = time.monotonic() + CONNECT_S
        while time.monotonic() < deadline:
            try:
                connection = socket.create_connection((address, port), timeout=CONNECT_S)
            except OSError as error:
                last = error
                break
            try:
                connection.sendall(
                    f"{token}\n{json.dumps({'hello': hello})}".encode() + END_OF_MESSAGE
                )
                if connection.recv(len(WELCOME), socket.MSG_WAITALL) == WELCOME:
                    connection.settimeout(SEND_S)  # a wake-up file descriptor must not block
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    return connection
                last = OSError(f"the watchdog server at {address} closed the connection")
            except OSError as error:
                last = error
            connection.close()  # the server may have had too many connections: try again
            time.sleep(RETRY_S)
    raise last


def _addresses() -> list[str]:
    """Returns the addresses and the name by which other nodes may reach this one."""
    found = [
        item.address
        for interface in psutil.net_if_addrs().values()
        for item in interface
        if item.family == socket.AF_INET and not item.address.startswith("127.")
    ]
    return [*found, socket.gethostname()]


def _environment_without_launcher() -> dict[str, str]:
    """Returns the environment without what would make the server look like a rank of the job."""
    prefixes = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "PALS_", "ALPS_", "JSM_")
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
