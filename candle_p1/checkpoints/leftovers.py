"""What a writer that was killed has left behind: found, completed or removed by the next one.

Everything unfinished has a name with the writer's token, and the writer holds a lock on a file of
that name as long as it lives. The kernel releases the lock of a process however it ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import uuid
from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEMPORARY = re.compile(r"\.(?P<name>.+)\.tmp-(?P<token>[0-9a-f]{12})-\d+")


def temporary_name(name: str, token: str, serial: int) -> str:
    """Returns the name of something until it is complete."""
    return f".{name}.tmp-{token}-{serial}"


class WriterClaim:
    """The sign that a writer is alive.

    Attributes:
        token: Twelve hexadecimal digits that no other writer has.
    """

    def __init__(self) -> None:
        self.token = uuid.uuid4().hex[:12]
        self._file = -1

    def path(self, root: Path) -> Path:
        """Returns the writer's file in a directory."""
        return _lock(root, self.token)

    def acquire(self, root: Path) -> None:
        """Locks the writer's file in a directory, which is made; does nothing the second time.

        Raises:
            OSError: The directory or the file cannot be made.
        """
        if self._file >= 0:
            return
        root.mkdir(parents=True, exist_ok=True)
        self._file = os.open(_lock(root, self.token), os.O_RDWR | os.O_CREAT, 0o666)
        with suppress(OSError):  # a file system without locks: nobody removes what is unfinished
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self, root: Path) -> None:
        """Removes the file."""
        if self._file >= 0:
            with suppress(OSError):
                _lock(root, self.token).unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1


def settle(root: Path, report: Callable[[str], None]) -> None:
    """Removes what dead writers have left unfinished in a directory.

    A checkpoint that was complete when its writer was killed, but not yet linked, is linked, unless
    somebody has changed the link since.

    Args:
        root: The directory; it need not exist.
        report: Receives a sentence on what cannot be removed.
    """
    unfinished: dict[str, list[Path]] = defaultdict(list)
    try:
        entries = sorted(root.iterdir())
    except OSError:  # it does not exist, or its reader is told why it cannot be read
        return
    for entry in entries:
        match = TEMPORARY.fullmatch(entry.name) or LOCK.fullmatch(entry.name)
        if match:
            unfinished[match["token"]].append(entry)
    for token, paths in unfinished.items():
        lock = _lock_of_dead(_lock(root, token))
        if lock is None:
            continue
        try:
            for path in paths:
                match = TEMPORARY.fullmatch(path.name)
                if match:
                    _settle(path, match["name"])
            _lock(root, token).unlink(missing_ok=True)
        except OSError as error:
            report(f"{error.filename} was left by a run that is dead, and {_cannot(error)}")
        finally:
            if lock >= 0:
                os.close(lock)


def remove_tree(path: Path) -> None:
    """Removes a directory in which another rank may be creating a last file.

    Raises:
        OSError: It cannot be removed.
    """
    for attempt in range(3):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            if not path.exists():
                return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or attempt == 2:
                raise


LOCK = re.compile(r"\.writer-(?P<token>[0-9a-f]{12})\.lock")


def _lock(root: Path, token: str) -> Path:
    return root / f".writer-{token}.lock"


def _cannot(error: OSError) -> str:
    return f"cannot be removed: {error.strerror}"


def _lock_of_dead(path: Path) -> int | None:
    """Returns the lock of a writer that is dead; -1 if it has none; None if it may be alive."""
    try:
        file = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return -1
    except OSError:  # somebody else's
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # it is held, or the file system has no locks
        os.close(file)
        return None
    return file


def _settle(path: Path, name: str) -> None:
    """Removes something unfinished, or completes it if it is a link to a complete checkpoint."""
    if not path.is_symlink():
        remove_tree(path)
        return
    link = path.with_name(name)
    is_newer = not link.is_symlink() or link.lstat().st_mtime_ns <= path.lstat().st_mtime_ns
    if path.is_dir() and is_newer:
        path.replace(link)
    else:
        path.unlink()
