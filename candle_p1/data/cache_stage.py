"""Copying a cache to a disk of each node: it is read once per job and sent to all nodes."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING

import filelock
import numpy as np

from candle_p1.data.cache_file import PARTIAL, UnfitCacheError, header_problem
from candle_p1.data.cache_read import agree_that_fit, fill, shares_of_nodes
from candle_p1.data.read_ahead import agree_on_zero
from candle_p1.distributed.comm import Attempt
from candle_p1.errors import DataError
from candle_p1.instrument import reading
from candle_p1.instrument.phases import part

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from candle_p1.data.cache_file import Bytes
    from candle_p1.distributed.comm import Communicator

CHUNK_BYTES = 4 << 20
"""How much a node reads at a time, at least."""
ROUND_BYTES = 16 * CHUNK_BYTES
"""How much all nodes together read, send and write at a time; each has memory for this."""


def stage_cache(
    file: Path, copy: Path, num_bytes: int, source: dict[str, Any], comm: Communicator
) -> None:
    """Makes a copy of a cache on every node that has none; collective.

    Args:
        file: The cache.
        copy: The path of the copies.
        num_bytes: The size of the cache.
        source: What the cache was made from; a copy that was made from something else is replaced.
        comm: The ranks.

    Raises:
        DataError: A copy cannot be written; the same on all ranks.
        UnfitCacheError: The cache cannot be read; the same on all ranks.
    """
    is_missing = comm.local_rank == 0 and header_problem(copy, source) is not None
    if not comm.any(is_missing):
        return
    agree_on_zero(comm)
    target = _Copy(copy) if is_missing else None
    try:
        problem = _send(file, num_bytes, target, comm)
        agree_that_fit(problem, comm)
        Attempt(lambda: target.complete(file, source) if target else None).agree(comm)
    finally:
        if target:
            target.close()


def cannot_write(path: Path, error: Exception) -> DataError:
    """Returns the error for a cache, or a copy of one, that cannot be written."""
    reason = getattr(error, "strerror", None) or error
    return DataError(
        f"the cache cannot be written ({reason}): use --cache_dir to name a directory with enough"
        " space, or choose another --loader",
        path,
    )


def _send(file: Path, num_bytes: int, target: _Copy | None, comm: Communicator) -> str | None:
    """Reads a file, a share on each node, and sends all of it to all nodes, round by round.

    A node that fails goes on, because the others need its part in each round.

    Returns:
        Why this rank could not read its share; None if it could.
    """
    problem, opened, is_first = None, -1, comm.local_rank == 0
    buffer: Bytes = np.empty(min(ROUND_BYTES, num_bytes) if is_first else 0, np.uint8)
    try:
        for first in range(0, num_bytes, ROUND_BYTES):
            size = min(ROUND_BYTES, num_bytes - first)
            starts = range(0, size, CHUNK_BYTES)
            chunks = [(start, min(start + CHUNK_BYTES, size)) for start in starts]
            shares = shares_of_nodes(chunks, comm.num_nodes)
            start, stop = shares[comm.node]
            if is_first and start < stop and problem is None:
                try:
                    if opened < 0:
                        opened = os.open(file, os.O_RDONLY)
                    with part("read"), reading.current().noted(stop - start):
                        fill(opened, buffer[start:stop], first + start)
                except (UnfitCacheError, OSError) as error:
                    problem = str(error)
            with part("communicate"):
                comm.share_between_nodes(buffer[:size], shares)
            if target:
                with part("stage"):
                    target.write(buffer[:size], first)
    finally:
        if opened >= 0:
            os.close(opened)
    return problem


class _Copy:
    """A copy that is being written on this node.

    Another job may be making the same copy on this node. To wait for it here could be to wait for
    ever, if it waits for this job on another node. So this job only waits when nobody waits for it,
    and then uses the other's copy.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._partial = path, path.with_name(f".{path.name}{PARTIAL}")
        self._lock = filelock.FileLock(path.with_suffix(".lock"))
        self._file = -1
        self._error: Exception | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            self._file = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        except filelock.Timeout:
            pass
        except (OSError, NotImplementedError) as error:  # the latter: this file system has no locks
            self._error = error

    def write(self, content: Bytes, position: int) -> None:
        """Writes bytes at a position; does nothing after an error, or if another job writes."""
        if self._file < 0 or self._error is not None:
            return
        view, done = memoryview(content), 0
        try:
            while done < len(view):
                done += os.pwrite(self._file, view[done:], position + done)
        except OSError as error:
            self._error = error

    def complete(self, file: Path, source: dict[str, Any]) -> None:
        """Gives the copy its name, and lets other jobs go on.

        To be called when no other rank waits for this one.

        Raises:
            DataError: The copy cannot be written.
        """
        try:
            if self._error is not None:
                raise self._error
            if self._file >= 0:
                self._partial.replace(self._path)
                return
            with self._lock:  # the other job has its copy now, unless it failed
                if header_problem(self._path, source) is not None:
                    shutil.copyfile(file, self._partial)
                    self._partial.replace(self._path)
        except (OSError, NotImplementedError) as error:
            raise cannot_write(self._path, error) from error
        finally:
            self._lock.release()

    def close(self) -> None:
        """Removes what is not complete, and lets other jobs go on."""
        if self._file >= 0:
            os.close(self._file)
            with suppress(OSError):  # it usually has its name by now
                self._partial.unlink(missing_ok=True)
        self._lock.release()
