"""Fetching a benchmark's published files: checked by SHA-256, safe to interrupt and to repeat.

pooch compares what was downloaded with the expected checksum, and gives the file its name only if
they match. What it lacks is added here: resuming downloads (candle_p1.datasets.download), a lock
against two fetches at once, and unpacking that refuses unsafe archives (candle_p1.datasets.unpack).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from candle_p1.data.manifest import MANIFEST_NAME, synthetic_facts
from candle_p1.data.reader import file_sha256
from candle_p1.datasets.download import (
    SCHEMES,
    CannotDownloadError,
    ResumingDownloader,
    without_password,
)
from candle_p1.datasets.registry import RECORD_NAME, Expected, expected_file, record_download
from candle_p1.datasets.storing import LOCK_NAME, locked, storing
from candle_p1.datasets.unpack import SUFFIXES, unpack, unpacked_files
from candle_p1.errors import DataError, ParameterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from candle_p1.datasets.storing import Notify, Progress

RESERVED = (RECORD_NAME, LOCK_NAME, MANIFEST_NAME)
"""The names of the directory's own files."""


@dataclass(frozen=True)
class FetchedFile:
    """A file that was fetched or already present.

    Attributes:
        path: Where it is.
        file_bytes: Its size.
        sha256: The SHA-256 of its bytes.
        source: The URL it was just downloaded from; None if it was already present.
        unpacked: If it is an archive, the files that were in it.
    """

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
    progress: Progress | None = None,
    notify: Notify | None = None,
    num_retries: int = 4,
) -> list[FetchedFile]:
    """Downloads the files that a directory does not have yet, and checks those it has.

    Other processes that fetch into the same directory wait and then find the files. Archives are
    unpacked into the directory.

    Args:
        benchmark: The benchmark's name, under which checksums are published.
        names: The files' names; the result has the same order.
        url: The directory they are in: http, https or file.
        directory: Where they go; created if missing.
        progress: Called with the progress of each download.
        notify: Called when another process is waited for, or a download is retried.
        num_retries: How many attempts in a row, after the first, may fail without a new byte.

    Raises:
        ParameterError: The URL or a name cannot be used.
        DataError: A file cannot be downloaded or is not the expected one, an archive is unsafe, or
            the directory cannot be written to.
    """
    base_url = _checked_url(url)
    for name in names:
        if Path(name).name != name or name in ("", "..", *RESERVED):
            raise ParameterError(f"{name!r} is not the name of a file that can be fetched")
    directory = directory.absolute()
    paths = [directory / name for name in names]

    def find_or_download(path: Path) -> FetchedFile:
        expected = expected_file(benchmark, path.name, directory)
        found = _find(path, expected)
        if found:
            return found
        downloader = ResumingDownloader(path, num_retries, progress, notify)
        try:
            return _download(path, base_url, expected, downloader)
        except CannotDownloadError as error:
            missing = ", ".join(each.name for each in paths if not each.exists())
            raise DataError(
                f"cannot be downloaded from {without_password(base_url + quote(path.name))}:"
                f" {error}. If this machine cannot reach the server, copy {missing} into"
                f" {directory} yourself, or name a mirror or a local directory with --data_url"
                " (https://…, file:///…), or make synthetic files of the same shape:"
                f" candle-p1 data make {benchmark} --size full --out DIR",
                path.name,
            ) from error

    with storing(directory, "use --out to name a directory that is writable and has enough space"):
        # First without the lock, because locking needs a writable directory.
        found = [
            _find(path, expected_file(benchmark, path.name, directory), may_unpack=False)
            for path in paths
        ]
        if None not in found:
            return [file for file in found if file]
        with locked(directory, notify):
            return [find_or_download(path) for path in paths]


def _find(path: Path, expected: Expected | None, may_unpack: bool = True) -> FetchedFile | None:
    """Returns a file if it exists, with its unpacked files; else None.

    Raises:
        DataError: The file is synthetic or is not the expected one, or an archive is unsafe.
    """
    if not path.exists():
        return None
    if synthetic_facts(path):
        raise DataError(
            "this file is synthetic, made by candle-p1 data make; fetch into another directory with"
            " --out, or remove the file",
            path,
        )
    sha256 = file_sha256(path)
    if expected and expected.sha256 != sha256:
        raise DataError(
            f"a different file is already there: its SHA-256 is {sha256}, not {expected.sha256}"
            f" ({expected.source}). Move it away to download the right one",
            path,
        )
    file = FetchedFile(path, path.stat().st_size, sha256)
    if not path.name.endswith(SUFFIXES):
        return file
    unpacked = unpacked_files(path, RESERVED)
    if unpacked is None:
        if not may_unpack:
            return None
        unpacked = unpack(path, RESERVED)
    return replace(file, unpacked=tuple(unpacked))


def _download(
    path: Path, base_url: str, expected: Expected | None, downloader: ResumingDownloader
) -> FetchedFile:
    """Downloads a file, unpacks it and records it; the directory must be locked.

    Raises:
        CannotDownloadError: It cannot be downloaded.
        DataError: It is not the expected file, or it is an unsafe archive.
    """
    import pooch  # type: ignore[import-untyped]

    pooch.get_logger().setLevel("WARNING")  # it would log URLs with their passwords
    url = base_url + quote(path.name)
    known = pooch.create(
        path=path.parent,
        base_url=base_url,
        urls={path.name: url},
        registry={path.name: f"sha256:{expected.sha256}" if expected else None},
        allow_updates=False,
    )
    shown_url = without_password(url)
    try:
        known.fetch(path.name, downloader=downloader)
    except ValueError as error:  # the checksum is wrong; pooch has removed the file
        assert expected is not None
        remedy = "Try again, or use another mirror with --data_url"
        if not expected.published:
            remedy = (
                "If the file was changed on purpose, remove its entry from"
                f" {path.parent / RECORD_NAME}"
            )
        raise DataError(
            f"{shown_url} sent a different file, which was removed:"
            f" {str(error).partition('. ')[0]} ({expected.source}). {remedy}",
            path,
        ) from error
    file = _find(path, expected)
    assert file is not None
    facts = {
        "sha256": file.sha256,
        "bytes": file.file_bytes,
        "url": shown_url,
        "etag": downloader.version.etag,
        "last_modified": downloader.version.last_modified,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    record_download(path.parent, path.name, facts)
    return replace(file, source=shown_url)


def _checked_url(url: str) -> str:
    """Returns a directory's URL with a slash at its end.

    Raises:
        ParameterError: It is not the URL of a directory.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        usable = parts.netloc in ("", "localhost")
    else:
        usable = parts.scheme in SCHEMES and bool(parts.netloc)
    problem = None if usable else "must begin with http://, https:// or file:///"
    if parts.query or parts.fragment:
        problem = "must name a directory, without '?' or '#'"
    if problem:
        raise ParameterError(f"data_url {without_password(url)!r} {problem}")
    return url.rstrip("/") + "/"
