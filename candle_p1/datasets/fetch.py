"""Fetching a benchmark's published files: checked by SHA-256, safe to interrupt and to repeat.

A file gets its name only when its checksum is right and, if it is an archive, its files have been
unpacked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from candle_p1.data.manifest import MANIFEST_NAME, synthetic_facts
from candle_p1.data.reader import file_sha256
from candle_p1.datasets.download import SCHEMES, Downloader
from candle_p1.datasets.registry import RECORD_NAME, Expected, expected_file, record_download
from candle_p1.datasets.storing import LOCK_NAME, locked, storing
from candle_p1.datasets.transfer import MIN_KIB_PER_S, CannotDownloadError, without_password
from candle_p1.datasets.unpack import SUFFIXES, ArchiveError, unpack, unpacked_files
from candle_p1.errors import DataError, ParameterError
from candle_p1.files import content_sha256

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
    min_kib_per_s: int = MIN_KIB_PER_S,
    unpack_limit_bytes: int | None = None,
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
        num_retries: How many attempts in a row, after the first, may fail or bring too little.
        min_kib_per_s: A download is given up if it brings less than this over a minute; 0 waits
            as long as something comes.
        unpack_limit_bytes: The size that the files of an archive may have; see `unpack`.

    Raises:
        ParameterError: The URL or a name cannot be used.
        DataError: A file cannot be downloaded or is not the expected one, an archive is unsafe, or
            the directory cannot be written to.
    """
    base_url = _checked_url(url)
    for name in names:
        if Path(name).name != name or name in ("", "..", *RESERVED) or not name.isprintable():
            raise ParameterError(f"{name!r} is not the name of a file that can be fetched")
    directory = directory.absolute()
    paths = [directory / name for name in names]

    def find(path: Path, may_unpack: bool) -> FetchedFile | None:
        expected = expected_file(benchmark, path.name, directory)
        return _find(path, expected, unpack_limit_bytes, may_unpack)

    def find_or_download(path: Path) -> FetchedFile:
        found = find(path, may_unpack=True)
        if found:
            return found
        expected = expected_file(benchmark, path.name, directory)
        downloader = Downloader(
            path,
            num_retries=num_retries,
            min_kib_per_s=min_kib_per_s,
            expected_bytes=expected.file_bytes if expected else None,
            progress=progress,
            notify=notify,
        )
        file_url = base_url + quote(path.name)
        try:
            downloader.download(file_url)
        except CannotDownloadError as error:
            missing = ", ".join(each.name for each in paths if each == path or not each.exists())
            raise DataError(
                f"cannot be downloaded from {without_password(file_url)}:"
                f" {error}. If this machine cannot reach the server, copy {missing} into"
                f" {directory} yourself, or name a mirror or a local directory with --data_url"
                " (https://…, file:///…), or make synthetic files of the same shape:"
                f" candle-p1 data make {benchmark} --size full --out DIR",
                path.name,
            ) from error
        file = _keep(downloader, expected, unpack_limit_bytes)
        if notify and not downloader.is_whole and not expected:
            notify(
                f"{path.name}: the server did not say where the file ends; it may be incomplete, so"
                " its checksum is not recorded"
            )
        return file

    with storing(directory, "use --out to name a directory that is writable and has enough space"):
        # First without the lock, because locking needs a writable directory.
        found = [find(path, may_unpack=False) for path in paths]
        if None not in found:
            return [file for file in found if file]
        with locked(directory, notify):
            return [find_or_download(path) for path in paths]


def _find(
    path: Path, expected: Expected | None, unpack_limit_bytes: int | None, may_unpack: bool
) -> FetchedFile | None:
    """Returns a file if it exists, with its unpacked files; else, or if it is broken, None.

    Raises:
        DataError: The file is synthetic or is not the expected one, or an archive's files are too
            large or would replace others.
    """
    if not path.exists():
        return None
    if not path.is_file():
        raise DataError("this is not a file; move it away", path)
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
    try:
        unpacked = unpacked_files(path, RESERVED, unpack_limit_bytes)
        if unpacked is None:
            if not may_unpack:
                return None
            unpacked = unpack(path, RESERVED, unpack_limit_bytes)
    except ArchiveError:
        if expected:  # another download would bring the same bytes
            raise
        return None
    return replace(file, unpacked=tuple(unpacked))


def _keep(
    downloader: Downloader, expected: Expected | None, unpack_limit_bytes: int | None
) -> FetchedFile:
    """Checks, unpacks, names and records a file that was downloaded; the directory must be locked.

    Raises:
        DataError: It is not the expected file, or it is an archive that cannot be unpacked.
    """
    path, version = downloader.path, downloader.version
    sha256, unpacked = content_sha256(downloader.partial), []
    problem = None
    remedy = "Try again, or use another mirror with --data_url"
    if expected and sha256 != expected.sha256:
        problem = f"its SHA-256 is {sha256}, not {expected.sha256} ({expected.source})"
        if not expected.published:
            remedy = (
                "If the file was changed on purpose, remove its entry from"
                f" {path.parent / RECORD_NAME}"
            )
    elif path.name.endswith(SUFFIXES):
        try:
            unpacked = unpack(path, RESERVED, unpack_limit_bytes, downloader.partial)
        except ArchiveError as error:
            problem = error.problem
    if problem:
        downloader.discard()
        raise DataError(
            f"{version.url} sent an unusable file, which was removed: {problem}. {remedy}", path
        )
    file_bytes = downloader.partial.stat().st_size
    downloader.finish()
    if expected or downloader.is_whole:
        facts = {
            "sha256": sha256,
            "bytes": file_bytes,
            "url": version.url,
            "etag": version.etag,
            "last_modified": version.last_modified,
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        record_download(path.parent, path.name, facts)
    return FetchedFile(path, file_bytes, sha256, version.url, tuple(unpacked))


def _checked_url(url: str) -> str:
    """Returns a directory's URL with a slash at its end.

    Raises:
        ParameterError: It is not the URL of a directory.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port  # raises an error for a port that is not a number
        if "[" in parts.netloc:
            ip_address(host or "")  # urlsplit does not look at it before Python 3.11.4
    except ValueError:
        problem = "is not a valid URL"
    else:
        if parts.scheme == "file":
            usable = parts.netloc in ("", "localhost")
        else:
            usable = parts.scheme in SCHEMES and bool(host) and " " not in parts.netloc
        problem = "" if usable else "must begin with http://, https:// or file:///"
        if parts.query or parts.fragment:
            problem = "must name a directory, without '?' or '#'"
    if not url.isprintable():
        problem = "has characters that no URL has"
    if problem:
        shown = re.sub("//.*@", "//", url)  # a password may be what is wrong with it
        raise ParameterError(f"data_url {shown!r} {problem}")
    return url.rstrip("/") + "/"
