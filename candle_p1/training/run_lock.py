"""The lock of a run's directory, by which another process knows that the run is alive.

Rank 0 holds it from before there is a record, and so does the watchdog server, which inherits it
and may still write the record after rank 0 has died. The kernel releases it when both have ended,
however they end. The file stays, because a file that is removed while another process opens it
would be locked twice.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from candle_p1.records.record import RECORD_NAME

LOCK_NAME = f".{RECORD_NAME}.lock"
POLL_S = 0.2
HELD = (errno.EWOULDBLOCK, errno.EACCES)
WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
"""What file systems answer that have no locks, such as Lustre without the option flock."""
ON_THIS_NODE_ONLY = ("localflock", "local_lock=flock", "local_lock=all", "nolock")
"""Options of Lustre and NFS with which a lock is not seen on other nodes."""


@dataclass
class RunLock:
    """A lock that this process holds, unless the file system has none.

    Attributes:
        directory: What is locked.
        descriptor: The open file that holds the lock; None if the file system has none.
        last_host: The host of the last one to hold it; None if nobody has, or that is not known.
    """

    directory: Path
    descriptor: int | None
    last_host: str | None = None

    @property
    def proves_end(self) -> bool:
        """Whether a run of this directory whose record says "running" has certainly ended.

        A run that never held the lock, or held one that is not seen from here, may be alive.
        """
        if self.descriptor is None or self.last_host is None:
            return False
        return self.last_host == socket.gethostname() or not _is_local(self.directory)

    def release(self) -> None:
        """Releases the lock, as far as this process holds it."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def take_lock(directory: Path, wait_s: float = 0.0) -> RunLock | None:
    """Returns the lock of a run's directory; None if another process holds it.

    Args:
        directory: The directory, which exists.
        wait_s: How long to wait for it, in s.

    Raises:
        OSError: The file cannot be made.
    """
    deadline = time.monotonic() + wait_s
    while (lock := _try_lock(directory)) is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return lock


def _try_lock(directory: Path) -> RunLock | None:
    descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        last_host = os.pread(descriptor, 1024, 0).decode(errors="replace").strip() or None
        host = socket.gethostname()
        if last_host != host:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{host}\n".encode(), 0)
    except OSError as error:
        os.close(descriptor)
        if error.errno in HELD:
            return None
        if error.errno in WITHOUT_LOCKS:
            return RunLock(directory, None)
        raise
    return RunLock(directory, descriptor, last_host)


def _is_local(directory: Path) -> bool:
    """Whether locks in a directory are seen on this node only; False if that is not known."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    options = {
        option
        for fields in (line.split() for line in lines)
        if len(fields) > 5 and fields[2] == number
        for option in [*fields[5].split(","), *fields[-1].split(",")]
    }
    return not options.isdisjoint(ON_THIS_NODE_ONLY)
