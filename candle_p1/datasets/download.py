"""A downloader for pooch that resumes, retries, and gives up on servers that do harm.

The bytes are collected in ``.NAME.partial``; ``.NAME.partial.json`` beside it says of which version
of which URL they are the beginning. A later attempt, even by another process, asks for the rest
with ``Range``, and with ``If-Range`` (RFC 9110, section 13.1.5), so that a server on which the file
has changed sends the new one from its beginning. If the server sends nothing that identifies a
version, every attempt starts from zero.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, BinaryIO
from urllib.parse import urljoin, urlsplit
from urllib.request import url2pathname

import requests
import urllib3
from pydantic import AfterValidator, BaseModel, NonNegativeInt

from candle_p1 import __version__
from candle_p1.datasets.registry import Notify, Progress, partial_path
from candle_p1.files import read_regular_bytes, write_atomically

BLOCK_BYTES = 1 << 14
"""What is read at a time: little, so that a slow transfer is not taken for a stalled one."""
TIMEOUTS_S = (10, 60)
"""How long to wait for a connection, and how long an open one may stay silent."""
SLOW_S = 60.0
"""Over how long a transfer may be slower than the limit."""
FIRST_WAIT_S, MAX_WAIT_S = 1.0, 60.0
"""The pause before the first retry, which doubles with each, and the longest one."""

Header = Annotated[
    str | None, AfterValidator(lambda text: text if (text or "").isprintable() else None)
]


class CannotDownloadError(Exception):
    """The file cannot be downloaded from this URL; the message says why, as a clause."""


class TransientError(Exception):
    """An attempt failed, and one after `retry_after_s` may succeed; the message is a clause.

    `restart` says that what has been downloaded so far is of no use.
    """

    def __init__(self, reason: str, retry_after_s: float = 0.0, restart: bool = False) -> None:
        super().__init__(reason)
        self.retry_after_s, self.restart = retry_after_s, restart


class Version(BaseModel, frozen=True, strict=True, extra="forbid"):
    """A URL, without a password, and what its server says about the file there."""

    url: str
    etag: Header = None
    last_modified: Header = None
    total_bytes: NonNegativeInt | None = None

    @property
    def validator(self) -> str | None:
        """What If-Range may hold: a strong ETag, or else the date; None without either."""
        is_weak = (self.etag or "").startswith("W/")
        return None if is_weak else self.etag or self.last_modified


class Partial:
    """What has been downloaded of a file that will have the final `path`, which must be locked."""

    def __init__(self, path: Path) -> None:
        self.path = partial_path(path.parent, path.name)
        self._state = self.path.with_name(f"{self.path.name}.json")

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self.path.stat().st_size if self.path.exists() else 0

    def resume_point(self, url: str) -> tuple[int, Version | None]:
        """Returns the first byte to ask for, at most the file's last one, and the version so far.

        They are (0, None) where the bytes are not from this URL, or cannot be resumed.
        """
        try:
            version = Version.model_validate_json(read_regular_bytes(self._state))
        except (OSError, ValueError):
            return 0, None
        start = min(self.num_bytes, (version.total_bytes or 0) - 1)
        fits = version.url == without_password(url) and version.validator and start > 0
        return (start, version) if fits else (0, None)

    def open_at(self, start: int, version: Version) -> BinaryIO:
        """Returns the file open for what follows the first `start` bytes of a version."""
        if (version.total_bytes or 0) - start > shutil.disk_usage(self.path.parent).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if not start:
            self.path.unlink(missing_ok=True)  # a pipe would be waited for
        file = self.path.open("r+b" if start else "wb")
        file.seek(start)
        file.truncate()
        write_atomically(self._state, version.model_dump_json())
        return file

    def discard(self) -> None:
        """Removes it."""
        self.path.unlink(missing_ok=True)
        self._state.unlink(missing_ok=True)


@dataclass
class ResumingDownloader:
    """Downloads one file over HTTP, or copies a local one; follows pooch's downloader protocol.

    Attributes:
        path: The file's final path.
        num_retries: The maximum number of consecutive retries.
        min_kib_per_s: An attempt is given up if it brings less than this over SLOW_S.
        max_bytes: The file's size, if known; a longer one is not downloaded to its end.
        progress: Called with the progress of the download.
        notify: Called when an attempt has failed and another one follows.
        version: The version of the file that was downloaded.
        is_whole: Whether the server said where that file ends.
    """

    path: Path
    num_retries: int = 4
    min_kib_per_s: int = 1
    max_bytes: int | None = None
    progress: Progress | None = None
    notify: Notify | None = None
    version: Version = field(init=False)
    is_whole: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        """Finds what has been downloaded already."""
        self.partial, self._num_received = Partial(self.path), 0

    def __call__(self, url: str, output_file: str, *_: Any) -> None:
        """Downloads a URL to `output_file`; a failure keeps only what can be resumed.

        Raises:
            CannotDownloadError: It cannot be downloaded.
            OSError: It cannot be written.
        """
        try:
            if urlsplit(url).scheme == "file":
                self._copy(Path(url2pathname(urlsplit(url).path)), url)
            else:
                self._download(url)
            if not self.partial.num_bytes:
                raise CannotDownloadError("the file there is empty")
        except (CannotDownloadError, OSError):
            if not self.partial.resume_point(url)[0]:
                self.partial.discard()
            raise
        with self.partial.path.open("rb") as file:
            os.fsync(file.fileno())
        self.partial.path.replace(output_file)

    def _copy(self, path: Path, url: str) -> None:
        is_readable = False
        with suppress(OSError, ValueError):  # the path may be too long, or have a null byte
            is_readable = path.is_file() and os.access(path, os.R_OK)
        if not is_readable:
            raise CannotDownloadError("there is no such file, or it cannot be read")
        with path.open("rb") as source:
            version = Version(url=url, total_bytes=os.fstat(source.fileno()).st_size)
            self._write(iter(lambda: source.read(1 << 20), b""), 0, version)

    def _download(self, url: str) -> None:
        num_failures, most_bytes = 0, self.partial.num_bytes
        min_bytes_per_s = self.min_kib_per_s * 1024
        while True:
            began_s = time.monotonic()
            try:
                attempt = partial(self._attempt, url)
                return _watch(attempt, lambda: self._num_received, min_bytes_per_s)
            except TransientError as error:
                if error.restart:
                    self.partial.discard()
                num_bytes = self.partial.num_bytes
                # A server that closes the connection after each byte brings too little, too.
                enough_bytes = min_bytes_per_s * max(time.monotonic() - began_s, 1.0)
                num_failures = 1 if num_bytes - most_bytes > enough_bytes else num_failures + 1
                most_bytes = max(most_bytes, num_bytes)
                if num_failures > self.num_retries:
                    raise CannotDownloadError(str(error)) from error
                wait_s = max(error.retry_after_s, FIRST_WAIT_S * 2 ** (num_failures - 1))
                wait_s = min(wait_s, MAX_WAIT_S)
                if self.notify:
                    self.notify(
                        f"{self.path.name}: {error}; {num_bytes / 2**20:.1f} MiB downloaded so"
                        f" far, trying again in {wait_s:g} s"
                    )
                time.sleep(wait_s)

    def _attempt(self, url: str, abandoned: threading.Event) -> None:
        asked, known = self.partial.resume_point(url)
        with _get(url, asked, known) as response:
            if abandoned.is_set():
                return
            start, version = _check(response, url, asked, known)
            is_chunked = response.headers.get("Transfer-Encoding", "").lower() == "chunked"
            self.is_whole = is_chunked or version.total_bytes is not None
            blocks = iter(lambda: response.raw.read(BLOCK_BYTES, decode_content=False), b"")
            blocks = takewhile(lambda _: not abandoned.is_set(), blocks)
            num_bytes = self._write(blocks, start, version)
        if version.total_bytes not in (None, num_bytes):
            raise TransientError(
                f"the connection ended at byte {num_bytes} of {version.total_bytes}"
            )

    def _write(self, blocks: Iterable[bytes], start: int, version: Version) -> int:
        self.version, num_bytes = version, start
        with self.partial.open_at(start, version) as file:
            for block in blocks:
                file.write(block)
                file.flush()
                num_bytes += len(block)
                self._num_received += len(block)
                if self.max_bytes is not None and num_bytes > self.max_bytes:
                    self.partial.discard()
                    raise CannotDownloadError(f"it is larger than {self.max_bytes} bytes")
                if self.progress:
                    self.progress(self.path.name, num_bytes, version.total_bytes or 0)
        return num_bytes


def _watch(
    attempt: Callable[[threading.Event], None], num_bytes: Callable[[], int], min_bytes_per_s: float
) -> None:
    """Calls `attempt` in a thread, which is left behind if `num_bytes` grows too slowly.

    A socket's timeout limits only the silence between two bytes, and a server may send the lines of
    its answer, or the content, byte by byte for days. What a thread may still write after it was
    told that it is abandoned is what the next attempt writes there, too.
    """
    outcome, abandoned = Future[None](), threading.Event()

    def run() -> None:
        try:
            attempt(abandoned)
            outcome.set_result(None)
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        while not outcome.done():
            before = num_bytes()
            wait([outcome], SLOW_S)
            brought = num_bytes() - before
            if not outcome.done() and brought < min_bytes_per_s * SLOW_S:
                raise TransientError(f"the server sent only {brought} bytes in {SLOW_S:g} s")
    finally:
        abandoned.set()
    outcome.result()


def without_password(url: str) -> str:
    """Returns a URL as it may be shown and recorded."""
    return re.sub("//[^/?#]*@", "//", url)


@contextmanager
def _get(url: str, start: int, known: Version | None) -> Iterator[requests.Response]:
    """Requests a file from byte `start` on, of the version `known`; converts the errors."""
    # A compressed transfer could be neither counted nor resumed.
    headers = {"User-Agent": f"candle_p1/{__version__}", "Accept-Encoding": "identity"}
    if known:
        headers |= {"Range": f"bytes={start}-", "If-Range": known.validator or ""}
    options: Any = {"stream": True, "timeout": TIMEOUTS_S, "hooks": {"response": _check_redirect}}
    try:
        with requests.get(url, headers=headers, **options) as response:
            yield response
    except (requests.Timeout, urllib3.exceptions.TimeoutError) as error:
        raise TransientError("the server does not answer") from error
    except (requests.ConnectionError, urllib3.exceptions.HTTPError) as error:
        found = re.search(r"\[Errno -?\d+\] ([^'\")]+)", str(error))
        reason = f"no connection ({found[1]})" if found else "the connection broke"
        raise TransientError(reason) from error
    except (requests.RequestException, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise CannotDownloadError(without_password(reason)) from error


def _check_redirect(response: requests.Response, **_: Any) -> None:
    """Refuses to be sent to a file, or from an encrypted connection to one that is not."""
    if not response.is_redirect:
        return
    allowed = ("https",) if response.url.startswith("https:") else ("http", "https")
    target = response.headers["Location"]
    with suppress(ValueError):
        if urlsplit(urljoin(response.url, target)).scheme in allowed:
            return
    response.close()
    raise CannotDownloadError(f"the server redirects to {without_password(target)!r}")


def _check(
    response: requests.Response, url: str, asked: int, known: Version | None
) -> tuple[int, Version]:
    """Returns with which byte of which version a response begins; refuses any other answer."""
    status, headers = response.status_code, response.headers
    if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and known:
        raise TransientError("the file on the server has become shorter", restart=True)
    is_part = status == HTTPStatus.PARTIAL_CONTENT
    if status != HTTPStatus.OK and not is_part:
        answer = f"the server answers {status} {response.reason or ''}".rstrip()
        if status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS) or status >= 500:
            retry_after = headers.get("Retry-After", "")  # seconds, or a date
            raise TransientError(answer, float(retry_after) if retry_after.isdecimal() else 0.0)
        raise CannotDownloadError(answer)
    if headers.get("Content-Type", "").lower().startswith("text/html"):
        raise CannotDownloadError("the server answers with a web page")
    encoding = headers.get("Content-Encoding", "identity").lower()
    if encoding != "identity" and not url.endswith(("gz", "zip")):
        raise CannotDownloadError(f"the server compresses it ({encoding}), though asked not to")
    start, length = 0, headers.get("Content-Length")
    if is_part:
        words = headers.get("Content-Range", "")
        found = re.fullmatch(r"bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18}|\*)", words)
        start, length = (int(found[1]), found[2].strip("*") or None) if found else (-1, None)
    elif length is not None and not re.fullmatch("[0-9]{1,18}", length):
        raise CannotDownloadError(f"the server sends the Content-Length {length[:40]!r}")
    version = Version(
        url=without_password(url),
        etag=headers.get("ETag"),
        last_modified=headers.get("Last-Modified"),
        total_bytes=None if length is None else int(length),
    )
    pairs = zip(dict(known or version).values(), dict(version).values(), strict=True)
    differs = any(None not in (one, other) and one != other for one, other in pairs)
    if is_part and (start != asked or differs):
        problem = "the server sent a part of a different file, or a different part"
        raise TransientError(problem, restart=True)
    return start, version
