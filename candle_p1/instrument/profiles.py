"""Profiles of Python calls: one per rank, and a table over all ranks."""

from __future__ import annotations

import cProfile
import io
import marshal
import pstats
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NUM_ROWS = 60
DIRECTORY = "profile"
TABLE = "top.txt"


class CallProfile:
    """Profiles the Python calls of this rank's main thread; does nothing if it is not wanted."""

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
    """Writes `CallProfile.statistics` into a run's directory, as pstats and its viewers read it."""
    folder = directory / DIRECTORY
    folder.mkdir(exist_ok=True)
    (folder / f"rank-{rank:04d}.prof").write_bytes(marshal.dumps(statistics))


def merge_profiles(one: dict[Any, Any], other: dict[Any, Any]) -> dict[Any, Any]:
    """Returns the sums of two profiles; neither of them can be used any longer."""
    merged: Any = pstats.Stats(_counted(one)).add(_counted(other))
    statistics: dict[Any, Any] = merged.stats
    return statistics


def write_profile_table(directory: Path, statistics: dict[Any, Any]) -> None:
    """Writes a table of the functions with the longest own time, from all ranks' merged profiles.

    There is a profile in the run's directory already.
    """
    text = io.StringIO()
    stats = pstats.Stats(_counted(statistics), stream=text)
    stats.sort_stats("tottime").print_stats(NUM_ROWS)
    (directory / DIRECTORY / TABLE).write_text(text.getvalue(), encoding="utf-8")


def _counted(statistics: dict[Any, Any]) -> Any:
    """Returns a profile with these counts, in the form in which `pstats.Stats` takes it."""
    return SimpleNamespace(stats=statistics, create_stats=lambda: None)
