"""Phrases that several findings use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from candle_p1.reports.gains import SIGNIFICANT, WORSE
from candle_p1.reports.words import interval, listed, number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from candle_p1.reports.gains import Improvement
    from candle_p1.reports.points import Series

MAX_SENTENCES = 6
"""The number of sentences of one kind about one experiment; its table has the others."""


class Inconclusive(str):
    """What a comparison shows that is not significant: no finding, but the reason for none."""

    __slots__ = ()


def limited(sentences: Sequence[str]) -> list[str]:
    """Returns the first findings, and one that says how many more there are, then the others."""
    found = [each for each in sentences if not isinstance(each, Inconclusive)]
    more = len(found) - MAX_SENTENCES
    rest = [f"The table has {more} more."] if more > 0 else []
    return [
        *found[:MAX_SENTENCES],
        *rest,
        *(each for each in sentences if isinstance(each, Inconclusive)),
    ]


def on_ranks(counts: Sequence[int]) -> str:
    """Returns "on 1 rank" or "on 2 and 4 ranks"."""
    return f"on {listed(counts)} rank{'s' * (list(counts) != [1])}"


def names(series: Sequence[Series]) -> str:
    """Returns the names of series, or their number where there are many."""
    if len(series) > MAX_SENTENCES:
        return f"{len(series)} series"
    return "; ".join(each.name for each in series)


def gained(gain: Improvement) -> str:
    """Returns "improved by 40.0 % (…)" or "worsened by …", with the interval."""
    verb, percent = "improved", gain.percent
    if percent.value < 0:
        verb, percent = "worsened", percent.map(lambda value: -value)
    of = "run" if gain.num_ranks else "pair"
    return f"{verb} by {number(percent.value)} % ({interval(percent, of)})"


def at_scale(gain: Improvement) -> str:
    """Returns the scale of an improvement: "on 4 ranks", or "over all numbers of ranks"."""
    return on_ranks([gain.num_ranks]) if gain.num_ranks else "over all numbers of ranks"


def significant(gains: Sequence[Improvement]) -> list[Improvement]:
    """Returns the improvements and the worsenings that are significant."""
    return [each for each in gains if each.verdict in (SIGNIFICANT, WORSE)]
