"""Fetching a benchmark's published files: checked by SHA-256, safe to interrupt and to repeat.

A file gets its name only when its checksum is right and, if it is an archive, its files have been
unpacked.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from candle_p1.data.manifest import MANIFEST_NAME, synthetic_facts
from candle_p1.data.reader import file_sha256
from candle_p1.datasets.registry import (
    LOCK_NAME,
    RECORD_NAME,
    Expected,
    Notify,
    expected_file,
    locked,
    record_download,
    storing,
)
from candle_p1.datasets.unpack import SUFFIXES, ArchiveError, unpack
from candle_p1.errors import DataError, ParameterError
from candle_p1.files import content_sha256

STAGING_NAME = ".fetching"
"""The directory in which pooch keeps a file until its checksum is right."""
RESERVED = (RECORD_NAME, LOCK_NAME, MANIFEST_NAME, STAGING_NAME)
"""The names of the directory's own files."""


@dataclass(frozen=True)
class FetchedFile:
    """A file that was just downloaded from `source`, or was there already.

    `unpacked` are the files that were in it if it is an archive.
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
    notify: Notify | None = None,
    unpack_limit_bytes: int | None = None,
    **options: Any,
) -> list[FetchedFile]:
    """Downloads the files that a directory does not have yet, and checks those it has.

    Other processes that fetch into the same directory wait and then find the files. Archives are
    unpacked into the directory.

    Args:
        benchmark: The benchmark's name, under which checksums are published.
        names: The files' names; the result has the same order.
        url: The directory they are in: http, https or file.
        directory: Where they go; created if missing.
        notify: Called when another process is waited for, or a download is retried.
        unpack_limit_bytes: The size that the files of an archive may have; see `unpack`.
        options: See `download.ResumingDownloader`.

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
    options["notify"] = notify

    def find(path: Path, may_unpack: bool) -> FetchedFile | None:
        expected = expected_file(benchmark, path.name, directory)
        return _find(path, expected, unpack_limit_bytes, may_unpack)

    def download(path: Path) -> FetchedFile:
        from candle_p1.datasets.download import CannotDownloadError, without_password

        file_url = base_url + quote(path.name)
        expected = expected_file(benchmark, path.name, directory)
        try:
            return _download(path, file_url, expected, unpack_limit_bytes, options)
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

    with storing(directory, "use --out to name a directory that is writable and has enough space"):
        # First without the lock, because locking needs a writable directory.
        found = [find(path, may_unpack=False) for path in paths]
        if None not in found:
            return [file for file in found if file]
        with locked(directory, notify):
            return [find(path, may_unpack=True) or download(path) for path in paths]


def _find(
    path: Path, expected: Expected | None, unpack_limit_bytes: int | None, may_unpack: bool
) -> FetchedFile | None:
    """Returns a file if it exists, with its unpacked files; else, or if it is broken, None."""
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
        unpacked = unpack(path, RESERVED, unpack_limit_bytes, write=may_unpack)
    except ArchiveError:
        if expected:  # another download would bring the same bytes
            raise
        return None
    return None if unpacked is None else replace(file, unpacked=tuple(unpacked))


def _download(
    path: Path,
    url: str,
    expected: Expected | None,
    unpack_limit_bytes: int | None,
    options: dict[str, Any],
) -> FetchedFile:
    """Downloads, checks, unpacks, names and records a file; the directory must be locked."""
    import pooch

    from candle_p1.datasets.download import ResumingDownloader

    pooch.get_logger().setLevel("WARNING")  # it logs URLs with their passwords
    max_bytes = expected.file_bytes if expected else None
    downloader = ResumingDownloader(path, max_bytes=max_bytes, **options)
    partial, staging = downloader.partial, path.parent / STAGING_NAME
    shutil.rmtree(staging, ignore_errors=True)
    remedy = "Try again, or use another mirror with --data_url"
    unpacked: list[Path] | None = None
    problem = None
    try:
        known_hash = f"sha256:{expected.sha256}" if expected else None
        pooch.retrieve(url, known_hash, path.name, staging, downloader=downloader)
        (staging / path.name).replace(partial.path)
        sha256, file_bytes = content_sha256(partial.path), partial.num_bytes
        if path.name.endswith(SUFFIXES):
            unpacked = unpack(path, RESERVED, unpack_limit_bytes, partial.path)
    except ArchiveError as error:
        problem = error.problem
    except ValueError as error:  # pooch's, with both checksums
        assert expected
        problem = f"{str(error).partition('. Deleted')[0]} ({expected.source})"
        if not expected.published:
            record = path.parent / RECORD_NAME
            remedy = f"If the file was changed on purpose, remove its entry from {record}"
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    source = downloader.version.url
    if problem:
        partial.discard()
        raise DataError(
            f"{source} sent an unusable file, which was removed: {problem}. {remedy}", path
        )
    partial.path.replace(path)
    partial.discard()
    facts = downloader.version.model_dump(exclude={"total_bytes"}) | {
        "sha256": sha256,
        "bytes": file_bytes,
    }
    facts["time"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    if expected or downloader.is_whole:
        record_download(path.parent, path.name, facts)
    elif options["notify"]:
        options["notify"](
            f"{path.name}: the server did not say where the file ends; it may be incomplete, so"
            " its checksum is not recorded"
        )
    return FetchedFile(path, file_bytes, sha256, source, tuple(unpacked or ()))


def _checked_url(url: str) -> str:
    """Returns a directory's URL with a slash at its end."""
    usable = False
    with suppress(ValueError):
        parts = urlsplit(url)
        if "[" in parts.netloc:
            ip_address(parts.hostname or "")  # urlsplit does not look at it before Python 3.11.4
        is_local = parts.scheme == "file" and parts.netloc in ("", "localhost")
        is_remote = parts.scheme in ("http", "https") and parts.hostname and " " not in parts.netloc
        usable = parts.port != 0 and url.isprintable() and bool(is_local or is_remote)
        usable = usable and not parts.query and not parts.fragment
    if not usable:
        shown = re.sub("//.*@", "//", url)  # a password may be what is wrong with it
        raise ParameterError(
            f"data_url {shown!r} is not the URL of a directory: http://…, https://… or file:///…,"
            " without '?' or '#'"
        )
    return url.rstrip("/") + "/"
