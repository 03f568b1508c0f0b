"""A downloader for pooch that retries, and resumes where an earlier download stopped.

pooch's own downloaders start again from zero. Here the bytes are collected in ``.NAME.partial``;
``.NAME.partial.json`` beside it says which version of which URL they belong to. A later attempt,
even by another process, asks for the rest with ``Range``, and with ``If-Range`` (RFC 9110, section
13.1.5), so that a server on which the file has changed sends the new one from its beginning. If the
server sends nothing that identifies a version, every attempt starts from zero.
"""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit
from urllib.request import url2pathname

from candle_p1 import __version__
from candle_p1.datasets.storing import partial_path
from candle_p1.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import BinaryIO

    import requests

    from candle_p1.datasets.storing import Notify, Progress

SCHEMES = ("http", "https", "file")
BLOCK_BYTES = 1 << 18
TRANSIENT_STATUSES = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
"""Client errors (4xx) after which another attempt may succeed."""
TIMEOUTS_S = (10, 60)
"""How long to wait for a connection, and how long an open one may stay silent."""
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

    @property
    def validator(self) -> str | None:
        """What If-Range may hold: a strong ETag, or else the date; None without either."""
        if self.etag:
            return None if self.etag.startswith("W/") else self.etag
        return self.last_modified


class ResumingDownloader:
    """Downloads one file; pooch calls it with (URL, temporary file, pooch).

    Args:
        path: The file's final path; its partial file is kept beside it, and must be locked.
        num_retries: How many attempts in a row, after the first, may fail without a new byte.
        progress: Called with the progress of the download.
        notify: Called when an attempt has failed and another one follows.

    Attributes:
        version: The version of the file that was downloaded last.
    """

    def __init__(
        self,
        path: Path,
        num_retries: int,
        progress: Progress | None = None,
        notify: Notify | None = None,
    ) -> None:
        self.name, self.version = path.name, Version("")
        self._num_retries, self._progress, self._notify = num_retries, progress, notify
        self._partial = partial_path(path.parent, path.name)
        self._version_path = self._partial.with_name(f"{self._partial.name}.json")

    def __call__(self, url: str, output_file: Any, pooch: Any = None) -> None:
        """Downloads `url` to `output_file`, which must be on the partial file's file system.

        Raises:
            CannotDownloadError: It cannot be downloaded.
            OSError: The partial file cannot be written.
        """
        Path(output_file).unlink(missing_ok=True)  # a killed process would leave it behind, empty
        if urlsplit(url).scheme == "file":
            self._copy(url)
        else:
            self._download(url)
        with self._partial.open("rb") as file:
            os.fsync(file.fileno())
        self._partial.replace(output_file)
        self._version_path.unlink(missing_ok=True)

    def _copy(self, url: str) -> None:
        self.version = Version(without_password(url))
        self._version_path.unlink(missing_ok=True)
        path = Path(url2pathname(urlsplit(url).path))
        if not (path.is_file() and os.access(path, os.R_OK)):
            raise CannotDownloadError("there is no such file, or it cannot be read")
        with path.open("rb") as source, self._partial.open("wb") as file:
            total_bytes = os.fstat(source.fileno()).st_size
            self._write(file, iter(lambda: source.read(BLOCK_BYTES), b""), 0, total_bytes)

    def _download(self, url: str) -> None:
        """Collects the whole file in the partial one."""
        import requests

        num_failures, most_bytes = 0, self._partial_bytes()
        with requests.Session() as session:
            session.headers["User-Agent"] = f"candle_p1/{__version__}"
            # A compressed transfer could be neither counted nor resumed.
            session.headers["Accept-Encoding"] = "identity"
            while True:
                try:
                    self._attempt(session, url)
                    return
                except _TransientError as error:
                    num_bytes = self._partial_bytes()
                    if num_bytes > most_bytes:
                        num_failures, most_bytes = 0, num_bytes
                    num_failures += 1
                    if num_failures > self._num_retries:
                        raise CannotDownloadError(str(error)) from error
                    wait_s = max(error.retry_after_s, FIRST_WAIT_S * 2 ** (num_failures - 1))
                    wait_s = min(wait_s, MAX_WAIT_S)
                    if self._notify:
                        self._notify(
                            f"{self.name}: {error}; {num_bytes / 2**20:.1f} MiB downloaded so far,"
                            f" trying again in {wait_s:g} s"
                        )
                    time.sleep(wait_s)

    def _attempt(self, session: requests.Session, url: str) -> None:
        import requests
        import urllib3

        start, validator = self._resume_point(url)
        headers = {"Range": f"bytes={start}-", "If-Range": validator} if start else {}
        try:
            with session.get(url, headers=headers, stream=True, timeout=TIMEOUTS_S) as response:
                self._receive(response, url, start)
        except (
            requests.ConnectionError,
            requests.Timeout,
            urllib3.exceptions.HTTPError,
        ) as error:
            raise _TransientError(_reason(error)) from error
        except (requests.RequestException, ValueError) as error:
            raise CannotDownloadError(str(error) or type(error).__name__) from error

    def _resume_point(self, url: str) -> tuple[int, str]:
        """Returns how many bytes there are already, and their validator; 0 if they are unusable."""
        try:
            version = Version(**json.loads(self._version_path.read_text(encoding="utf-8")))
            start = min(self._partial_bytes(), (version.total_bytes or 0) - 1)
        except (OSError, ValueError, TypeError):
            return 0, ""
        if version.url != without_password(url) or version.validator is None or start <= 0:
            return 0, ""
        return start, version.validator

    def _receive(self, response: requests.Response, url: str, start: int) -> None:
        """Writes the content of a response, from `start` on if it continues the partial file."""
        if response.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and start:
            self._version_path.unlink()
            raise _TransientError("the file on the server has become shorter")
        _check_response(response, self.name)
        if response.status_code == HTTPStatus.PARTIAL_CONTENT:
            first, total_bytes = _content_range(response)
            if first != start:
                self._version_path.unlink(missing_ok=True)
                raise _TransientError("the server sent a different part of the file")
        else:
            length = response.headers.get("Content-Length")
            start, total_bytes = 0, int(length) if length else None
        self.version = Version(
            without_password(url),
            response.headers.get("ETag"),
            response.headers.get("Last-Modified"),
            total_bytes,
        )
        with self._partial.open("r+b" if start else "wb") as file:
            file.seek(start)
            file.truncate()
            write_atomically(self._version_path, json.dumps(vars(self.version)) + "\n")
            blocks = response.raw.stream(BLOCK_BYTES, decode_content=False)
            num_bytes = self._write(file, blocks, start, total_bytes)
        if total_bytes is not None and num_bytes != total_bytes:
            raise _TransientError(f"the connection ended at byte {num_bytes} of {total_bytes}")

    def _write(
        self, file: BinaryIO, blocks: Iterable[bytes], start: int, total_bytes: int | None
    ) -> int:
        """Writes blocks to a file; returns the position after them."""
        num_bytes = start
        for block in blocks:
            file.write(block)
            num_bytes += len(block)
            if self._progress:
                self._progress(self.name, num_bytes, total_bytes or 0)
        return num_bytes

    def _partial_bytes(self) -> int:
        return self._partial.stat().st_size if self._partial.exists() else 0


def without_password(url: str) -> str:
    """Returns a URL as it may be shown and recorded."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


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


def _content_range(response: requests.Response) -> tuple[int, int | None]:
    """Returns (first byte, bytes of the whole file) of a part; (-1, None) if it does not say."""
    found = re.match(r"bytes (\d+)-\d+/(\d+|\*)$", response.headers.get("Content-Range", ""))
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
