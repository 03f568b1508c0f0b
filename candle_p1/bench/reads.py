"""The bytes this process has read, as the kernel counts them in ``/proc/self/io``.

``rchar`` is what system calls like read() returned, from the page cache or not. It does not see
pages of a file that is mapped into memory, as pandas 3.1 does with large files; those that come
from storage are in ``read_bytes``.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

COUNTERS = Path("/proc/self/io")


class Reads(NamedTuple):
    """Bytes read.

    Attributes:
        bytes_read: By system calls.
        storage_bytes_read: Fetched from storage.
    """

    bytes_read: int
    storage_bytes_read: int


class ReadCounter:
    """Counts from its making."""

    def __init__(self) -> None:
        self._before, self._own_bytes = _counters()

    def count(self) -> Reads | None:
        """Returns the bytes read since, less what the counting read; None if the kernel has none.

        A child process counts from the moment it has been waited for.
        """
        after, _ = _counters()
        if self._before is None or after is None:
            return None
        return Reads(
            after.bytes_read - self._before.bytes_read - self._own_bytes,
            after.storage_bytes_read - self._before.storage_bytes_read,
        )


def _counters() -> tuple[Reads | None, int]:
    """Returns the counters, None where there are none, and the bytes it took to read them.

    They do not yet hold this reading.
    """
    if not COUNTERS.exists():
        return None, 0
    text = COUNTERS.read_text()
    values = {name: int(value) for name, value in (line.split(": ") for line in text.splitlines())}
    return Reads(values["rchar"], values["read_bytes"]), len(text)
