"""Locks that tell whether a process on any node is alive, and what dead writers have left behind.

The kernel releases a lock when its process ends. The package filelock does not do: it unlocks a
file for every process that has inherited the lock, and cannot tell whether other nodes see it.

Everything unfinished in a directory of checkpoints has a name with the writer's token, and the
writer holds the lock on a file of that name as long as it lives.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from candle_p1.files import mount_of

POLL_S = 0.2
HELD = (errno.EWOULDBLOCK, errno.EACCES, errno.ENOENT)
WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
"""What file systems answer that have no locks, such as Lustre without the option flock."""
ON_THIS_NODE_ONLY = ("localflock", "local_lock=flock", "local_lock=all", "nolock")
"""Options of Lustre and NFS with which a lock is not seen on other nodes."""


@dataclass
class Lock:
    """A lock on a file, held by this process and by those that inherit the descriptor."""

    path: Path
    descriptor: int | None = None  # that holds the lock; None if the file system has no locks
    last_host: str | None = None  # of the last process to `sign`, if there is one that is known

    @property
    def proves_end(self) -> bool:
        """Whether the last process to sign has certainly ended.

        One that never held the lock, or held one that is not seen from here, may be alive.
        """
        if self.descriptor is None or self.last_host is None:
            return False
        return self.last_host == platform.node() or not _is_local(self.path)

    def sign(self) -> None:
        """Says in the file which host has the lock; whoever keeps a lock does this.

        Raises OSError, and releases the lock, if the file cannot be written.
        """
        if self.descriptor is None or self.last_host == platform.node():
            return
        try:
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, f"{platform.node()}\n".encode(), 0)
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Releases the lock, as far as this process holds it."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def take_lock(path: Path, wait_s: float = 0.0, *, create: bool = True) -> Lock | None:
    """Returns the lock on a file; None if another process holds it, or has removed the file.

    Raises OSError if the file cannot be opened or made: FileNotFoundError if none is to be made.
    """
    deadline = time.monotonic() + wait_s
    while (lock := _try_lock(path, create)) is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return lock


def _try_lock(path: Path, create: bool) -> Lock | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT * create, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(path.stat(), os.fstat(descriptor)):
            raise FileNotFoundError(errno.ENOENT, "it was removed, and made anew")
        last_host = os.pread(descriptor, 1024, 0).decode(errors="replace").strip() or None
    except OSError as error:
        os.close(descriptor)
        if error.errno in HELD:
            return None
        if error.errno in WITHOUT_LOCKS:
            return Lock(path)
        raise
    return Lock(path, descriptor, last_host)


def _is_local(path: Path) -> bool:
    """Whether locks on a file are seen on this node only; False if that is not known."""
    return not mount_of(path)[1].isdisjoint(ON_THIS_NODE_ONLY)


TEMPORARY = re.compile(r"\.(?P<name>.+)\.tmp-(?P<token>[0-9a-f]{12})-\d+")
LOCK = re.compile(r"\.writer-(?P<token>[0-9a-f]{12})\.lock")


def lock_name(token: str) -> str:
    """Returns the name of the file whose lock a writer holds."""
    return f".writer-{token}.lock"


def temporary_name(name: str, token: str, serial: int) -> str:
    """Returns the name of something until it is complete."""
    return f".{name}.tmp-{token}-{serial}"


def clean(root: Path, report: Callable[[str], None]) -> None:
    """Removes what dead writers have left unfinished in a directory.

    A checkpoint that was complete when its writer was killed, but not yet linked, is linked, unless
    somebody has changed the link since. The report receives a sentence on what cannot be removed.
    """
    stale: dict[str, list[Path]] = defaultdict(list)
    try:
        entries = sorted(root.iterdir())
    except OSError:  # it does not exist, or its reader is told why it cannot be read
        return
    for entry in entries:
        match = TEMPORARY.fullmatch(entry.name) or LOCK.fullmatch(entry.name)
        if match:
            stale[match["token"]].append(entry)
    for token, paths in stale.items():
        lock = _lock_of_dead(root / lock_name(token))
        if lock is None:
            continue
        try:
            for path in paths:
                if match := TEMPORARY.fullmatch(path.name):
                    _clean(path, match["name"])
            lock.path.unlink(missing_ok=True)
        except OSError as error:
            report(
                f"{error.filename} was left by a run that is dead, and cannot be removed:"
                f" {error.strerror}"
            )
        finally:
            lock.release()


def remove_tree(path: Path) -> None:
    """Removes a directory in which another rank may be creating a last file, or raises OSError."""
    for attempt in range(3):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            if not path.exists():
                return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or attempt == 2:
                raise


def _lock_of_dead(path: Path) -> Lock | None:
    """Returns the lock of a writer that is dead; None if it may be alive."""
    try:
        lock = take_lock(path, create=False)
    except FileNotFoundError:  # it has ended, but could not remove everything
        return Lock(path)
    except OSError:  # somebody else's
        return None
    if lock is None:
        return None
    with suppress(OSError):  # the file system cannot tell
        if lock.proves_end:
            return lock
    lock.release()
    return None


def _clean(path: Path, name: str) -> None:
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
