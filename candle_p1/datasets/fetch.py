"""Fetching a benchmark's published files: checked by SHA-256, safe to interrupt and to repeat.

pooch checks a download against the registry of sums and gives it its name only if it fits. The
bytes are brought by a downloader of our own (candle_p1.datasets.download), because pooch's start
from zero at every attempt. It is given no retries, because it would also repeat what cannot
succeed.

Few of CANDLE's files have a published sum (``registry.json``). Of the others the first download is
recorded in ``fetched.json`` beside them, and later ones into that directory are held to it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import filelock

from candle_p1.data.manifest import MANIFEST_NAME, synthetic_facts
from candle_p1.data.reader import file_sha256
from candle_p1.datasets.download import (
    SCHEMES,
    CannotDownloadError,
    Download,
    Patience,
    without_password,
)
from candle_p1.datasets.unpack import is_archive, unpack, unpacked_files
from candle_p1.errors import DataError, ParameterError
from candle_p1.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from candle_p1.datasets.synthetic import Progress

Notify = Callable[[str], None]

ACCOUNT_NAME = "fetched.json"
LOCK_NAME = ".lock"
RESERVED = (ACCOUNT_NAME, LOCK_NAME, MANIFEST_NAME)
"""Names that files of these directories have already."""


@dataclass(frozen=True)
class Expected:
    """What a file has to be.

    Attributes:
        sha256: Of its bytes.
        file_bytes: Its size.
        published: Whether that is public knowledge; else it was recorded at the first download.
        source: Where the sum is from, for messages.
    """

    sha256: str
    file_bytes: int
    published: bool
    source: str


@dataclass(frozen=True)
class FetchedFile:
    """A file that is there now.

    Attributes:
        path: Where it is.
        file_bytes: Its size.
        sha256: Of its bytes.
        source: The URL it was downloaded from just now; None if it was there already.
        unpacked: If it is an archive, the files that were in it.
    """

    path: Path
    file_bytes: int
    sha256: str
    source: str | None
    unpacked: tuple[Path, ...] = ()


def fetch(
    benchmark: str,
    names: Sequence[str],
    url: str,
    directory: Path,
    *,
    progress: Progress | None = None,
    notify: Notify | None = None,
    patience: Patience | None = None,
) -> list[FetchedFile]:
    """Downloads the files that are not in a directory yet; checks those that are.

    One process downloads for all: others that fetch into the directory meanwhile wait for it, and
    find the files there. An archive is unpacked beside itself.

    Args:
        benchmark: The benchmark's name, by which sums are known.
        names: The files' names.
        url: The directory they are in: http, https or file.
        directory: Where they go; made if it is not there.
        progress: Called with (name, bytes so far, bytes expected); 0 expected is not known.
        notify: Called with a sentence when something is waited for or tried again.
        patience: How long to try.

    Returns:
        The files, in the order of `names`.

    Raises:
        ParameterError: The URL or a name is unfit.
        DataError: A file cannot be had or is not the one expected, an archive is unsafe, or the
            directory cannot be written to.
    """
    base_url = _checked_url(url)
    for name in names:
        if Path(name).name != name or name in ("", "..", *RESERVED):
            raise ParameterError(f"{name!r} is not the name of a file that can be fetched")
    holder = _Directory(benchmark, directory.absolute())
    try:
        found = holder.find_all(names)  # first without the lock, which needs a writable directory
        if found is None:
            holder.path.mkdir(parents=True, exist_ok=True)
            with _locked(holder.path, notify):
                found = []
                for name in names:
                    download = Download(name, holder.path, patience or Patience(), progress, notify)
                    there = holder.find(name)
                    found.append(there or holder.download(name, names, base_url, download))
    except (OSError, NotImplementedError) as error:  # the latter: no locks on this file system
        raise DataError(
            f"the files cannot be stored ({getattr(error, 'strerror', None) or error}): use a"
            " directory with room that can be written to, with --out",
            holder.path,
        ) from error
    return found


def expected_file(benchmark: str, name: str, directory: Path) -> Expected | None:
    """Returns what a file of a directory has to be; None if neither published nor recorded.

    Raises:
        DataError: The directory's account cannot be read.
    """
    public = _registry().get(benchmark, {}).get(name)
    if public:
        return Expected(public["sha256"], public["bytes"], True, "the published sum")
    recorded = _read_account(directory).get(name)
    if recorded:
        source = f"the sum recorded at the first download, {recorded['time']}"
        return Expected(recorded["sha256"], recorded["bytes"], False, source)
    return None


class _Directory:
    """A directory that files of a benchmark are fetched into."""

    def __init__(self, benchmark: str, path: Path) -> None:
        self.benchmark, self.path = benchmark, path

    def find_all(self, names: Sequence[str]) -> list[FetchedFile] | None:
        """Returns the files if all are there, archives unpacked; else None."""
        if any(not (self.path / name).exists() for name in names):
            return None
        files = [self._there(name) for name in names]
        for i, file in enumerate(files):
            if is_archive(file.path.name):
                unpacked = unpacked_files(file.path, RESERVED)
                if unpacked is None:
                    return None
                files[i] = replace(file, unpacked=tuple(unpacked))
        return files

    def find(self, name: str) -> FetchedFile | None:
        """Returns a file that is there, unpacking it where that is left to do; else None."""
        return self._unpacked(self._there(name)) if (self.path / name).exists() else None

    def _there(self, name: str) -> FetchedFile:
        """Returns a file that is there.

        Raises:
            DataError: It is synthetic, or another one than expected.
        """
        path = self.path / name
        if synthetic_facts(path):
            raise DataError(
                "this file is synthetic, made by candle-p1 data make: fetch into another directory"
                " with --out, or remove it",
                path,
            )
        sha256, expected = file_sha256(path), self._expected(name)
        if expected and expected.sha256 != sha256:
            raise DataError(
                f"another file is there: its SHA-256 is {sha256}, not {expected.sha256}"
                f" ({expected.source}). Move it away to download that one",
                path,
            )
        return FetchedFile(path, path.stat().st_size, sha256, None)

    def download(
        self, name: str, names: Sequence[str], base_url: str, download: Download
    ) -> FetchedFile:
        """Downloads a file, records it and unpacks it; the lock must be held."""
        url = base_url + quote(name)
        expected = self._expected(name)
        try:
            self._retrieve(name, url, expected, download)
        except CannotDownloadError as error:
            raise self._failure(name, names, url, error) from error
        path = self.path / name
        file = self._unpacked(
            FetchedFile(path, path.stat().st_size, file_sha256(path), without_password(url))
        )
        account = _read_account(self.path)
        account[name] = {
            "sha256": file.sha256,
            "bytes": file.file_bytes,
            "url": file.source,
            "etag": download.version.etag,
            "last_modified": download.version.last_modified,
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        write_atomically(
            self.path / ACCOUNT_NAME,
            json.dumps({"files": account}, indent=2, sort_keys=True) + "\n",
        )
        return file

    def _retrieve(self, name: str, url: str, expected: Expected | None, download: Download) -> None:
        import pooch  # type: ignore[import-untyped]

        keeper = pooch.create(
            path=self.path,
            base_url=url,
            urls={name: url},
            registry={name: f"sha256:{expected.sha256}" if expected else None},
            retry_if_failed=0,
        )
        try:
            with _quiet(pooch.get_logger()):
                keeper.fetch(name, downloader=download)
        except ValueError as error:  # pooch has removed it
            assert expected is not None
            remedy = "Try again, or another mirror with --data_url"
            if not expected.published:
                remedy = f"If that is on purpose, take the file out of {self.path / ACCOUNT_NAME}"
            raise DataError(
                f"what {without_password(url)} sent is another file, and was removed:"
                f" {str(error).partition('. ')[0]} ({expected.source}). {remedy}",
                self.path / name,
            ) from error

    def _failure(
        self, name: str, names: Sequence[str], url: str, error: CannotDownloadError
    ) -> DataError:
        missing = ", ".join(each for each in names if not (self.path / each).exists())
        return DataError(
            f"it cannot be downloaded from {without_password(url)}: {error}. Without a way to the"
            f" server, put {missing} into {self.path} by hand; or name a mirror or a folder with"
            " --data_url (https://…, file:///…); or make synthetic files of the published shape:"
            f" candle-p1 data make {self.benchmark} --size full --out DIR",
            name,
        )

    def _unpacked(self, file: FetchedFile) -> FetchedFile:
        if not is_archive(file.path.name):
            return file
        files = unpacked_files(file.path, RESERVED)
        files = unpack(file.path, RESERVED) if files is None else files
        return replace(file, unpacked=tuple(files))

    def _expected(self, name: str) -> Expected | None:
        return expected_file(self.benchmark, name, self.path)


def _checked_url(url: str) -> str:
    """Returns the URL with a slash at its end.

    Raises:
        ParameterError: It is not one of a directory.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        usable = parts.netloc in ("", "localhost")
    else:
        usable = parts.scheme in SCHEMES and bool(parts.netloc)
    if not usable:
        raise ParameterError(
            f"data_url {without_password(url)!r}: it has to begin with http://, https:// or file:///"
        )
    if parts.query or parts.fragment:
        raise ParameterError(
            f"data_url {without_password(url)!r}: it has to be a directory, without '?' or '#'"
        )
    return url.rstrip("/") + "/"


def _registry() -> dict[str, dict[str, dict[str, Any]]]:
    """Returns the published sums, by benchmark and file name."""
    content: dict[str, dict[str, dict[str, Any]]] = json.loads(
        Path(__file__).with_name("registry.json").read_text(encoding="utf-8")
    )
    return content


def _read_account(directory: Path) -> dict[str, dict[str, Any]]:
    """Returns what was downloaded into a directory, by file name."""
    path = directory / ACCOUNT_NAME
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        whole = all({"sha256", "bytes", "time"} <= set(facts) for facts in files.values())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise DataError("it cannot be read: move it away, with the files it keeps account of", path)
    return dict(files)


@contextmanager
def _locked(directory: Path, notify: Notify | None) -> Iterator[None]:
    """Holds the directory's lock, the one that `candle_p1.datasets.synthetic.make` takes."""
    lock = filelock.FileLock(directory / LOCK_NAME)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        if notify:
            notify(f"another process is writing to {directory}: waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Keeps pooch from logging URLs, passwords included, and sums."""
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
