"""What the ranks do on their threads to write one checkpoint.

Every writing rank writes its part into the checkpoint's temporary directory and then leaves a
marker there: a file whose name says that the part is done, with its size and digest, or that it has
failed. Rank 0 waits for all markers and completes the checkpoint. So no thread uses MPI, whose
libraries allow that only at a price, and a rank that dies leaves a directory without its marker.
"""

from __future__ import annotations

import re
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from candle_p1.checkpoints.part_file import WritingStoppedError, file_entry, write_synced
from candle_p1.distributed.progress import FOR_DISK, waiting
from candle_p1.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from candle_p1.checkpoints.memory import CopyMemory

DONE = re.compile(r"(?P<part>\d+)\.done-(?P<bytes>\d+)-(?P<digest>[0-9a-f]{32})")
FAILED = re.compile(r"(?P<part>\d+)\.failed")
GIVEN_UP = "it was given up"


def part_name(part: int) -> str:
    """Returns the name of a file of arrays."""
    return f"arrays-{part:04d}.safetensors"


def failure_marker(directory: Path, part: int) -> Path:
    """Returns the marker of a part that has failed; its content, if any, says why."""
    return directory / f"{part}.failed"


@dataclass
class PartTask:
    """A part that this rank writes.

    Attributes:
        directory: The checkpoint's temporary directory, made if it is not there.
        part: Its number.
        memory: Its content.
        read_back: Whether to read it back from the disk and compare.
    """

    directory: Path
    part: int
    memory: CopyMemory
    read_back: bool

    def run(self, stop: threading.Event) -> None:
        """Writes the part as its memory is filled, and its marker.

        Raises:
            OSError: It cannot be written; the marker, if there can be one, says so.
            CheckpointError: What was read back is something else; likewise.
            WritingStoppedError: `stop` was set.
        """
        path = self.directory / part_name(self.part)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            entry = write_synced(
                path,
                self.memory.buffer,
                self.memory.num_bytes,
                lambda end: self.memory.await_filled(end, stop),
            )
            if self.read_back and file_entry(path, uncached=True) != entry:
                raise CheckpointError(f"{path} does not contain what was written: check the disk")
            done = f"{self.part}.done-{entry.bytes}-{entry.xxh3_128}"
            (self.directory / done).touch(exist_ok=False)
        except BaseException as error:
            with suppress(OSError):  # rank 0 learns of it at the next save
                unnamed = self.directory / f"{self.part}.failing"
                with suppress(OSError):  # on a full disk the text may be lost
                    unnamed.write_text(why(error), "utf-8")
                unnamed.replace(failure_marker(self.directory, self.part))
            raise


class PartJob:
    """The thread that writes this rank's part; there is none on a rank without a part.

    Args:
        task: The part.
        error: Why there is none although there should be.

    Attributes:
        error: Why the part could not be written; None: it could, or still may.
        stop: To be set if writing is to be given up.
    """

    def __init__(self, task: PartTask | None, error: str | None = None) -> None:
        self.task, self.error = task, error
        self.stop = threading.Event()
        self._bug: Exception | None = None
        self._thread: threading.Thread | None = None

    @property
    def has_work(self) -> bool:
        """Whether there is anything to do on a thread."""
        return self.task is not None

    def start(self) -> None:
        """Begins."""
        if self.has_work:
            # A daemon: a process that ends early must not wait for the disk.
            self._thread = threading.Thread(target=self._run, name="write checkpoint", daemon=True)
            self._thread.start()

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._thread is not None and self._thread.is_alive()

    def give_up(self, limit_s: float) -> None:
        """Has it stop, and waits for that no longer than this."""
        self.stop.set()
        if self._thread is not None:
            self._thread.join(limit_s)

    def join(self) -> None:
        """Waits until it has ended.

        Raises:
            Exception: What it met that is no error of the file system.
        """
        if self._thread is not None:
            with waiting(FOR_DISK):
                self._thread.join()
        bug, self._bug = self._bug, None
        if bug is not None:
            raise bug

    def _run(self) -> None:
        try:
            self.work()
        except (OSError, CheckpointError, WritingStoppedError) as error:
            self.error = why(error)
        except Exception as error:
            self.error, self._bug = why(error), error

    def work(self) -> None:
        """Does what the thread is for."""
        if self.task is not None:
            self.task.run(self.stop)


def remove_markers(directory: Path) -> None:
    """Removes the markers from a checkpoint whose parts are all there.

    Raises:
        OSError: One cannot be removed.
    """
    for path in list(directory.iterdir()):
        if DONE.fullmatch(path.name):
            path.unlink()


def why(error: BaseException) -> str:
    """Returns what went wrong, in words for the user."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, WritingStoppedError):
        return GIVEN_UP
    return traceback.format_exception_only(type(error), error)[-1].strip()
