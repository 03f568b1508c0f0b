"""The bytes that this process has read, as the kernel counts them in ``/proc/self/io``.

``rchar`` is what system calls such as read() returned, from the page cache or not. It does not
include pages of files that are mapped into memory, as pandas 3.1 does with large files; those that
come from storage are included in ``read_bytes``.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

COUNTERS = Path("/proc/self/io")


class Reads(NamedTuple):
    """Bytes read.

    Attributes:
        bytes_read: By system calls.
        storage_bytes_read: From storage.
    """

    bytes_read: int
    storage_bytes_read: int


class ReadCounter:
    """Counts the bytes read since it was created."""

    def __init__(self) -> None:
        self._before, self._own_bytes = _counters()

    def count(self) -> Reads | None:
        """Returns the bytes read, without those of counting; None if the kernel does not count.

        A child process is included once it has been waited for.
        """
        after, _ = _counters()
        if self._before is None or after is None:
            return None
        since = [now - before for now, before in zip(after, self._before, strict=True)]
        return Reads(since[0] - self._own_bytes, since[1])


def _counters() -> tuple[Reads | None, int]:
    """Returns the counters, or None, and the bytes of reading them, which they do not include."""
    if not COUNTERS.exists():
        return None, 0
    text = COUNTERS.read_text()
    values = dict(line.split(": ") for line in text.splitlines())
    return Reads(int(values["rchar"]), int(values["read_bytes"])), len(text)
