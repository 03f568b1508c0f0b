"""Downloading a file with retries, resuming where an earlier download stopped.

The bytes are collected in ``.NAME.partial``; ``.NAME.partial.json`` beside it says which version
of which URL they belong to. A later attempt, even by another process, asks for the rest with
``Range``, and with ``If-Range`` (RFC 9110, section 13.1.5), so that a server on which the file has
changed sends the new one from its beginning. If the server sends nothing that identifies a version,
every attempt starts from zero.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import re
import shutil
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit
from urllib.request import url2pathname

from candle_p1 import __version__
from candle_p1.datasets.storing import partial_path
from candle_p1.files import read_json, write_atomically

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable
    from typing import BinaryIO

    import requests

    from candle_p1.datasets.storing import Notify, Progress

    _Items = Generator[Any, None, None]  # a response, then blocks of bytes

SCHEMES = ("http", "https", "file")
BLOCK_BYTES = 1 << 14
"""Small enough that a slow transfer is not taken for a stalled one."""
QUEUED_BLOCKS = 64
TRANSIENT_STATUSES = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
"""Client errors (4xx) after which another attempt may succeed."""
TIMEOUTS_S = (10, 60)
"""How long to wait for a connection, and how long an open one may stay silent."""
SLOW_S = 60.0
"""Over how long a transfer may be slower than the limit."""
MIN_KIB_PER_S = 1
FIRST_WAIT_S, MAX_WAIT_S = 1.0, 60.0
"""The pause before the first retry, which doubles with each, and the longest one."""


class CannotDownloadError(Exception):
    """The file cannot be downloaded from this URL; the message says why, as a clause."""


class _TransientError(Exception):
    """An attempt failed, and another one may succeed.

    Args:
        reason: Why, as a clause.
        retry_after_s: How long the server asks to wait; 0 if it does not say.
    """

    def __init__(self, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class Version:
    """The version of a file on a server, of which a partial file is the beginning.

    Attributes:
        url: Where it comes from, without a password.
        etag: The server's ETag; None if it sent none.
        last_modified: The server's Last-Modified; None if it sent none.
        total_bytes: The size of the whole file; None if the server did not say.
    """

    url: str
    etag: str | None = None
    last_modified: str | None = None
    total_bytes: int | None = None

    @classmethod
    def read(cls, path: Path) -> Version | None:
        """Returns the version that a file describes; None if it does not describe one."""
        try:
            version = cls(**read_json(path))
        except (OSError, ValueError, TypeError):
            return None
        texts = (version.url, version.etag or "", version.last_modified or "")
        is_sound = all(isinstance(text, str) and text.isprintable() for text in texts)
        return version if is_sound and isinstance(version.total_bytes, int) else None

    @property
    def validator(self) -> str | None:
        """What If-Range may hold: a strong ETag, or else the date; None without either."""
        if self.etag:
            return None if self.etag.startswith("W/") else self.etag
        return self.last_modified

    def contradicts(self, other: Version) -> bool:
        """Returns whether another version differs in something that both of them state."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return any(None not in (mine, its) and mine != its for mine, its in pairs)


class Downloader:
    """Downloads one file.

    Args:
        path: The file's final path; its partial file is kept beside it, and must be locked.
        num_retries: How many attempts in a row, after the first, may fail or bring too little.
        min_kib_per_s: An attempt is given up if it brings less than this over a minute.
        expected_bytes: The file's size, if known; a longer one is not downloaded to its end.
        progress: Called with the progress of the download.
        notify: Called when an attempt has failed and another one follows.

    Attributes:
        partial: Where the bytes are collected.
        version: The version of the file that was downloaded last.
        is_whole: Whether the server said where the file that was downloaded last ends.
    """

    def __init__(
        self,
        path: Path,
        *,
        num_retries: int = 4,
        min_kib_per_s: int = MIN_KIB_PER_S,
        expected_bytes: int | None = None,
        progress: Progress | None = None,
        notify: Notify | None = None,
    ) -> None:
        self.path, self.version, self.is_whole = path, Version(""), True
        self.partial = partial_path(path.parent, path.name)
        self._num_retries, self._min_bytes_per_s = num_retries, min_kib_per_s * 1024
        self._expected_bytes, self._progress, self._notify = expected_bytes, progress, notify
        self._version_path = self.partial.with_name(f"{self.partial.name}.json")

    def download(self, url: str) -> None:
        """Collects the whole file in the partial one.

        What an attempt that failed has brought is kept only if it can be resumed.

        Raises:
            CannotDownloadError: It cannot be downloaded.
            OSError: The partial file cannot be written.
        """
        try:
            if urlsplit(url).scheme == "file":
                self._copy(url)
            else:
                self._download(url)
            if not self._partial_bytes():
                raise CannotDownloadError("the file there is empty")
        except (CannotDownloadError, OSError):
            if not self._resume_point(url):
                self.discard()
            raise
        with self.partial.open("rb") as file:
            os.fsync(file.fileno())

    def finish(self) -> None:
        """Gives the file its final name.

        Raises:
            OSError: It cannot be renamed.
        """
        self.partial.replace(self.path)
        self._version_path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Removes what has been downloaded."""
        self.partial.unlink(missing_ok=True)
        self._version_path.unlink(missing_ok=True)

    def _copy(self, url: str) -> None:
        self.version = Version(without_password(url))
        self._version_path.unlink(missing_ok=True)
        path = Path(url2pathname(urlsplit(url).path))
        is_readable = False
        with suppress(OSError, ValueError):  # the path may be too long, or have a null byte
            is_readable = path.is_file() and os.access(path, os.R_OK)
        if not is_readable:
            raise CannotDownloadError("there is no such file, or it cannot be read")
        with path.open("rb") as source, self.partial.open("wb") as file:
            total_bytes = os.fstat(source.fileno()).st_size
            self._write(file, iter(lambda: source.read(1 << 20), b""), 0, total_bytes)

    def _download(self, url: str) -> None:
        num_failures, most_bytes = 0, self._partial_bytes()
        while True:
            began_s = time.monotonic()
            try:
                self._attempt(url)
                return
            except _TransientError as error:
                num_bytes = self._partial_bytes()
                # A server that closes the connection after each byte brings too little, too.
                enough_bytes = self._min_bytes_per_s * max(time.monotonic() - began_s, 1.0)
                if num_bytes - most_bytes > enough_bytes:
                    num_failures = 0
                most_bytes = max(most_bytes, num_bytes)
                num_failures += 1
                if num_failures > self._num_retries:
                    raise CannotDownloadError(str(error)) from error
                wait_s = max(error.retry_after_s, FIRST_WAIT_S * 2 ** (num_failures - 1))
                wait_s = min(wait_s, MAX_WAIT_S)
                if self._notify:
                    self._notify(
                        f"{self.path.name}: {error}; {num_bytes / 2**20:.1f} MiB downloaded so"
                        f" far, trying again in {wait_s:g} s"
                    )
                time.sleep(wait_s)

    def _attempt(self, url: str) -> None:
        import requests
        import urllib3

        known = self._resume_point(url)
        start = self._start(known) if known else 0
        headers = {"Range": f"bytes={start}-", "If-Range": known.validator} if known else {}
        try:
            with closing(_in_thread(_exchange(url, headers), self._min_bytes_per_s)) as received:
                self._receive(next(received), received, url, known)
        except (
            requests.ConnectionError,
            requests.Timeout,
            urllib3.exceptions.HTTPError,
        ) as error:
            raise _TransientError(_reason(error)) from error
        except (requests.RequestException, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise CannotDownloadError(without_password(reason)) from error

    def _resume_point(self, url: str) -> Version | None:
        """Returns the version of which the partial file is a beginning that can be resumed."""
        version = Version.read(self._version_path)
        if version and version.url == without_password(url) and version.validator:
            return version if self._start(version) > 0 else None
        return None

    def _start(self, version: Version) -> int:
        """Returns the first byte to ask for, which is at most the file's last one."""
        return min(self._partial_bytes(), (version.total_bytes or 0) - 1)

    def _receive(
        self, response: requests.Response, blocks: Iterable[bytes], url: str, known: Version | None
    ) -> None:
        """Writes the content of a response; to resume, the version that is `known` so far."""
        if response.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and known:
            self.discard()
            raise _TransientError("the file on the server has become shorter")
        _check_response(response, self.path.name)
        is_part = response.status_code == HTTPStatus.PARTIAL_CONTENT
        start, headers = 0, response.headers
        if is_part:
            start, total_bytes = _content_range(response)
        else:
            total_bytes = _content_length(response)
        self.version = Version(
            without_password(url), headers.get("ETag"), headers.get("Last-Modified"), total_bytes
        )
        if is_part and (
            start != (self._start(known) if known else 0)
            or (known and known.contradicts(self.version))
        ):
            self.discard()
            raise _TransientError("the server sent a part of a different file, or a different part")
        remaining_bytes = (total_bytes or 0) - start
        if remaining_bytes > shutil.disk_usage(self.partial.parent).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with self.partial.open("r+b" if start else "wb") as file:
            file.seek(start)
            file.truncate()
            write_atomically(self._version_path, json.dumps(vars(self.version)) + "\n")
            num_bytes = self._write(file, blocks, start, total_bytes)
        if total_bytes is not None and num_bytes != total_bytes:
            raise _TransientError(f"the connection ended at byte {num_bytes} of {total_bytes}")
        is_chunked = headers.get("Transfer-Encoding", "").lower() == "chunked"
        self.is_whole = is_chunked or total_bytes is not None

    def _write(
        self, file: BinaryIO, blocks: Iterable[bytes], start: int, total_bytes: int | None
    ) -> int:
        """Writes blocks to a file; returns the position after them."""
        num_bytes = start
        for block in blocks:
            file.write(block)
            num_bytes += len(block)
            if self._expected_bytes is not None and num_bytes > self._expected_bytes:
                self._version_path.unlink(missing_ok=True)
                raise CannotDownloadError(f"it is larger than {self._expected_bytes} bytes")
            if self._progress:
                self._progress(self.path.name, num_bytes, total_bytes or 0)
        return num_bytes

    def _partial_bytes(self) -> int:
        return self.partial.stat().st_size if self.partial.exists() else 0


def without_password(url: str) -> str:
    """Returns a URL as it may be shown and recorded."""
    return re.sub("//[^/?#]*@", "//", url)


def _exchange(url: str, headers: dict[str, Any]) -> _Items:
    """Sends a request; yields the response, then the blocks of its content as they were sent."""
    import requests

    # A compressed transfer could be neither counted nor resumed.
    own = {"User-Agent": f"candle_p1/{__version__}", "Accept-Encoding": "identity"}
    with requests.get(
        url,
        headers=own | headers,
        stream=True,
        timeout=TIMEOUTS_S,
        hooks={"response": _check_redirect},
    ) as response:
        yield response
        yield from response.raw.stream(BLOCK_BYTES, decode_content=False)


def _in_thread(items: _Items, min_bytes_per_s: float) -> _Items:
    """Yields items that another thread takes from an iterator, which is left if it is too slow.

    A socket's timeout limits only the silence between two bytes, and a server may send the lines of
    its answer, or the content, byte by byte for days.

    Raises:
        _TransientError: Over SLOW_S, the items that are bytes were too few.
    """
    received: queue.Queue[Any] = queue.Queue(QUEUED_BLOCKS)
    abandoned, end = threading.Event(), object()

    def put(item: Any) -> None:
        while not abandoned.is_set():
            with suppress(queue.Full):
                received.put(item, timeout=0.1)
                break

    def take() -> None:
        try:
            with closing(items):
                for item in items:
                    put(item)
                    if abandoned.is_set():
                        return
            put(end)
        except Exception as error:
            put(error)

    threading.Thread(target=take, daemon=True).start()
    num_bytes, judged_s = 0, time.monotonic() + SLOW_S
    try:
        while True:
            with suppress(queue.Empty):
                item = received.get(timeout=max(judged_s - time.monotonic(), 0.0))
                if item is end:
                    return
                if isinstance(item, Exception):
                    raise item
                num_bytes += len(item) if isinstance(item, bytes) else 0
                yield item
            if time.monotonic() >= judged_s and received.empty():
                if num_bytes < min_bytes_per_s * SLOW_S:
                    raise _TransientError(f"the server sent only {num_bytes} bytes in {SLOW_S:g} s")
                num_bytes, judged_s = 0, time.monotonic() + SLOW_S
    finally:
        abandoned.set()


def _check_redirect(response: requests.Response, **_: Any) -> None:
    """Refuses to be sent to a file, or from an encrypted connection to one that is not.

    Raises:
        CannotDownloadError: The redirect is refused.
    """
    if not response.is_redirect:
        return
    allowed = ("https",) if response.url.startswith("https:") else ("http", "https")
    target = response.headers["Location"]
    with suppress(ValueError):
        if urlsplit(urljoin(response.url, target)).scheme in allowed:
            return
    response.close()
    raise CannotDownloadError(f"the server redirects to {without_password(target)!r}")


def _check_response(response: requests.Response, name: str) -> None:
    """Refuses a response that does not contain the file's own bytes.

    Raises:
        CannotDownloadError: The server refuses, compresses the file, or sends a web page, such as
            a login page or that of a mirror that has moved.
        _TransientError: A later attempt may succeed.
    """
    status, headers = response.status_code, response.headers
    if status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
        answer = f"the server answers {status} {response.reason or ''}".rstrip()
        if status in TRANSIENT_STATUSES or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            retry_after = headers.get("Retry-After", "")  # seconds, or a date
            raise _TransientError(answer, float(retry_after) if retry_after.isdecimal() else 0.0)
        raise CannotDownloadError(answer)
    if headers.get("Content-Type", "").lower().startswith("text/html"):
        raise CannotDownloadError("the server answers with a web page")
    encoding = headers.get("Content-Encoding", "identity").lower()
    if encoding != "identity" and not name.endswith(("gz", "zip")):
        raise CannotDownloadError(f"the server compresses it ({encoding}), though asked not to")


def _content_length(response: requests.Response) -> int | None:
    """Returns the length of a response; None if it does not say.

    Raises:
        CannotDownloadError: It says something that is not a length.
    """
    length = response.headers.get("Content-Length")
    if length is None:
        return None
    if not re.fullmatch("[0-9]{1,18}", length):
        raise CannotDownloadError(f"the server sends the Content-Length {length[:40]!r}")
    return int(length)


def _content_range(response: requests.Response) -> tuple[int, int | None]:
    """Returns (first byte, bytes of the whole file) of a part; (-1, None) if it does not say."""
    words = response.headers.get("Content-Range", "")
    found = re.fullmatch(r"bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18}|\*)", words)
    if not found:
        return -1, None
    return int(found[1]), None if found[2] == "*" else int(found[2])


def _reason(error: Exception) -> str:
    """Returns why a connection failed, in the operating system's words if it gave any."""
    import requests
    import urllib3

    if isinstance(error, (requests.Timeout, urllib3.exceptions.TimeoutError)):
        return "the server does not answer"
    found = re.search(r"\[Errno -?\d+\] ([^'\")]+)", str(error))
    return f"no connection ({found[1]})" if found else "the connection broke"
