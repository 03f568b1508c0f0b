"""Downloading one URL, with retries, going on where an earlier download stopped.

The bytes collect in ``.NAME.partial``; ``.NAME.partial.json`` beside it says of which version of
which URL they are. A later attempt, also by another process, asks for the rest with ``Range``, and
with ``If-Range`` (RFC 9110, section 13.1.5), so that a server on which the file has changed sends
the new one whole. Where the server gives nothing to know a version by, attempts start from zero.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit
from urllib.request import url2pathname

from candle_p1 import __version__
from candle_p1.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import BinaryIO

    import requests

    from candle_p1.datasets.synthetic import Progress

SCHEMES = ("http", "https", "file")
BLOCK_BYTES = 1 << 18
TRANSIENT_STATUSES = (408, 429)
"""Refusals (4xx) after which another attempt may succeed."""
OK, PARTIAL_CONTENT, RANGE_NOT_SATISFIABLE = 200, 206, 416
FIRST_REFUSAL, FIRST_SERVER_ERROR = 400, 500


class CannotDownloadError(Exception):
    """The file cannot be had from this URL; the message says why, as a clause."""


class _TransientError(Exception):
    """An attempt failed, and another one may succeed.

    Args:
        reason: Why, as a clause.
        wait_s: How long the server asks to wait; 0 if it does not say.
    """

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


@dataclass(frozen=True)
class Patience:
    """How long to try.

    Attributes:
        num_retries: Attempts after the first that may fail in a row without bringing a new byte.
        first_wait_s: The pause before the first of them; each further pause is twice as long.
        longest_wait_s: No pause is longer, whatever the server asks for.
        connect_s: How long to wait for a connection.
        read_s: How long a connection may bring nothing.
        sleep: Waits that many seconds.
    """

    num_retries: int = 4
    first_wait_s: float = 1.0
    longest_wait_s: float = 60.0
    connect_s: float = 10.0
    read_s: float = 60.0
    sleep: Callable[[float], None] = time.sleep

    def wait_s(self, num_failures: int, asked_s: float) -> float:
        """Returns the pause after that many failures in a row, where the server asks for one."""
        wait_s = max(asked_s, self.first_wait_s * 2.0 ** (num_failures - 1))
        return min(wait_s, self.longest_wait_s)


@dataclass(frozen=True)
class Version:
    """Which bytes a partial file holds the beginning of.

    Attributes:
        url: Where they come from, without a password.
        etag: The server's ETag; None if it gave none.
        last_modified: The server's Last-Modified; None if it gave none.
        total_bytes: Of the whole file; None if the server did not say.
    """

    url: str
    etag: str | None = None
    last_modified: str | None = None
    total_bytes: int | None = None

    @property
    def validator(self) -> str | None:
        """What If-Range may hold: a strong ETag, else the date; None without either."""
        if self.etag:
            return None if self.etag.startswith("W/") else self.etag
        return self.last_modified


class Download:
    """Downloads a file; called by pooch with (URL, temporary file, pooch).

    Args:
        name: The file's name, for messages.
        directory: Where its partial file is kept; nobody else may write to that meanwhile.
        patience: How long to try.
        progress: Called with (name, bytes so far, bytes expected); 0 expected is not known.
        notify: Called with a sentence when an attempt failed and another one follows.

    Attributes:
        version: What the server said of the file that was downloaded last.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        patience: Patience,
        progress: Progress | None = None,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        self.name, self.patience, self._progress, self._notify = name, patience, progress, notify
        self.partial = partial_path(directory, name)
        self._note = self.partial.with_name(f"{self.partial.name}.json")
        self.version = Version("")

    def __call__(self, url: str, output_file: Any, pooch: Any = None) -> None:
        """Downloads `url` to `output_file`, which must be in the same file system.

        Raises:
            CannotDownloadError: It cannot be had.
            OSError: The partial file cannot be written.
        """
        Path(output_file).unlink(missing_ok=True)  # empty, and left behind if the process is killed
        if urlsplit(url).scheme == "file":
            self._copy(url)
        else:
            self._download(url)
        with self.partial.open("rb") as file:
            os.fsync(file.fileno())
        self.partial.replace(output_file)
        self._note.unlink(missing_ok=True)

    def _copy(self, url: str) -> None:
        self.version = Version(without_password(url))
        self._note.unlink(missing_ok=True)
        with _open_local(url) as source, self.partial.open("wb") as file:
            total_bytes = os.fstat(source.fileno()).st_size
            self._write(file, iter(lambda: source.read(BLOCK_BYTES), b""), 0, total_bytes)

    def _download(self, url: str) -> None:
        """Collects the whole file in the partial one."""
        import requests

        num_failures, most_bytes = 0, self._partial_bytes()
        with requests.Session() as session:
            session.headers["User-Agent"] = f"candle_p1/{__version__}"
            # Compressed on the way, the bytes could neither be counted nor asked for by range.
            session.headers["Accept-Encoding"] = "identity"
            while True:
                try:
                    self._attempt(session, url)
                    return
                except _TransientError as error:
                    if self._partial_bytes() > most_bytes:
                        num_failures, most_bytes = 0, self._partial_bytes()
                    num_failures += 1
                    if num_failures > self.patience.num_retries:
                        raise CannotDownloadError(str(error)) from error
                    self._wait(str(error), self.patience.wait_s(num_failures, error.wait_s))

    def _wait(self, reason: str, wait_s: float) -> None:
        if self._notify:
            so_far = f"{self._partial_bytes() / 2**20:.1f} MiB so far"
            self._notify(f"{self.name}: {reason}; {so_far}, trying again in {wait_s:g} s")
        self.patience.sleep(wait_s)

    def _attempt(self, session: requests.Session, url: str) -> None:
        import requests
        import urllib3

        start, validator = self._where_to_go_on(url)
        headers = {"Range": f"bytes={start}-", "If-Range": validator} if start else {}
        timeout_s = (self.patience.connect_s, self.patience.read_s)
        try:
            with session.get(url, headers=headers, stream=True, timeout=timeout_s) as response:
                self._receive(response, url, start)
        except (
            requests.ConnectionError,
            requests.Timeout,
            urllib3.exceptions.HTTPError,
        ) as error:
            raise _TransientError(_reason(error)) from error
        except (requests.RequestException, ValueError) as error:
            raise CannotDownloadError(str(error) or type(error).__name__) from error

    def _where_to_go_on(self, url: str) -> tuple[int, str]:
        """Returns how many bytes are there already, and their validator; 0 if none are of use."""
        try:
            version = Version(**json.loads(self._note.read_text(encoding="utf-8")))
            start = min(self._partial_bytes(), (version.total_bytes or 0) - 1)
        except (OSError, ValueError, TypeError):
            return 0, ""
        if version.url != without_password(url) or version.validator is None or start <= 0:
            return 0, ""
        return start, version.validator

    def _receive(self, response: requests.Response, url: str, start: int) -> None:
        """Writes what a response brings, from `start` on if it continues the partial file there."""
        if response.status_code == RANGE_NOT_SATISFIABLE and start:
            self._note.unlink()
            raise _TransientError("the server's file has become shorter")
        _check_status(response)
        _check_content(response, self.name)
        length = int(response.headers.get("Content-Length", -1))
        if response.status_code == PARTIAL_CONTENT:
            first, total_bytes = _content_range(response)
            if first != start:
                self._note.unlink(missing_ok=True)
                raise _TransientError("the server sent another part of the file than asked for")
        else:
            start, total_bytes = 0, length if length >= 0 else None
        self.version = Version(
            without_password(url),
            response.headers.get("ETag"),
            response.headers.get("Last-Modified"),
            total_bytes,
        )
        with self.partial.open("r+b" if start else "wb") as file:
            file.seek(start)
            file.truncate()
            write_atomically(self._note, json.dumps(vars(self.version)) + "\n")
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
        return self.partial.stat().st_size if self.partial.exists() else 0


def partial_path(directory: Path, name: str) -> Path:
    """Returns where the bytes of a file collect while it is downloaded."""
    return directory / f".{name}.partial"


def without_password(url: str) -> str:
    """Returns a URL as it may be shown and recorded."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _open_local(url: str) -> BinaryIO:
    try:
        return Path(url2pathname(urlsplit(url).path)).open("rb")
    except OSError as error:
        raise CannotDownloadError(f"{error.strerror}") from error


def _check_status(response: requests.Response) -> None:
    status = response.status_code
    clause = f"the server answers {status} {response.reason or ''}".rstrip()
    if status in TRANSIENT_STATUSES or status >= FIRST_SERVER_ERROR:
        asked = response.headers.get("Retry-After", "")  # seconds, or a date
        raise _TransientError(clause, float(asked) if asked.isdecimal() else 0.0)
    if status not in (OK, PARTIAL_CONTENT):
        raise CannotDownloadError(clause)


def _check_content(response: requests.Response, name: str) -> None:
    """Refuses what is not the file's own bytes.

    Raises:
        CannotDownloadError: A web page (of a portal, or of a mirror that moved), or a file that the
            server compressed.
    """
    if response.headers.get("Content-Type", "").lower().startswith("text/html"):
        raise CannotDownloadError("the server answers with a web page")
    encoding = response.headers.get("Content-Encoding", "identity").lower()
    if encoding != "identity" and not name.endswith(("gz", "zip")):
        raise CannotDownloadError(f"the server compresses it ({encoding}), though asked not to")


def _content_range(response: requests.Response) -> tuple[int, int | None]:
    """Returns (first byte, bytes of the whole file) of a part; (-1, None) if it does not say."""
    found = re.match(r"bytes (\d+)-\d+/(\d+|\*)$", response.headers.get("Content-Range", ""))
    if not found:
        return -1, None
    return int(found[1]), None if found[2] == "*" else int(found[2])


def _reason(error: BaseException) -> str:
    """Returns why a connection failed, as the operating system puts it where it did."""
    import requests
    import urllib3

    if isinstance(error, (requests.ConnectTimeout, requests.ReadTimeout)):
        return "the server does not answer"
    if isinstance(error, urllib3.exceptions.ReadTimeoutError):
        return "the connection brings nothing any more"
    seen, found = [error], ""
    for item in seen:
        found = found or str(getattr(item, "strerror", None) or "")
        inner = [*item.args, getattr(item, "reason", None), item.__cause__, item.__context__]
        seen += [each for each in inner if isinstance(each, BaseException) and each not in seen]
    return f"no connection ({found})" if found else "the connection broke"
