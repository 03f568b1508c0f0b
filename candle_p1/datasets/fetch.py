"""Fetching a benchmark's published files: checked by SHA-256, safe to interrupt and to repeat.

A file gets its name only when its checksum is right and its files, if it is an archive, are there.
Few of CANDLE's files have a published SHA-256; these are in ``registry.json``. For the others, the
first download is recorded in ``fetched.json`` beside them, and later ones into that directory must
match.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

from pydantic import BaseModel, Field, NonNegativeInt

from candle_p1.data.directory import MANIFEST_NAME, storing, synthetic_facts
from candle_p1.data.reader import file_sha256
from candle_p1.datasets.synthetic import LOCK_NAME, locked, partial_path
from candle_p1.datasets.unpack import SUFFIXES, ArchiveError, unpack
from candle_p1.errors import DataError, ParameterError
from candle_p1.files import (
    content_sha256,
    files_at,
    read_json,
    read_regular_bytes,
    write_atomically,
)

RECORD_NAME = "fetched.json"
RESERVED = (RECORD_NAME, LOCK_NAME, MANIFEST_NAME)


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


@dataclass(frozen=True)
class FetchedFile:
    """A file that was just downloaded from `source`, or was there, and what was unpacked of it."""

    path: Path
    file_bytes: int
    sha256: str
    source: str | None = None
    unpacked: tuple[Path, ...] = ()


def fetch(
    benchmark: str,
    names: Sequence[str],
    url: str,
    directory: Path,
    *,
    unpack_limit_bytes: int | None = None,
    **options: Any,
) -> list[FetchedFile]:
    """Downloads a benchmark's files that a directory does not have yet, and checks those it has.

    Other processes that fetch into the same directory wait and then find the files. Archives are
    unpacked into it, up to `unpack_limit_bytes` (see `unpack`). `options` are those of
    `download.Download`, without `path` and `max_bytes`.

    Raises:
        ParameterError: The URL or a name cannot be used.
        DataError: A file cannot be downloaded, unpacked or stored, or is not the expected one.
    """
    base_url = _checked_url(url)
    for name in names:
        if Path(name).name != name or name in ("", "..", *RESERVED) or not name.isprintable():
            raise ParameterError(f"{name!r} is not the name of a file that can be fetched")
    directory = directory.absolute()

    def get(name: str, write: bool) -> FetchedFile | None:
        path, expected = directory / name, expected_file(benchmark, name, directory)
        found = _find(path, expected, unpack_limit_bytes, write)
        if found or not write:
            return found
        return _download(path, base_url + quote(name), expected, unpack_limit_bytes, options)

    with storing(directory, "use --out to name a directory that is writable and has enough space"):
        # First without the lock, because locking needs a writable directory.
        found = [get(name, write=False) for name in names]
        if None in found:
            with locked(directory, options.get("notify")):
                found = [get(name, write=True) for name in names]
        return [file for file in found if file]


def _find(
    path: Path, expected: FileFacts | None, unpack_limit_bytes: int | None, write: bool
) -> FetchedFile | None:
    """Returns a file that exists, with its unpacked files; None if it is missing or broken."""
    if not path.exists():
        return None
    unpacked, sha256 = None, file_sha256(path) if path.is_file() else ""
    problems = {
        "this is not a file": not sha256,
        "this file is synthetic, made by candle-p1 data make": synthetic_facts(path),
        f"the SHA-256 is {sha256}, not {expected and expected.sha256}, which was"
        f" {expected and expected.source}": expected and expected.sha256 != sha256,
    }
    for problem, found in problems.items():
        if found:
            remedy = "Move it away, or fetch into another directory with --out"
            raise DataError(f"{problem}. {remedy}", path)
    if path.name.endswith(SUFFIXES):
        try:
            unpacked = unpack(path, RESERVED, unpack_limit_bytes, write=write)
        except ArchiveError:
            if expected:  # another download would bring the same bytes
                raise
        if unpacked is None:
            return None
    return FetchedFile(path, path.stat().st_size, sha256, None, tuple(unpacked or ()))


def _download(
    path: Path,
    url: str,
    expected: FileFacts | None,
    unpack_limit_bytes: int | None,
    options: dict[str, Any],
) -> FetchedFile:
    """Downloads, checks, unpacks, names and records a file; the directory must be locked."""
    from candle_p1.datasets import download

    max_bytes = expected.bytes if expected else None
    downloading = download.Download(path, max_bytes=max_bytes, **options)
    partial, source = downloading.partial, download.without_password(url)
    problem, unpacked = "", None
    try:
        downloading.run(url)
        sha256 = content_sha256(partial)
        if expected and sha256 != expected.sha256:
            problem = f"its SHA-256 is {sha256}, not {expected.sha256}"
        elif path.name.endswith(SUFFIXES):
            unpacked = unpack(path, RESERVED, unpack_limit_bytes, partial)
    except download.CannotDownloadError as error:
        raise DataError(
            f"cannot be downloaded from {source}: {error}. Copy the files into {path.parent}"
            " yourself, or name a mirror or a local directory with --data_url, or make synthetic"
            " files with candle-p1 data make",
            path.name,
        ) from error
    except ArchiveError as error:
        problem = error.problem
    if problem:
        downloading.discard()
        if expected and expected.source == "recorded":
            problem += f"; the known one was recorded in {RECORD_NAME} at the first download"
        raise DataError(
            f"{source} sent an unusable file, which was removed: {problem}. Try again, or use"
            " another mirror with --data_url",
            path,
        )
    partial.replace(path)
    downloading.discard()
    facts = FileFacts(
        sha256=sha256,
        bytes=path.stat().st_size,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        url=source,
        version=downloading.version,
    )
    record_download(path.parent, path.name, facts)
    return FetchedFile(path, facts.bytes, sha256, source, tuple(unpacked or ()))


def _checked_url(url: str) -> str:
    with suppress(ValueError):
        parts = urlsplit(url)
        is_local = parts.scheme == "file" and parts.netloc in ("", "localhost")
        is_remote = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        plain = url.isprintable() and not parts.query and not parts.fragment
        if plain and (is_local or is_remote):
            return url.rstrip("/") + "/"
    shown = re.sub("//.*@", "//", url)  # a password may be what is wrong with it
    raise ParameterError(
        f"data_url {shown!r} is not the URL of a directory: http://…, https://… or file:///…,"
        " without '?' or '#'"
    )


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
