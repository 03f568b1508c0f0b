"""Locks that tell whether a process on any node is alive: the kernel releases them when it ends.

The package filelock does not do: it unlocks a file for every process that has inherited the lock,
and cannot tell whether other nodes see it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.2
HELD = (errno.EWOULDBLOCK, errno.EACCES)
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

        Raises:
            OSError: The file cannot be written; the lock is released.
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

    Raises:
        FileNotFoundError: There is no file, and none is made.
        OSError: The file cannot be opened or made.
    """
    deadline = time.monotonic() + wait_s
    while (lock := _try_lock(path, create)) is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return lock


def _try_lock(path: Path, create: bool) -> Lock | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT * create, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(path, descriptor):
            os.close(descriptor)
            return None
        last_host = os.pread(descriptor, 1024, 0).decode(errors="replace").strip() or None
    except OSError as error:
        os.close(descriptor)
        if error.errno in HELD:
            return None
        if error.errno in WITHOUT_LOCKS:
            return Lock(path)
        raise
    return Lock(path, descriptor, last_host)


def _is_at(path: Path, descriptor: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False


def _is_local(path: Path) -> bool:
    """Whether locks on a file are seen on this node only; False if that is not known."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    options = {
        option
        for fields in (line.split() for line in lines)
        if len(fields) > 5 and fields[2] == number
        for option in [*fields[5].split(","), *fields[-1].split(",")]
    }
    return not options.isdisjoint(ON_THIS_NODE_ONLY)
