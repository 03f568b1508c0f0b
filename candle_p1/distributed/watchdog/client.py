"""A rank's connection to the watchdog: the rank reports to it, and ends when told to."""

from __future__ import annotations

import json
import mmap
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.distributed import job_guard, progress
from candle_p1.distributed._heartbeat import Heartbeat
from candle_p1.distributed.launch_environment import terminal
from candle_p1.distributed.watchdog.connections import GONE
from candle_p1.distributed.watchdog.leaving import leave
from candle_p1.distributed.watchdog.listening import connect
from candle_p1.distributed.watchdog.lost_peer import has_stalled, may_have_lost_peer
from candle_p1.distributed.watchdog.protocol import BEAT_S, END_OF_MESSAGE, PROBE
from candle_p1.distributed.watchdog.reporter import UNWIND_S, Reporter
from candle_p1.distributed.watchdog.settings import (
    INTERFACE_VARIABLE,
    OFF_VARIABLE,
    PORT_VARIABLE,
)
from candle_p1.distributed.watchdog.start import Station, start_hub, start_server
from candle_p1.distributed.watchdog.unwatched import UnwatchedRun
from candle_p1.errors import EXIT_CODE, DistributedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from candle_p1.distributed.comm import Communicator
    from candle_p1.distributed.job_guard import Trouble

PATIENCE_S = 6.0
"""How long this process may take to end once it was told to, or has lost the watchdog."""
SEND_S = 60.0
"""How long the server may take to read what a rank sends."""
MAX_CHARS = 10_000
"""Of an error's message, and of its traceback, whose end says most."""


def watch(comm: Communicator, record: Path, kept_open: Sequence[int] = ()) -> Reporter:
    """Starts the watchdog of a run, and connects all ranks to it; collective.

    Args:
        comm: The ranks of the run.
        record: Where rank 0 expects to write the run record; see `report_record`.
        kept_open: File descriptors of rank 0 that the server keeps open as long as it lives.

    Returns:
        What a rank reports to.

    Raises:
        DistributedError: Some rank cannot connect; the same on every rank.
        SetupError: The server cannot listen, or a variable is wrong; the same on every rank.
    """
    memory, descriptor = _make_memory()
    try:
        server, station = start_server(comm, record, descriptor, kept_open)
    finally:
        os.close(descriptor)
    if station.is_off:
        progress.use(memory)
        return UnwatchedRun(comm.rank, memory)
    return WatchdogClient(comm, server, station, memory)


class WatchdogClient(Reporter):
    """Connects a rank to the watchdog server of its run, or to its hub. Collective.

    Signals reach the server at once, even while the main thread is inside a collective or a library
    holds Python's lock: the connection is the wake-up file descriptor, to which Python's C-level
    handler writes the number of the signal. Signs of life come from a thread in C++, for the same
    reason.

    SIGUSR1 and SIGUSR2 ask a run that can save (see `saving`) to save a checkpoint and end.
    Elsewhere they interrupt it like SIGTERM.

    Args:
        comm: The ranks of the run.
        server: The server's process, on rank 0.
        station: Where the server listens.
        memory: Where this rank counts its progress; int64, shape (3,).

    Raises:
        DistributedError: Some rank cannot connect; the same on every rank.
    """

    def __init__(
        self,
        comm: Communicator,
        server: subprocess.Popen[bytes] | None,
        station: Station,
        memory: memoryview,
    ) -> None:
        super().__init__(memory, station.warnings, lambda can_save: self._send(can_save=can_save))
        self._server, self._rank = server, comm.rank
        self._silent_s = station.silent_s
        self._socket = self._connect(comm, start_hub(comm, station))
        self._send_lock = threading.Lock()
        if threading.current_thread() is threading.main_thread():
            self._signals.catch(self._socket.fileno())
        self._ending = threading.Event()
        progress.use(memory)
        self._heartbeat = Heartbeat(
            self._socket.fileno(),
            memory,
            period_s=BEAT_S,
            patience_s=PATIENCE_S,
            code=EXIT_CODE + 1,
        )
        self._thread = threading.Thread(target=self._listen, name="watchdog", daemon=True)
        self._thread.start()
        if comm.size > 1:
            job_guard.report_to(self._report_trouble)

    def _connect(self, comm: Communicator, station: Station) -> socket.socket:
        hello = {"rank": comm.rank, "host": socket.gethostname(), "pid": os.getpid()}
        if comm.size > 1:
            hello |= {"launcher": os.getppid(), "session": job_guard.session_directory()}
        connection: socket.socket | None = None
        error = station.error
        if error is None:
            try:
                connection = connect(
                    station.addresses, station.port, station.token, hello, station.silent_s
                )
                connection.settimeout(SEND_S)  # a wake-up file descriptor must not block
            except OSError as caught:
                error = f"cannot connect to the watchdog on {station.host} by TCP ({caught})"
        found = comm.first(error and f"{hello['host']}: {error}")
        if found is None:
            assert connection is not None
            return connection
        num_failed = int(comm.allreduce_sum(np.array([error is not None], np.int64))[0])
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        if connection is not None:
            connection.close()
        os.close(self._stderr)
        rank, text = found
        host, _, why = text.partition(": ")
        others = f", and neither can {num_failed - 1} more of {comm.size} ranks"
        raise DistributedError(
            f"rank {rank} (host {host}) {why}{others * (num_failed > 1)}. The nodes of a job must"
            f" be able to connect to each other: open the port ({PORT_VARIABLE} chooses which),"
            f" choose another network by {INTERFACE_VARIABLE}, or run without the watchdog by"
            f" {OFF_VARIABLE}=off"
        ).on_all_ranks()

    def report_record(self, record: Path) -> None:
        """Reports the record to complete if the run fails; on rank 0, others need not."""
        if self._rank == 0:
            self._send(record=str(record))

    def report_phase(self, path: tuple[str, ...]) -> None:
        """Reports the phase that this rank has entered."""
        self._send(phase="/".join(path))

    def report_error(self, message: str, traceback: str | None = None) -> bool:
        """Reports that this rank failed, and waits until the server has told the others to end.

        Returns whether the server has done so; some rank has then printed why. See Reporter.
        """
        if self._signals.is_interrupted:
            self.report_interrupt()
            return True
        self._end_by_itself()
        stalled = has_stalled(message)
        if stalled:
            time.sleep(2 * BEAT_S)  # the other ranks' step counts must arrive first
        error: dict[str, Any] = {"message": message[:MAX_CHARS], "stalled": stalled}
        error["lost_peer"] = may_have_lost_peer(message)
        self._send(error=error | {"traceback": traceback and traceback[-MAX_CHARS:]})
        self._thread.join(timeout=UNWIND_S)
        return not self._thread.is_alive()

    def report_interrupt(self) -> None:
        """Reports that Ctrl-C has unwound this rank, and waits until that is recorded."""
        self._end_by_itself()
        self._send(signal=signal.SIGINT)
        self._thread.join(timeout=UNWIND_S)

    def _end_by_itself(self) -> None:
        """From now on, this rank ends by raising, so nobody has to end it."""
        self._ending.set()
        self._heartbeat.spare()

    def close(self) -> None:
        """Says bye: the run is over for this rank, with success or with an error of all ranks."""
        job_guard.report_to(None)
        self._end_by_itself()
        self._signals.restore()
        self._heartbeat.stop()
        progress.stop()
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

    def _listen(self) -> None:
        """Runs in a thread: ends the process when told to, or when the watchdog is out of reach."""
        buffer = b""
        connected = True
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while not (self._ending.is_set() and not connected):
                ready = selector.select(BEAT_S) if connected else self._ending.wait(BEAT_S)
                if connected and ready:
                    data = self._receive()
                    if not data:  # this rank has closed the connection, or the server has exited
                        selector.unregister(self._socket)
                        connected = False
                    *lines, buffer = (buffer + data).split(b"\n")
                    if orders := list(filter(None, lines)):
                        self._obey(json.loads(orders[0]))
                        return
                signalled_s = self._signals.signalled_s
                late = signalled_s is not None and time.monotonic() - signalled_s > UNWIND_S
                if late and not self._ending.is_set():
                    leave(128 + signal.SIGTERM)

    def _receive(self) -> bytes:
        """Returns what the server has sent; nothing if the connection has ended."""
        number = 0
        try:
            if data := self._socket.recv(65536):
                return data
        except TimeoutError as error:
            if error.errno is None:  # Python's own: there is nothing to read
                return PROBE
            number = error.errno
        except OSError as error:
            number = error.errno or 0
        if number in (0, *GONE) and not self._ending.is_set():
            time.sleep(0.1)  # the other thread may be about to note the error that it was told
            number = self._heartbeat.error
        if number not in (0, *GONE) and not self._ending.is_set():
            self._end_cut_off(os.strerror(number))
        return b""

    def _end_cut_off(self, why: str) -> None:
        """Ends this process, and the launcher on this node: the watchdog does not answer."""
        self._heartbeat.end_soon()
        host = socket.gethostname()
        self._print(
            f"rank {self._rank} (host {host}) ends: it cannot reach the watchdog any more ({why}):"
            f" the node of rank 0 is lost, or {host} is cut off from the network"
        )
        leave(EXIT_CODE + 1, is_lost=True)

    def _obey(self, order: dict[str, Any]) -> None:
        """Ends this process at once: its main thread may be stuck in a collective."""
        if not self._ending.is_set():
            self._heartbeat.end_soon()
        if order["speak"]:
            self._print(f"the job ends: {order['end']}")
            with suppress(OSError):
                _show_cursor()
        if self._ending.is_set():
            return
        interrupted = order["status"] == "interrupted"
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        code = 128 + signal.SIGTERM if interrupted else EXIT_CODE + 1
        leave(code, is_lost=order.get("lost", False))


def _make_memory() -> tuple[memoryview, int]:
    """Returns memory for this rank's progress, int64, shape (3,), and its file descriptor."""
    descriptor = os.memfd_create("candle-p1-progress")
    os.ftruncate(descriptor, progress.NUM_BYTES)
    return memoryview(mmap.mmap(descriptor, progress.NUM_BYTES)).cast("q"), descriptor


def _show_cursor() -> None:
    """Shows the terminal's cursor again, which the progress bar of a killed rank had hidden."""
    if device := terminal():
        with Path(device).open("wb") as screen:
            screen.write(b"\x1b[?25h")
