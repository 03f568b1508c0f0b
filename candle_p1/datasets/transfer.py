"""One transfer of a file over HTTP: sending the request, receiving, and checking the response."""

from __future__ import annotations

import queue
import re
import threading
import time
from contextlib import closing, contextmanager, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from candle_p1 import __version__

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    import requests

    Items = Generator[Any, None, None]  # a response, then blocks of bytes

BLOCK_BYTES, MAX_BLOCK_BYTES = 1 << 14, 1 << 18
"""What is read at a time: little at first, so that a slow transfer is not taken for a stalled one,
and more from a fast server."""
QUEUED_BLOCKS = 64
TRANSIENT_STATUSES = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
"""Client errors (4xx) after which another attempt may succeed."""
TIMEOUTS_S = (10, 60)
"""How long to wait for a connection, and how long an open one may stay silent."""
SLOW_S = 60.0
"""Over how long a transfer may be slower than the limit."""
MIN_KIB_PER_S = 1


class CannotDownloadError(Exception):
    """The file cannot be downloaded from this URL; the message says why, as a clause."""


class TransientError(Exception):
    """An attempt failed, and another one may succeed.

    Args:
        reason: Why, as a clause.
        retry_after_s: How long the server asks to wait; 0 if it does not say.
    """

    def __init__(self, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


def without_password(url: str) -> str:
    """Returns a URL as it may be shown and recorded."""
    return re.sub("//[^/?#]*@", "//", url)


@contextmanager
def transfer(
    url: str, headers: Mapping[str, str | None], min_bytes_per_s: float
) -> Iterator[tuple[requests.Response, Items]]:
    """Sends a request; yields the response, and the blocks of its content.

    Args:
        url: The file.
        headers: Headers of the request, besides those that all requests have.
        min_bytes_per_s: The transfer is given up if it brings less than this over SLOW_S.

    Raises:
        CannotDownloadError: The server cannot be asked, or answers with nonsense.
        TransientError: The transfer failed or was too slow; a later one may succeed.
    """
    import requests
    import urllib3

    try:
        with closing(_in_thread(_exchange(url, headers), min_bytes_per_s)) as items:
            yield next(items), items
    except (
        requests.ConnectionError,
        requests.Timeout,
        urllib3.exceptions.HTTPError,
    ) as error:
        raise TransientError(_reason(error)) from error
    except (requests.RequestException, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise CannotDownloadError(without_password(reason)) from error


def _exchange(url: str, headers: Mapping[str, str | None]) -> Items:
    """Sends a request; yields the response, then the blocks of its content as they were sent."""
    import requests

    # A compressed transfer could be neither counted nor resumed.
    own = {"User-Agent": f"candle_p1/{__version__}", "Accept-Encoding": "identity"}
    with requests.get(
        url,
        headers={**own, **headers},
        stream=True,
        timeout=TIMEOUTS_S,
        hooks={"response": _check_redirect},
    ) as response:
        yield response
        size, began_s = BLOCK_BYTES, time.monotonic()
        while block := response.raw.read(size, decode_content=False):
            is_fast = time.monotonic() - began_s < 1.0
            size = min(2 * size, MAX_BLOCK_BYTES) if is_fast else BLOCK_BYTES
            yield block
            began_s = time.monotonic()


def _in_thread(items: Items, min_bytes_per_s: float) -> Items:
    """Yields items that another thread takes from an iterator, which is left if it is too slow.

    A socket's timeout limits only the silence between two bytes, and a server may send the lines of
    its answer, or the content, byte by byte for days.

    Raises:
        TransientError: Over SLOW_S, the items that are bytes were too few.
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
                    raise TransientError(f"the server sent only {num_bytes} bytes in {SLOW_S:g} s")
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


def check_response(response: requests.Response, name: str) -> None:
    """Refuses a response that does not contain the file's own bytes.

    Raises:
        CannotDownloadError: The server refuses, compresses the file, or sends a web page, such as
            a login page or that of a mirror that has moved.
        TransientError: A later attempt may succeed.
    """
    status, headers = response.status_code, response.headers
    if status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
        answer = f"the server answers {status} {response.reason or ''}".rstrip()
        if status in TRANSIENT_STATUSES or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            retry_after = headers.get("Retry-After", "")  # seconds, or a date
            raise TransientError(answer, float(retry_after) if retry_after.isdecimal() else 0.0)
        raise CannotDownloadError(answer)
    if headers.get("Content-Type", "").lower().startswith("text/html"):
        raise CannotDownloadError("the server answers with a web page")
    encoding = headers.get("Content-Encoding", "identity").lower()
    if encoding != "identity" and not name.endswith(("gz", "zip")):
        raise CannotDownloadError(f"the server compresses it ({encoding}), though asked not to")


def content_length(response: requests.Response) -> int | None:
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


def content_range(response: requests.Response) -> tuple[int, int | None]:
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
