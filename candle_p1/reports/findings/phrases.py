"""Phrases that several findings use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from candle_p1.reports.gains import WORSE
from candle_p1.reports.statistics import NOT_SIGNIFICANT
from candle_p1.reports.words import interval, listed, number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from candle_p1.reports.gains import Improvement
    from candle_p1.reports.points import Series

MAX_SENTENCES = 6
"""The number of sentences of one kind about one experiment; its table has the others."""


def limited(sentences: Sequence[str]) -> list[str]:
    """Returns the first sentences, and one that says how many more there would be."""
    more = len(sentences) - MAX_SENTENCES
    return [*sentences[:MAX_SENTENCES], *([f"The table has {more} more."] if more > 0 else [])]


def on_ranks(counts: Sequence[int]) -> str:
    """Returns "on 1 rank" or "on 2 and 4 ranks"."""
    return f"on {listed(counts)} rank{'s' * (list(counts) != [1])}"


def names(series: Sequence[Series]) -> str:
    """Returns the names of series, or their number where there are many."""
    if len(series) > MAX_SENTENCES:
        return f"{len(series)} series"
    return "; ".join(each.name for each in series)


def gained(gain: Improvement, of: str = "run") -> str:
    """Returns "improved by 40.0 % (…)" or "worsened by …", with the interval and the claim."""
    claim = {WORSE: ": it is worse", NOT_SIGNIFICANT: ": the improvement is not significant"}
    verb, percent = "improved", gain.percent
    if percent.value < 0:
        verb, percent = "worsened", percent.map(lambda value: -value)
    said = f"{interval(percent, of)}{claim.get(gain.verdict, '')}"
    return f"{verb} by {number(percent.value)} % ({said})"
