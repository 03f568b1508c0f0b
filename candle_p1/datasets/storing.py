"""Writing into a data directory: one process at a time, and errors that say what to do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import filelock

from candle_p1.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Notify = Callable[[str], None]
"""Called with a message for the user."""

Progress = Callable[[str, int, int], None]
"""Called with a file's name, its bytes so far, and the bytes expected (0 if not known)."""

LOCK_NAME = ".lock"


def partial_path(directory: Path, name: str) -> Path:
    """Returns where the bytes of a file are collected before it gets its name."""
    return directory / f".{name.replace('/', '.')}.partial"


@contextmanager
def storing(directory: Path, remedy: str) -> Iterator[None]:
    """Converts errors of the file system into a DataError.

    `remedy` says what the user can do, as a clause.
    """
    try:
        yield
    except (OSError, NotImplementedError) as error:  # the latter: no locks on this file system
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"the files cannot be stored ({reason}): {remedy}", directory) from error


def locked(directory: Path, notify: Notify | None = None) -> AbstractContextManager[Any]:
    """Returns a context in which no other process writes to a directory, created if missing.

    `notify` is called if another process must be waited for.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(directory / LOCK_NAME)
    try:
        return lock.acquire(timeout=0)
    except filelock.Timeout:
        if notify:
            notify(f"another process is writing to {directory}; waiting for it to finish")
        return lock.acquire()
