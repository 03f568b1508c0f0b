"""What takes the time, at which scale, and what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from candle_p1.reports.findings.advice import advice
from candle_p1.reports.findings.phrases import names, on_ranks
from candle_p1.reports.quantities import PARTS, share_of
from candle_p1.reports.words import percent
from candle_p1.text import count

if TYPE_CHECKING:
    from candle_p1.reports.points import Experiment, Point, Series


def dominating_part(point: Point) -> tuple[str, float]:
    """Returns the part that takes the most time, and its share: medians over the runs."""
    shares = {part: point.estimate(share_of(part)) for part in PARTS}
    known = {part: share.value for part, share in shares.items() if share is not None}
    part = max(known, key=lambda name: known[name])
    return part, known[part]


def dominates(experiment: Experiment) -> list[str]:
    """Says what takes the most time, at which scale; series that agree share a sentence."""
    alike: dict[tuple[tuple[str, tuple[int, ...]], ...], list[Series]] = {}
    for series in experiment.series:
        scales: dict[str, list[int]] = {}
        for point in series.timed:
            scales.setdefault(dominating_part(point)[0], []).append(point.num_ranks)
        if scales:
            key = tuple((part, tuple(counts)) for part, counts in scales.items())
            alike.setdefault(key, []).append(series)
    sentences = []
    for scales_of, members in alike.items():
        parts = [_part_words(part, counts, members) for part, counts in scales_of]
        sentences.append(f"{names(members)}: the largest part of the time is {', '.join(parts)}.")
    return sentences


def what_to_change(experiment: Experiment) -> list[str]:
    """Says what would shorten the runs on the most ranks."""
    seen: dict[str, list[Series]] = {}
    for series in experiment.series:
        if series.timed:
            part, _ = dominating_part(series.timed[-1])
            seen.setdefault(advice(experiment, series, part), []).append(series)
    return [
        f"{names(members)}, {on_ranks(sorted({each.timed[-1].num_ranks for each in members}))}:"
        f" {text}"
        for text, members in seen.items()
    ]


def _part_words(part: str, counts: tuple[int, ...], members: list[Series]) -> str:
    """Returns "data loading on 2 and 4 ranks (51 to 60 % of the total time, 6 runs)"."""
    points = [point for each in members for num in counts if (point := each.at(num))]
    shares = [dominating_part(point)[1] for point in points]
    num_runs = sum(len(point.runs) for point in points)
    low, high = percent(min(shares)), percent(max(shares))
    span = low if low == high else f"{low.removesuffix(' %')} to {high}"
    return f"{part} {on_ranks(counts)} ({span} of the total time, {count(num_runs, 'run')})"
