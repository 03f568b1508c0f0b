"""Profiles of Python calls: one per rank, and a table over all ranks."""

from __future__ import annotations

import cProfile
import io
import marshal
import pstats
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

NUM_ROWS = 60
DIRECTORY = "profile"
TABLE = "top.txt"


class CallProfile:
    """Profiles the Python calls of this rank's main thread.

    Args:
        wanted: Whether to profile; if not, no method does anything.
    """

    def __init__(self, wanted: bool) -> None:
        self._profile = cProfile.Profile() if wanted else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Profiles the body of ``with``."""
        if self._profile is None:
            yield
            return
        self._profile.enable()
        try:
            yield
        finally:
            self._profile.disable()

    def statistics(self) -> bytes | None:
        """Returns the content of a profile file; None if this rank is not profiled."""
        if self._profile is None:
            return None
        self._profile.create_stats()
        stats: Any = self._profile
        return marshal.dumps(stats.stats)


def write_profiles(directory: Path, of_ranks: Sequence[bytes | None]) -> None:
    """Writes a profile for each rank, which pstats and its viewers open, and a merged table.

    The table lists the functions with the longest own time, over all ranks.

    Args:
        directory: The run's directory.
        of_ranks: `CallProfile.statistics` of every rank.
    """
    contents = [content for content in of_ranks if content is not None]
    if not contents:
        return
    folder = directory / DIRECTORY
    folder.mkdir(exist_ok=True)
    files = [folder / f"rank-{rank:04d}.prof" for rank in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    text = io.StringIO()
    merged = pstats.Stats(*map(str, files), stream=text)
    merged.sort_stats("tottime").print_stats(NUM_ROWS)
    (folder / TABLE).write_text(text.getvalue(), encoding="utf-8")
