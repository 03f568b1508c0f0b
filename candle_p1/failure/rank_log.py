"""The output of a rank in a file, which is made when there is something to write.

Most ranks print nothing, and at the start of a job thousands of them would create thousands of
files at once, in one directory. So output goes to memory first. A thread looks twice a second
whether there is any, and then moves it to the file, to which later output goes at once. A process
that dies of an error in C or C++ still does so (``native/rank_log.cpp``). What a process printed
within the last half second before it was killed by SIGKILL is lost, if it was the first that it
printed.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from candle_p1.failure import _native

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOOK_S = 0.5


class _RankLog:
    """The log of this process; raises OSError if there is no memory for it.

    If its file cannot be opened, output goes to another file descriptor, the screen.
    """

    def __init__(self, path: Path, screen: int) -> None:
        self._path, self._screen = path, screen
        self._has_failed = False
        error = _native.rank_log_begin(os.fsencode(path), screen)
        if error:
            raise OSError(error, os.strerror(error), str(path))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="rank log", daemon=True)
        self._thread.start()

    def write(self) -> bool:
        """Moves the output to the file; returns whether it goes there by now; for any thread."""
        outcome = _native.rank_log_write()
        if outcome < 0 and not self._has_failed:
            self._has_failed = True
            text = f"{self._path}: {os.strerror(-outcome)}: the output of this rank is shown here"
            os.write(self._screen, f"candle-p1: {text}\n".encode())
        return outcome != 0

    def end(self) -> None:
        """Moves the rest; the caller then puts the outputs back."""
        self._ended.set()
        self._thread.join()
        self.write()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            if self.write():
                return


@contextmanager
def output_to_file(path: Path | None) -> Iterator[None]:
    """Redirects standard output and error, also those of C++, to a file, unless path is None.

    The file is made, or appended to, with the first output. If it cannot be opened, the output goes
    where it went before, with a message.
    """
    if path is None:
        yield
        return
    _flush()
    saved = [os.dup(1), os.dup(2)]
    try:
        log = _RankLog(path.absolute(), saved[1])
        try:
            yield
        finally:
            _flush()
            log.end()
            for number, copy in enumerate(saved, start=1):
                os.dup2(copy, number)
            _native.rank_log_end()
    finally:
        for copy in saved:
            os.close(copy)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
