"""Statements about an experiment, and what finds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from candle_p1.reports.words import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from candle_p1.reports.points import Experiment, Series

MAX_SENTENCES = 6
"""Of one kind about one experiment; its table has the others."""


@dataclass(frozen=True)
class Statement:
    """What the records of an experiment say about one thing.

    Attributes:
        what: What it is about.
        table: The last part of the slug of the table that has its numbers.
        sentences: What the records show.
        published: What the paper says of the same.
        lacking: What could not be said and for lack of which data; "" is nothing.
        is_headline: Whether it belongs into the summary.
    """

    what: str
    table: str
    sentences: tuple[str, ...]
    published: tuple[str, ...]
    lacking: str
    is_headline: bool


@dataclass(frozen=True)
class Finder:
    """A kind of statement.

    Attributes:
        what: What it is about.
        table: The last part of the slug of the table that has its numbers.
        find: Yields sentences; raises MissingDataError where the records lack what they need.
        published: Quantities of which the paper's values belong to it.
        is_headline: Whether it belongs into the summary.
    """

    what: str
    table: str
    find: Callable[[Experiment], Iterator[str]]
    published: tuple[str, ...] = ()
    is_headline: bool = False


def others(num: int) -> Iterator[str]:
    """Yields how many more sentences there would be, of so many in all."""
    if num > MAX_SENTENCES:
        yield f"The table has {num - MAX_SENTENCES} more."


def workers(counts: Sequence[int]) -> str:
    """Returns "1 worker", "2 and 4 workers"."""
    return f"{listed(counts)} worker{'s' * (list(counts) != [1])}"


def names(series: Sequence[Series]) -> str:
    """Returns the names of series, or their number where there are many."""
    if len(series) > MAX_SENTENCES:
        return f"{len(series)} series"
    return "; ".join(each.name for each in series)
