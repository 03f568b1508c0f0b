"""Profiles of Python calls: one per rank, and a table over all ranks."""

from __future__ import annotations

import cProfile
import io
import marshal
import pstats
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
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

    def statistics(self) -> dict[Any, Any] | None:
        """Returns what was counted, as `pstats` holds it; None if this rank is not profiled."""
        if self._profile is None:
            return None
        self._profile.create_stats()
        profile: Any = self._profile
        statistics: dict[Any, Any] = profile.stats
        return statistics


def write_profile(directory: Path, rank: int, statistics: Any) -> None:
    """Writes the profile of a rank, which pstats and its viewers open.

    Args:
        directory: The run's directory.
        rank: The rank.
        statistics: `CallProfile.statistics`.
    """
    folder = directory / DIRECTORY
    folder.mkdir(exist_ok=True)
    (folder / f"rank-{rank:04d}.prof").write_bytes(marshal.dumps(statistics))


def merge_profiles(one: dict[Any, Any], other: dict[Any, Any]) -> dict[Any, Any]:
    """Returns the sums of two profiles; neither of them can be used any longer."""
    merged: Any = pstats.Stats(_Counted(one)).add(_Counted(other))
    statistics: dict[Any, Any] = merged.stats
    return statistics


def write_profile_table(directory: Path, statistics: dict[Any, Any]) -> None:
    """Writes a table of the functions with the longest own time.

    Args:
        directory: The run's directory, in which there is a profile already.
        statistics: The profiles of all ranks, merged.
    """
    text = io.StringIO()
    stats = pstats.Stats(_Counted(statistics), stream=text)
    stats.sort_stats("tottime").print_stats(NUM_ROWS)
    (directory / DIRECTORY / TABLE).write_text(text.getvalue(), encoding="utf-8")


class _Counted(cProfile.Profile):
    """A profile with given counts, in the form in which `pstats.Stats` takes them."""

    def __init__(self, statistics: dict[Any, Any]) -> None:
        super().__init__()
        self.stats = statistics

    def create_stats(self) -> None:
        """Does nothing: the counts are complete."""
