"""A run that nobody watches, where ranks cannot connect to each other by TCP.

A rank that raises an error, or is interrupted, completes the record itself. One that is killed or
stopped, or whose node is lost, is noticed by the launcher at best, and the record says "running".
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from candle_p1.distributed import job_guard, progress
from candle_p1.distributed.watchdog.leaving import leave
from candle_p1.distributed.watchdog.protocol import SAVE_SIGNALS, SIGNALS
from candle_p1.distributed.watchdog.reporter import UNWIND_S, Reporter
from candle_p1.distributed.watchdog.settings import OFF_VARIABLE, Limits
from candle_p1.errors import EXIT_CODE

if TYPE_CHECKING:
    from pathlib import Path

    from candle_p1.distributed.job_guard import Trouble


LOOK_S = 0.2
"""How often to look whether that time is over."""


class UnwatchedRun(Reporter):
    """Takes the place of a WatchdogClient.

    Python's C-level handler writes the number of a signal to a socket, which a thread reads: the
    main thread may be inside a collective, where it calls no handler in Python.

    Args:
        rank: This rank.
        memory: Where it counts its progress; int64, shape (3,).
    """

    def __init__(self, rank: int, memory: memoryview) -> None:
        warning = (
            f"nobody watches this run ({OFF_VARIABLE}=off): if a rank is killed or stopped, or a"
            ' node is lost, the record says "running", and the other ranks may wait forever'
        )
        super().__init__(memory, [warning], lambda can_save: None)
        self._rank = rank
        self._record: Path | None = None
        self._phase: str | None = None
        self._save_s = Limits.from_environment().save_s
        self._signal: int | None = None
        self._closed = threading.Event()
        self._wakeup, self._signalled = socket.socketpair()
        self._wakeup.setblocking(False)
        if threading.current_thread() is threading.main_thread():
            self._signals.catch(self._wakeup.fileno())
        job_guard.report_to(self._report_trouble)
        self._thread = threading.Thread(target=self._tend, name="signals", daemon=True)
        self._thread.start()

    def report_record(self, record: Path) -> None:
        """Keeps the path of the record to complete if the run fails; every rank may do so."""
        self._record = record

    def report_phase(self, path: tuple[str, ...]) -> None:
        """Keeps the phase that this rank has entered."""
        self._phase = "/".join(path)

    def report_error(self, message: str, traceback: str | None = None) -> bool:
        """Records that this rank failed; returns False, because nobody has printed it."""
        if self._signals.is_interrupted:
            self.report_interrupt()
            return True
        reason = f"rank {self._rank} failed: {message}"
        self._end_record("failed", reason, self._rank, traceback)
        return False

    def report_interrupt(self) -> None:
        """Records that a signal has interrupted this rank."""
        name = signal.Signals(self._signal or signal.SIGINT).name
        reason = f"interrupted by {name}, which rank {self._rank} received"
        self._end_record("interrupted", reason, self._rank)

    def _report_trouble(self, trouble: Trouble) -> None:
        """Ends this process, because another one of the job has died or was stopped."""
        self._end_record("failed", str(trouble), rank=None)
        self._print(f"the job ends: {trouble}")
        leave(EXIT_CODE + 1)

    def close(self) -> None:
        """Handles signals as before."""
        job_guard.report_to(None)
        self._closed.set()
        self._signals.restore()
        self._thread.join()
        self._wakeup.close()
        self._signalled.close()
        os.close(self._stderr)
        progress.stop()

    def _tend(self) -> None:
        """Runs in a thread: ends this process after a signal, or if saving takes too long."""
        end_s = float("inf")
        while not self._closed.is_set():
            if select.select([self._signalled], [], [], LOOK_S)[0]:
                for number in self._signalled.recv(4096):
                    if number not in (*SIGNALS, *SAVE_SIGNALS):
                        continue  # a library handles it
                    until_s = time.monotonic() + self._grace_s(number)
                    if until_s < end_s:
                        end_s, self._signal = until_s, number
            if time.monotonic() >= end_s and not self._closed.is_set():
                self.report_interrupt()
                leave(128 + (self._signal or signal.SIGTERM))

    def _grace_s(self, number: int) -> float:
        """Returns how long this rank may take to end by itself after a signal, in s."""
        if number == signal.SIGINT:
            return UNWIND_S
        return self._save_s if self._signals.asks_to_save(number) else 0.0

    def _end_record(
        self, status: str, reason: str, rank: int | None, traceback: str | None = None
    ) -> None:
        """Completes the record, unless another rank has done so."""
        from candle_p1.errors import RecordError
        from candle_p1.records.record import end_record
        from candle_p1.records.types import Failure

        failure = Failure(
            reason=reason,
            rank=rank,
            host=os.uname().nodename,
            pid=os.getpid(),
            phase=self._phase,
            steps=self.steps,
            traceback=traceback,
        )
        if self._record is None:
            return
        with suppress(OSError, RecordError):
            end_record(self._record, status, failure)
