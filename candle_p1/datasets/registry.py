"""A data directory: its lock, the checksums that its files must have, and which of them are there.

Few of CANDLE's files have a published SHA-256; these are in ``registry.json``. For the others, the
first download is recorded in ``fetched.json`` beside them, and later ones into that directory must
match.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import filelock

from candle_p1.data.manifest import synthetic_facts
from candle_p1.errors import DataError
from candle_p1.files import files_at, read_json, write_atomically

Notify = Callable[[str], None]
"""Called with a message for the user."""

Progress = Callable[[str, int, int], None]
"""Called with a file's name, its bytes so far, and the bytes expected (0 if not known)."""

LOCK_NAME, RECORD_NAME = ".lock", "fetched.json"


class Expected(NamedTuple):
    """The SHA-256 and the size that a file must have, and where they come from, for messages."""

    sha256: str
    file_bytes: int
    published: bool
    source: str


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


def expected_file(benchmark: str, name: str, directory: Path) -> Expected | None:
    """Returns the properties a file must have; None if no checksum is published or recorded.

    Raises:
        DataError: The directory's record of downloads cannot be read.
    """
    facts = published_sums().get(benchmark, {}).get(name)
    if facts:
        return Expected(facts["sha256"], facts["bytes"], True, "the published checksum")
    facts = _recorded(directory).get(name)
    if facts:
        source = f"the checksum recorded at the first download, {facts['time']}"
        return Expected(facts["sha256"], facts["bytes"], False, source)
    return None


def record_download(directory: Path, name: str, facts: dict[str, Any]) -> None:
    """Records a download; `facts` has at least sha256, bytes and time."""
    files = _recorded(directory) | {name: facts}
    text = json.dumps({"files": files}, indent=2, sort_keys=True)
    write_atomically(directory / RECORD_NAME, text + "\n")


def published_sums() -> dict[str, dict[str, dict[str, Any]]]:
    """Returns sha256 and bytes by benchmark and file name."""
    return dict(read_json(Path(__file__).with_name("registry.json")))


def _recorded(directory: Path) -> dict[str, dict[str, Any]]:
    path = directory / RECORD_NAME
    try:
        files: dict[str, dict[str, Any]] = read_json(path)["files"]
        for facts in files.values():
            types = [type(facts[key]) for key in ("sha256", "bytes", "time")]
            if types != [str, int, str] or not re.fullmatch("[0-9a-f]{64}", facts["sha256"]):
                raise ValueError
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = "cannot be read; move it away, together with the files it describes"
        raise DataError(problem, path) from error
    return files


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
        sha256, source = expected.sha256, "published" if expected.published else "recorded"
        if exists and file_bytes != expected.file_bytes:
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
