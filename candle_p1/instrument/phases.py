"""The phases of a run, timed on each rank with a monotonic clock."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from candle_p1.records import over_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Path = tuple[str, ...]


class PhaseTimer:
    """Times nested phases of one rank.

    ::

        with phases("broadcast"):
            with phases("wait"):
                ...

    Args:
        on_enter: Called with the path of each phase when it begins, e.g. ("broadcast", "wait").
        clock: Returns seconds, monotonic.

    Attributes:
        seconds: The time spent in each phase so far, by path.
        failed_in: The innermost phase an exception has left; () if none has.
    """

    def __init__(
        self,
        on_enter: Callable[[Path], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.seconds: dict[Path, float] = {}
        self._on_enter = on_enter or (lambda path: None)
        self._clock = clock
        self._path: Path = ()
        self.failed_in: Path = ()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Times a phase, within the one now running; a phase entered twice adds up."""
        outer, path = self._path, (*self._path, name)
        self._path = path
        self._on_enter(path)
        start = self._clock()
        try:
            yield
        except BaseException:
            self.failed_in = self.failed_in or path
            raise
        finally:
            self.seconds[path] = self.seconds.get(path, 0.0) + self._clock() - start
            self._path = outer


def summarize_phases(per_rank: Sequence[dict[Path, float]]) -> dict[str, Any]:
    """Returns phases as they stand in a run record, from the `seconds` of every rank.

    A phase that a rank did not enter counts 0 s there.
    """
    summary: dict[str, Any] = {}
    paths = dict.fromkeys(path for seconds in per_rank for path in seconds)
    for path in sorted(
        paths, key=len
    ):  # a phase before its parts; sorted() keeps the order in time
        siblings = summary
        for name in path[:-1]:
            siblings = siblings[name].setdefault("parts", {})
        siblings[path[-1]] = over_ranks([seconds.get(path, 0.0) for seconds in per_rank], "s")
    return summary
