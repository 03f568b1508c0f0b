"""What a rank reports to while there is a run, whether somebody watches it or not."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING

from candle_p1.distributed import progress
from candle_p1.distributed.watchdog.run_signals import RunSignals

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

UNWIND_S = 3.0
"""How long the main thread may take to unwind after Ctrl-C, or the server to end this process after
another signal. The process then ends itself."""


class Reporter(ABC):
    """Counts the steps of this rank and handles its signals; subclasses report its end.

    Args:
        memory: Where this rank counts its progress; int64, shape (3,).
        warnings: What the user should know.
        say_whether: Called when this rank begins (True) or ceases (False) to be able to save.

    Attributes:
        warnings: What the user should know.
    """

    def __init__(
        self, memory: memoryview, warnings: list[str], say_whether: Callable[[bool], None]
    ) -> None:
        self._memory, self.warnings = memory, warnings
        self._signals = RunSignals(say_whether)
        # Kept to print why a job ended: ranks other than 0 redirect their output to a file.
        self._stderr = os.dup(2)

    @property
    def steps(self) -> int:
        """The training steps that this rank has begun; see `count_step`."""
        return self._memory[progress.STEPS]

    def count_step(self) -> None:
        """Counts a training step that begins.

        Rank 0 counts in memory that it shares with the server, which knows the exact number even if
        all ranks are killed at once.
        """
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

    @abstractmethod
    def report_record(self, record: Path) -> None:
        """Reports the record to complete if the run fails; every rank may do so."""

    @abstractmethod
    def report_phase(self, path: tuple[str, ...]) -> None:
        """Reports the phase that this rank has entered."""

    @abstractmethod
    def report_error(self, message: str, traceback: str | None = None) -> bool:
        """Reports that this rank failed; returns whether some rank has printed why.

        An error after Ctrl-C is reported as an interruption: libraries through which
        KeyboardInterrupt propagates (TensorFlow, while it traces) raise their own errors instead.

        Args:
            message: The error, after the name of its class if that says something to the user.
            traceback: Where it was raised, if it is a bug.
        """

    @abstractmethod
    def report_interrupt(self) -> None:
        """Reports that a signal has interrupted this rank."""

    @abstractmethod
    def close(self) -> None:
        """Ends reporting: the run is over for this rank. Signals are handled as before."""

    def _print(self, text: str) -> None:
        with suppress(OSError):
            os.write(self._stderr, f"\ncandle-p1: {text}\n".encode())
