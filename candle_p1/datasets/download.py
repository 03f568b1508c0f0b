"""A download that resumes, retries, and gives up on servers that stall.

The bytes are collected in ``.NAME.partial``; ``.NAME.partial.version`` beside it holds the URL and
the version of the file of which they are the beginning. A later attempt, even by another process,
asks for the rest with ``Range``, and with ``If-Range`` (RFC 9110, section 13.1.5), so that a server
on which the file has changed sends the new one from its beginning. If the server sends nothing that
identifies a version, every attempt starts from zero.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import requests
from urllib3.exceptions import HTTPError

from candle_p1 import __version__
from candle_p1.datasets.synthetic import Notify, Progress, partial_path
from candle_p1.files import open_regular_file, read_regular_file, write_atomically

BLOCK_BYTES = 1 << 16
TIMEOUTS_S = (10, 60)
"""How long to wait for a connection, and how long an open one may stay silent."""
SLOW_S = 60.0
"""Over how long a transfer may be slower than the limit."""
MAX_WAIT_S = 60
"""The longest pause before a retry; the first is 1 s, and it doubles."""


class CannotDownloadError(Exception):
    """The file cannot be downloaded from this URL; the message says why, as a clause."""


class TransientError(CannotDownloadError):
    """An attempt failed, and one after `retry_after_s` may succeed."""

    retry_after_s = 0


@dataclass
class Download:
    """Downloads one file over HTTP, or copies a local one, to `partial` beside its path.

    Attributes:
        path: The file's final path; its directory must be locked.
        num_retries: The maximum number of consecutive retries.
        min_kib_per_s: An attempt is given up if it brings less than this over SLOW_S.
        max_bytes: The file's size, if known; a longer one is not downloaded to its end.
        progress: Called with the progress of the download.
        notify: Called when an attempt has failed and another one follows.
    """

    path: Path
    num_retries: int = 4
    min_kib_per_s: int = 1
    max_bytes: int | None = None
    progress: Progress | None = None
    notify: Notify | None = None

    def __post_init__(self) -> None:
        self.version = ""  # what the server says of the version that was downloaded
        self.partial = partial_path(self.path.parent, self.path.name)
        self._state = self.partial.with_name(f"{self.partial.name}.version")
        self._min_bytes = self.min_kib_per_s * 1024 * SLOW_S

    def run(self, url: str) -> None:
        """Downloads from a URL; a failure keeps only what can be resumed.

        Raises:
            CannotDownloadError: It cannot be downloaded.
            OSError: It cannot be written.
        """
        try:
            (self._copy if urlsplit(url).scheme == "file" else self._download)(url)
            if not self._num_bytes():
                raise CannotDownloadError("the file there is empty")
        except (CannotDownloadError, OSError):
            if not self._resume_point(url)[0]:
                self.discard()
            raise

    def discard(self) -> None:
        """Removes what was downloaded so far."""
        self.partial.unlink(missing_ok=True)
        self._state.unlink(missing_ok=True)

    def _num_bytes(self) -> int:
        return self.partial.stat().st_size if self.partial.is_file() else 0

    def _resume_point(self, url: str) -> tuple[int, str]:
        """Returns the byte to ask for, which is the last one that is there, and its version."""
        with suppress(OSError, ValueError):
            source, version = read_regular_file(self._state).split("\n")
            usable = version and version.isascii() and version.isprintable()
            if source == without_password(url) and usable and self._num_bytes() > 1:
                return self._num_bytes() - 1, version
        return 0, ""

    def _copy(self, url: str) -> None:
        self.discard()
        try:
            source = open_regular_file(Path(url2pathname(urlsplit(url).path)))
        except (OSError, ValueError) as error:
            raise CannotDownloadError("there is no such file, or it cannot be read") from error
        with source, self.partial.open("wb") as output:
            shutil.copyfileobj(source, output)

    def _download(self, url: str) -> None:
        num_failures, most_bytes = 0, self._num_bytes()
        while True:
            try:
                return self._attempt(url)
            except TransientError as error:
                num_bytes = self._num_bytes()
                num_failures = 0 if num_bytes - most_bytes > self._min_bytes else num_failures
                most_bytes = max(most_bytes, num_bytes)
                if num_failures == self.num_retries:
                    raise
                wait_s = min(max(error.retry_after_s, 2**num_failures), MAX_WAIT_S)
                num_failures += 1
                if self.notify:
                    self.notify(
                        f"{self.path.name}: {error}; {num_bytes / 2**20:.1f} MiB downloaded so"
                        f" far, trying again in {wait_s} s"
                    )
                time.sleep(wait_s)

    def _attempt(self, url: str) -> None:
        start, version = self._resume_point(url)
        # A compressed transfer could be neither counted nor resumed.
        headers = {"User-Agent": f"candle_p1/{__version__}", "Accept-Encoding": "identity"}
        if start:
            headers |= {"Range": f"bytes={start}-", "If-Range": version}
        try:
            with requests.Session() as session:
                if url.startswith("https:"):  # no redirect may lead to what is not encrypted
                    session.adapters.pop("http://")
                options: Any = {"headers": headers, "stream": True, "timeout": TIMEOUTS_S}
                with session.get(url, **options) as response:
                    _check(response, url)
                    found = _version(response)
                    part = response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
                    if response.status_code == 200:
                        self.discard()
                        start, version = 0, found
                        if version:
                            write_atomically(self._state, f"{without_password(url)}\n{version}")
                    elif not part or not start or found not in ("", version):
                        self.discard()
                        raise TransientError("the file on the server has changed")
                    self.version = version
                    self._receive(response, start)
        except (requests.ConnectionError, requests.Timeout, HTTPError) as error:
            cause = re.search(r"\[Errno -?\d+\] ([^'\")]+)|(timed out)", str(error))
            reason = cause[1] or cause[2] if cause else "it was lost"
            raise TransientError(f"the connection failed ({reason})") from error
        except (requests.RequestException, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise CannotDownloadError(without_password(reason)) from error

    def _receive(self, response: requests.Response, num_bytes: int) -> None:
        left_bytes = response.raw.length_remaining or 0  # 0 if it comes in chunks
        total_bytes = num_bytes + left_bytes if left_bytes else 0
        if left_bytes > shutil.disk_usage(self.path.parent).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with self.partial.open("r+b" if num_bytes else "wb") as file:
            file.seek(num_bytes)
            file.truncate()
            began_s, began_bytes = time.monotonic(), num_bytes
            while block := response.raw.read1(BLOCK_BYTES, decode_content=False):
                file.write(block)
                num_bytes += len(block)
                if self.max_bytes is not None and num_bytes > self.max_bytes:
                    self.discard()
                    raise CannotDownloadError(f"it is larger than {self.max_bytes} bytes")
                if self.progress:
                    self.progress(self.path.name, num_bytes, total_bytes)
                if (now_s := time.monotonic()) - began_s > SLOW_S:
                    if num_bytes - began_bytes < self._min_bytes:
                        raise TransientError(f"it was too slow over {SLOW_S:g} s")
                    began_s, began_bytes = now_s, num_bytes
            os.fsync(file.fileno())


def without_password(url: str) -> str:
    """Returns a URL as it may be shown and recorded."""
    return re.sub("//[^/?#]*@", "//", url)


def _check(response: requests.Response, url: str) -> None:
    status, headers = response.status_code, response.headers
    answer = f"the server answers {status} {response.reason or ''}".rstrip()
    if status in (408, 429) or status >= 500:
        error = TransientError(answer)
        if re.fullmatch("[0-9]{1,9}", seconds := headers.get("Retry-After", "")):  # or a date
            error.retry_after_s = int(seconds)
        raise error
    if status == 416:  # the file has become shorter
        return
    encoding = headers.get("Content-Encoding", "identity").lower()
    chunked = headers.get("Transfer-Encoding", "").lower() == "chunked"
    if encoding != "identity" and not url.endswith(("gz", "zip")):
        answer += f", compressed ({encoding}), though asked not to"
    elif headers.get("Content-Type", "").lower().startswith("text/html"):
        answer += ", a web page"
    elif not chunked and response.raw.length_remaining is None:
        answer += ", but not how long the file is"
    elif status in (200, 206):
        return
    raise CannotDownloadError(answer)


def _version(response: requests.Response) -> str:
    """Returns what If-Range may hold: a strong ETag, or else the date; "" without either."""
    etag = response.headers.get("ETag", "")
    return "" if etag.startswith("W/") else etag or response.headers.get("Last-Modified", "")
