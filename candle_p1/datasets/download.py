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
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import url2pathname

from candle_p1.datasets.storing import partial_path
from candle_p1.datasets.transfer import (
    MIN_KIB_PER_S,
    CannotDownloadError,
    TransientError,
    check_response,
    content_length,
    content_range,
    transfer,
    without_password,
)
from candle_p1.files import read_json, write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import BinaryIO

    import requests

    from candle_p1.datasets.storing import Notify, Progress

SCHEMES = ("http", "https", "file")
FIRST_WAIT_S, MAX_WAIT_S = 1.0, 60.0
"""The pause before the first retry, which doubles with each, and the longest one."""


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
        self.discard()
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
            except TransientError as error:
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
        known = self._resume_point(url)
        headers: dict[str, str | None] = {}
        if known:
            headers = {"Range": f"bytes={self._start(known)}-", "If-Range": known.validator}
        with transfer(url, headers, self._min_bytes_per_s) as (response, blocks):
            self._receive(response, blocks, url, known)

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
            raise TransientError("the file on the server has become shorter")
        check_response(response, self.path.name)
        is_part = response.status_code == HTTPStatus.PARTIAL_CONTENT
        start, headers = 0, response.headers
        if is_part:
            start, total_bytes = content_range(response)
        else:
            total_bytes = content_length(response)
        self.version = Version(
            without_password(url), headers.get("ETag"), headers.get("Last-Modified"), total_bytes
        )
        if is_part and (
            start != (self._start(known) if known else 0)
            or (known and known.contradicts(self.version))
        ):
            self.discard()
            raise TransientError("the server sent a part of a different file, or a different part")
        remaining_bytes = (total_bytes or 0) - start
        if remaining_bytes > shutil.disk_usage(self.partial.parent).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if not start:
            self.partial.unlink(missing_ok=True)  # a pipe would be waited for
        with self.partial.open("r+b" if start else "wb") as file:
            file.seek(start)
            file.truncate()
            write_atomically(self._version_path, json.dumps(vars(self.version)) + "\n")
            num_bytes = self._write(file, blocks, start, total_bytes)
        if total_bytes is not None and num_bytes != total_bytes:
            raise TransientError(f"the connection ended at byte {num_bytes} of {total_bytes}")
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
