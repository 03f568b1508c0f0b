"""A data directory: its lock, the checksums that its files must have, and which of them are there.

Few of CANDLE's files have a published SHA-256; these are in ``registry.json``. For the others, the
first download is recorded in ``fetched.json`` beside them, and later ones into that directory must
match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Any

import filelock
from pydantic import BaseModel, Field, NonNegativeInt

from candle_p1.data.directory import synthetic_facts
from candle_p1.errors import DataError
from candle_p1.files import files_at, read_json, read_regular_bytes, write_atomically

Notify = Callable[[str], None]
"""Called with a message for the user."""

Progress = Callable[[str, int, int], None]
"""Called with a file's name, its bytes so far, and the bytes expected (0 if not known)."""

LOCK_NAME, RECORD_NAME = ".lock", "fetched.json"


class FileFacts(BaseModel, strict=True):
    """What a file must be, as published or recorded; `version` is what its server said of it."""

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    bytes: NonNegativeInt
    time: str
    url: str = ""
    version: str = ""
    source: Annotated[str, Field(exclude=True)] = "recorded"


class Downloads(BaseModel, strict=True):
    """The content of ``fetched.json``."""

    files: dict[str, FileFacts] = {}


def partial_path(directory: Path, name: str) -> Path:
    """Returns where the bytes of a file are collected before it gets its name."""
    return directory / f".{name.replace('/', '.')}.partial"


@contextmanager
def storing(directory: Path, remedy: str) -> Iterator[None]:
    """Converts errors of the file system into a DataError; `remedy` says what the user can do."""
    try:
        yield
    except (OSError, NotImplementedError) as error:  # the latter: no locks on this file system
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"the files cannot be stored ({reason}): {remedy}", directory) from error


def locked(directory: Path, notify: Notify | None = None) -> AbstractContextManager[Any]:
    """Returns a context in which no other process writes to a directory, created if missing."""
    directory.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(directory / LOCK_NAME)
    try:
        return lock.acquire(timeout=0)
    except filelock.Timeout:
        if notify:
            notify(f"another process is writing to {directory}; waiting for it to finish")
        return lock.acquire()


def published_sums() -> dict[str, dict[str, dict[str, Any]]]:
    """Returns sha256 and bytes by benchmark and file name."""
    return dict(read_json(Path(__file__).with_name("registry.json")))


def expected_file(benchmark: str, name: str, directory: Path) -> FileFacts | None:
    """Returns the properties a file must have; None if no checksum is published or recorded.

    Raises:
        DataError: The directory's record of downloads cannot be read.
    """
    if facts := published_sums().get(benchmark, {}).get(name):
        return FileFacts(**facts, time="", source="published")
    return _recorded(directory).files.get(name)


def record_download(directory: Path, name: str, download: FileFacts) -> None:
    """Records a download."""
    record = _recorded(directory)
    record.files[name] = download
    write_atomically(directory / RECORD_NAME, record.model_dump_json(indent=2) + "\n")


def _recorded(directory: Path) -> Downloads:
    path = directory / RECORD_NAME
    try:
        return Downloads.model_validate_json(read_regular_bytes(path))
    except (FileNotFoundError, NotADirectoryError):
        return Downloads()
    except (OSError, ValueError) as error:
        problem = "cannot be read; move it away, together with the files it describes"
        raise DataError(problem, path) from error


def file_status(benchmark: str, name: str, directory: Path) -> dict[str, Any]:
    """Returns what is known, without reading it, about a benchmark's file or directory of files.

    The state is "absent", "real", "synthetic", or "wrong size" if it cannot be the expected file.
    The sha256 is the one that it must have, or was generated with, where one is known.

    Raises:
        DataError: The directory's record of downloads cannot be read.
    """
    path, partial = directory / name, partial_path(directory, name)
    exists = path.is_file() or path.is_dir()
    file_bytes = sum(each.stat().st_size for each in files_at(path)) if exists else None
    expected, made = expected_file(benchmark, name, directory), synthetic_facts(path)
    state, sha256, source = "real" if exists else "absent", None, None
    if made:
        state, sha256, source = "synthetic", made["sha256"], "synthetic"
    elif expected:
        sha256, source = expected.sha256, expected.source
        if exists and file_bytes != expected.bytes:
            state = "wrong size"
    return {
        "name": name,
        "path": str(path),
        "state": state,
        "file_bytes": file_bytes,
        "partial_bytes": partial.stat().st_size if partial.is_file() else 0,
        "sha256": sha256,
        "sha256_source": source,
    }
