"""What happens beside training: every rank's thread writes its shard, and rank 0's commits.

Every writing rank writes its shard into the checkpoint's temporary directory and then leaves a
marker there: an empty file whose name says that the shard is done, with its size and digest, or why
it has failed. Rank 0 waits for all markers and commits the checkpoint. So no thread uses MPI, whose
libraries allow that only at a price, and a rank that dies leaves a directory without its marker.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from candle_p1.checkpoints.checkpoint import BEST, LATEST
from candle_p1.checkpoints.lock import remove_tree, temporary_name
from candle_p1.checkpoints.manifest import (
    MANIFEST,
    RANK_PREFIX,
    RANKS_FILE,
    CheckpointManifest,
    EarlierEntry,
    FileEntry,
    name_of,
)
from candle_p1.checkpoints.shards import (
    ArraySpec,
    CopyMemory,
    Rows,
    ShardLayout,
    ShardPlan,
    WritingStoppedError,
    file_entry,
    sync_directory,
    write_synced,
)
from candle_p1.errors import CheckpointError
from candle_p1.failure.progress import FOR_DISK, waiting
from candle_p1.records.types import Position

MARKER = re.compile(
    r"(?P<shard>\d+)\.(done-(?P<bytes>\d+)-(?P<digest>[0-9a-f]{32})|failed-(?P<cause>\w+))"
)
STOPPED, CHECKSUM = "stopped", "checksum"
"""Causes of failure beside the numbers of errors of the operating system."""


def shard_name(shard: int) -> str:
    """Returns the name of a shard's file."""
    return f"arrays-{shard:04d}.safetensors"


def write_shard(
    directory: Path, shard: int, memory: CopyMemory | None, read_back: bool, stop: threading.Event
) -> None:
    """Writes a shard and its marker into the checkpoint's temporary directory.

    `memory` is None if there was none for the copy. With `read_back`, the file is read from the
    disk and compared. `stop` is set to give up writing.

    Raises:
        OSError, MemoryError: It cannot be written; the marker, if there can be one, says so.
        CheckpointError: What was read back is something else; likewise.
        WritingStoppedError: `stop` was set; likewise.
    """
    path = directory / shard_name(shard)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if memory is None:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), "a copy of the state")
        entry = write_synced(path, memory, stop)
        if read_back and file_entry(path, uncached=True) != entry:
            raise CheckpointError(_explain(path, CHECKSUM))
        leave_marker(directory, f"{shard}.done-{entry.bytes}-{entry.xxh3_128}")
    except BaseException as error:
        cause = type(error).__name__
        if isinstance(error, OSError) and error.errno:
            cause = str(error.errno)
        elif isinstance(error, (WritingStoppedError, CheckpointError)):
            cause = STOPPED if isinstance(error, WritingStoppedError) else CHECKSUM
        # Rank 0 may have discarded the checkpoint; otherwise, it learns of it at the next save.
        with suppress(OSError):
            leave_marker(directory, f"{shard}.failed-{cause}")
        raise


def leave_marker(directory: Path, name: str) -> None:
    """Creates an empty file, which a full disk allows in most cases; or raises OSError."""
    (directory / name).touch(exist_ok=False)


def _explain(path: Path, cause: str) -> str:
    """Returns in words what a marker says."""
    if cause == CHECKSUM:
        return f"{path} does not contain what was written: check the disk"
    return f"{path}: {os.strerror(int(cause)) if cause.isdecimal() else cause}"


class CommitThread:
    """A thread whose work writes a checkpoint's files on a rank, unless an event asks it to stop.

    `error` says why that has failed.
    """

    def __init__(self, work: Callable[[threading.Event], None]) -> None:
        self.error: str | None = None
        self._work, self._stop = work, threading.Event()
        self._bug: Exception | None = None
        # A daemon: a process that ends early must not wait for the disk.
        self._thread = threading.Thread(target=self._run, name="write checkpoint", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._thread.is_alive()

    def stop(self, limit_s: float) -> None:
        """Has it give up, and waits for that no longer than this."""
        self._stop.set()
        self._thread.join(limit_s)

    def join(self) -> None:
        """Waits until it has ended; raises what is no error of files, nor lack of memory."""
        with waiting(FOR_DISK):
            self._thread.join()
        bug, self._bug = self._bug, None
        if bug is not None:
            raise bug

    def _run(self) -> None:
        try:
            self._work(self._stop)
        except (OSError, MemoryError, CheckpointError, WritingStoppedError) as error:
            self.error = why(error)
        except Exception as error:
            self.error, self._bug = why(error), error


@dataclass
class PendingCheckpoint:
    """A checkpoint that is being written; on rank 0."""

    root: Path  # the directory of the checkpoints
    token: str  # that of the writer
    serial: int  # its number among those of the writer
    position: Position
    created: str
    best: bool  # so far
    facts: dict[str, Any]  # what the state consists of beside arrays; JSON
    plan: ShardPlan
    rank_states: Sequence[Mapping[str, NDArray[Any]]]  # every rank's own arrays, by name
    failed: dict[int, str] = field(default_factory=dict)  # shards, beside those with a marker

    @property
    def directory(self) -> Path:
        """Its temporary directory."""
        return self._temporary(name_of(self.position))

    def await_shards(self, stop: threading.Event) -> dict[str, FileEntry]:
        """Returns the shards' sizes and digests, by the names of their files, once all are there.

        Raises:
            CheckpointError: A shard has failed, and all others have ended.
            WritingStoppedError: A rank has given up its shard, or `stop` was set.
            OSError: The directory cannot be read.
        """
        pause_s = 0.001
        while True:
            names = [path.name for path in self.directory.iterdir()]
            markers = {int(m["shard"]): m for name in names if (m := MARKER.fullmatch(name))}
            if len(markers.keys() | self.failed) == len(self.plan.ranks):
                break
            if stop.wait(pause_s):
                raise WritingStoppedError
            pause_s = min(1.2 * pause_s, 0.1)
        causes = {shard: m["cause"] for shard, m in sorted(markers.items()) if m["cause"]}
        if STOPPED in causes.values():
            raise WritingStoppedError
        for shard, cause in causes.items():
            raise CheckpointError(_explain(self.directory / shard_name(shard), cause))
        for problem in self.failed.values():
            raise CheckpointError(problem)
        return {
            shard_name(shard): FileEntry(bytes=int(m["bytes"]), xxh3_128=m["digest"])
            for shard, m in sorted(markers.items())
        }

    def commit(
        self, shards: Mapping[str, FileEntry], number: int, earlier: list[EarlierEntry]
    ) -> tuple[str, int]:
        """Completes the checkpoint and names it: when this returns, it is safe, and linked.

        `number` is its own within the run, and `earlier` are the run's other checkpoints, the
        newest first. Returns the name of its directory, and the size of its files.

        Raises:
            OSError: It cannot be completed.
            CheckpointError: A file has been removed meanwhile.
        """
        directory = self.directory
        files = {**shards, RANKS_FILE: self._write_rank_states()}
        manifest = CheckpointManifest(
            created=self.created,
            position=self.position,
            number=number,
            best=self.best,
            num_ranks=len(self.rank_states),
            earlier=earlier,
            facts=self.facts,
            files=files,
        )
        with (directory / MANIFEST).open("xb") as file:
            file.write(manifest.to_bytes())
            file.flush()
            os.fsync(file.fileno())
        for path in list(directory.iterdir()):
            if MARKER.fullmatch(path.name):
                path.unlink()
        for name, entry in files.items():
            if _size(directory / name) != entry.bytes:
                raise CheckpointError(f"{directory / name} was changed while it was written")
        sync_directory(directory)
        name = self._rename()
        sync_directory(self.root)
        for link in self._links:
            self._temporary(link).replace(self.root / link)
        sync_directory(self.root)
        return name, sum(entry.bytes for entry in files.values())

    def discard(self) -> None:
        """Removes what there is of it, or raises OSError."""
        if self.directory.exists():
            remove_tree(self.directory)
        for link in map(self._temporary, self._links):
            if not link.is_dir():  # one that names a complete checkpoint is for the next start
                link.unlink(missing_ok=True)

    @property
    def _links(self) -> list[str]:
        return [BEST, LATEST] if self.best else [LATEST]

    def _temporary(self, name: str) -> Path:
        return self.root / temporary_name(name, self.token, self.serial)

    def _rename(self) -> str:
        """Gives the directory the first free name of its position; the links are made before.

        So if the writer is killed after this, the next start knows where they should lead.
        """
        for number in count(1):
            name = name_of(self.position) + (f"-{number}" if number > 1 else "")
            if os.path.lexists(self.root / name):
                continue
            for link in map(self._temporary, self._links):
                link.unlink(missing_ok=True)
                link.symlink_to(name)
            try:
                self.directory.rename(self.root / name)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another run was faster
                    raise
            else:
                return name
        raise AssertionError("numbers do not end")

    def _write_rank_states(self) -> FileEntry:
        arrays = {
            f"{RANK_PREFIX}{rank:05d}/{name}": array
            for rank, state in enumerate(self.rank_states)
            for name, array in state.items()
        }
        specs = {name: ArraySpec.of(name, array) for name, array in arrays.items()}
        layout = ShardLayout(specs, [Rows(name, 0, spec.num_rows) for name, spec in specs.items()])
        memory = CopyMemory(layout.num_bytes)
        for rows, values in layout.fill(memory.bytes):
            np.copyto(values, arrays[rows.array])
        return write_synced(self.directory / RANKS_FILE, memory)


def _size(path: Path) -> int:
    """Returns the size of a file that another node may have written.

    Opening it has NFS ask the server; `stat` alone may tell the size at an earlier moment.
    """
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_size


def why(error: BaseException) -> str:
    """Returns what went wrong, in words for the user."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, WritingStoppedError):
        return "it was given up"
    return traceback.format_exception_only(type(error), error)[-1].strip()
