"""The signals of a rank: those that end it, and those that ask it to save and end."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from candle_p1.failure.protocol import SAVE_SIGNALS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType


class RunSignals:
    """Handles the signals of this rank while there is a run.

    Ctrl-C raises KeyboardInterrupt, as usual. After SIGTERM and SIGHUP the watchdog ends this
    process, because a handler could raise its exception anywhere, which crashes the process if
    TensorFlow is tracing a model.

    Args:
        say_whether: Called when this rank begins (True) or ceases (False) to be able to save.

    Attributes:
        save_signal: The number of the signal that asked this rank to save; None so far.
        is_interrupted: Whether Ctrl-C has been raised.
    """

    def __init__(self, say_whether: Callable[[bool], None]) -> None:
        self._say_whether = say_whether
        self._handlers: dict[int, Any] = {}
        self._old_wakeup_fd: int | None = None
        self._can_save = False
        self.save_signal: int | None = None
        self.is_interrupted = False

    def catch(self, wakeup_fd: int) -> None:
        """Begins to handle signals, whose numbers Python writes to a file; for the main thread."""
        self._old_wakeup_fd = signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, *SAVE_SIGNALS):
            handler = signal.getsignal(number)
            if handler in (signal.SIG_IGN, None):
                continue  # nohup, or a program that embeds Python, handles it
            self._handlers[number] = handler
            signal.signal(number, self._handle)

    def restore(self) -> None:
        """Handles them as before."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._old_wakeup_fd is not None:
            signal.set_wakeup_fd(self._old_wakeup_fd)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """In the body, this rank can save: it looks at `save_signal` again and again."""
        self._can_save = True
        self._say_whether(True)
        try:
            yield
        finally:
            self._can_save = False
            self._say_whether(False)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in SAVE_SIGNALS and (self._can_save or self.save_signal):
            self.save_signal = self.save_signal or number
            return  # the server limits how long this takes
        if number != signal.SIGINT:
            return
        self.is_interrupted = True
        handler = self._handlers[number]
        if callable(handler):
            handler(number, frame)  # Python's own raises KeyboardInterrupt
        else:
            raise KeyboardInterrupt
