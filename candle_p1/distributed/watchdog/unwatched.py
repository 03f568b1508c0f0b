"""A run that nobody watches, where ranks cannot connect to each other by TCP.

A rank that raises an error, or is interrupted, completes the record itself. One that is killed or
stopped, or whose node is lost, is noticed by the launcher at best, and the record says "running".
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from candle_p1.distributed import job_guard, progress, rank_log
from candle_p1.distributed.watchdog.run_signals import RunSignals
from candle_p1.distributed.watchdog.settings import OFF_VARIABLE, Limits
from candle_p1.errors import EXIT_CODE

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from candle_p1.distributed.job_guard import Trouble


UNWIND_S = 3.0
"""How long the main thread may take to unwind after Ctrl-C."""
POLL_S = 0.2


class UnwatchedRun:
    """Takes the place of a WatchdogClient.

    Args:
        rank: This rank.
        record: Where the record is expected.
        memory: Where it counts its progress; int64, shape (3,).

    Attributes:
        warnings: What the user should know.
    """

    def __init__(self, rank: int, record: Path, memory: memoryview) -> None:
        self._rank, self._record, self._memory = rank, record, memory
        self._phase: str | None = None
        self._save_s = Limits.from_environment().save_s
        self.warnings = [
            f"nobody watches this run ({OFF_VARIABLE}=off): if a rank is killed or stopped, or a"
            ' node is lost, the record says "running", and the other ranks may wait forever'
        ]
        self._signals = RunSignals(lambda can_save: None)
        self._closed = threading.Event()
        if threading.current_thread() is threading.main_thread():
            self._signals.catch(None)
        job_guard.report_to(self._report_trouble)
        threading.Thread(target=self._tend, name="signals", daemon=True).start()

    def report_record(self, record: Path) -> None:
        """Keeps the path of the record."""
        self._record = record

    @property
    def steps(self) -> int:
        """The training steps that this rank has begun."""
        return self._memory[progress.STEPS]

    def count_step(self) -> None:
        """Counts a training step that begins."""
        progress.count_step()

    @property
    def save_signal(self) -> int | None:
        """The number of the signal that asked this rank to save; None so far."""
        return self._signals.save_signal

    @property
    def save_requested(self) -> bool:
        """Whether a signal has asked this rank to save and end."""
        return self.save_signal is not None

    def saving(self) -> AbstractContextManager[None]:
        """In the body, this rank can save: it looks at `save_requested` again and again."""
        return self._signals.saving()

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
        name = signal.Signals(self._signals.last or signal.SIGINT).name
        reason = f"interrupted by {name}, which rank {self._rank} received"
        self._end_record("interrupted", reason, self._rank)

    def _report_trouble(self, trouble: Trouble) -> None:
        """Ends this process, because another one of the job has died or was stopped."""
        self._end_record("failed", str(trouble), rank=None)
        with suppress(OSError):
            os.write(2, f"\ncandle-p1: the job ends: {trouble}\n".encode())
        os._exit(EXIT_CODE + 1)

    def close(self) -> None:
        """Handles signals as before."""
        job_guard.report_to(None)
        self._closed.set()
        self._signals.restore()
        progress.stop()

    def _tend(self) -> None:
        """Runs in a thread: ends this process after a signal, or if saving takes too long."""
        signals = self._signals
        while not self._closed.wait(POLL_S):
            number, at = signals.last, signals.signalled_s
            late = at is not None and time.monotonic() - at > UNWIND_S * signals.is_interrupted
            if not late and time.monotonic() - signals.saved_from_s > self._save_s:
                late, signals.last = True, signals.save_signal or 0
            if late and not self._closed.is_set():
                self.report_interrupt()
                rank_log.write_out()
                os._exit(128 + (number or signal.SIGTERM))

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
        with suppress(OSError, RecordError):
            end_record(self._record, status, failure)
