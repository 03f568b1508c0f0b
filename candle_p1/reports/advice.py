"""What takes the time, at which scale, and what to change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from candle_p1.reports.columns import TOTAL, time_parts
from candle_p1.reports.experiments import Experiment, Point, Series
from candle_p1.reports.frame import LOADING, STRONG, TRAINING, WAITING, MissingDataError, Run
from candle_p1.reports.published import published_epochs
from candle_p1.reports.speed import Improvement, improvements
from candle_p1.reports.statistics import estimate_ratio
from candle_p1.reports.words import contents, interval, listed, number, percent
from candle_p1.text import count

Claim = tuple[bool, str]
"""Whether a 95 % interval supports it, and its sentence, without a full stop."""

MAX_NAMES = 6
SLOW_LOADERS = ("original", "chunked", "chunked_rows", "dask", "arrow", "polars")
"""With these, every rank reads the whole file."""


def on_ranks(counts: Sequence[int]) -> str:
    """Returns "on 1 rank" or "on 2 and 4 ranks"."""
    return f"on {listed(counts)} rank{'s' * (list(counts) != [1])}"


def gained(gain: Improvement) -> str:
    """Returns "improved by 40.0 % (…) on 4 ranks" or "worsened by …", with the interval."""
    verb, change = "improved", gain.percent
    if change.value < 0:
        verb, change = "worsened", change.map(lambda value: -value)
    where = on_ranks([gain.num_ranks]) if gain.num_ranks else "over all numbers of ranks"
    of = "run" if gain.num_ranks else "pair"
    return f"{verb} by {number(change.value)} % ({interval(change, of)}) {where}"


def dominating_parts(experiment: Experiment) -> Iterator[Claim]:
    """Yields what takes the most time, at which scale; series that agree share a sentence.

    Raises:
        MissingDataError: Runs of a point disagree.
    """
    mixed: list[str] = []
    alike: dict[tuple[tuple[str, tuple[int, ...]], ...], list[Series]] = {}
    for series in experiment.series:
        scales: dict[str, list[int]] = {}
        for point in series.timed:
            found = _dominating_part(point)
            if found:
                scales.setdefault(found[0], []).append(point.num_ranks)
            else:
                mixed.append(f"{series.name} {on_ranks([point.num_ranks])}")
        if scales:
            key = tuple((part, tuple(counts)) for part, counts in scales.items())
            alike.setdefault(key, []).append(series)
    for scales_of, members in alike.items():
        parts = [_part_words(part, counts, members) for part, counts in scales_of]
        yield True, f"{_names(members)}: the largest part of the time is {', '.join(parts)}"
    if mixed:
        raise MissingDataError(
            f"the largest part differs between runs: {'; '.join(mixed[:MAX_NAMES])}"
        )


def what_to_change(experiment: Experiment) -> Iterator[Claim]:
    """Yields what would shorten the runs on the most ranks."""
    seen: dict[str, list[Series]] = {}
    for series in experiment.series:
        found = _dominating_part(series.timed[-1]) if series.timed else None
        if found:
            seen.setdefault(_advice(experiment, series, found[0]), []).append(series)
    for advice, members in seen.items():
        ranks = on_ranks(sorted({each.timed[-1].num_ranks for each in members}))
        yield True, f"{_names(members)}, {ranks}: {advice}"


def _names(series: Sequence[Series]) -> str:
    if len(series) > MAX_NAMES:
        return f"{len(series)} series"
    return "; ".join(each.name for each in series)


def _dominating_part(point: Point) -> tuple[str, float] | None:
    """Returns the part that takes the most time in every run, with its median share.

    None where that is not the same part in all runs.
    """
    parts = time_parts(point.runs)
    largest = parts.idxmax(axis=1).unique()
    shares = parts[largest[0]] / parts.sum(axis=1)
    return (largest[0], shares.median()) if len(largest) == 1 and shares.notna().any() else None


def _part_words(part: str, counts: tuple[int, ...], members: list[Series]) -> str:
    """Returns "data loading on 2 and 4 ranks (51 to 60 % of the total time, 6 runs)"."""
    points = [point for each in members for num in counts if (point := each.at(num))]
    shares = [found[1] for point in points if (found := _dominating_part(point))]
    num_runs = sum(len(point.runs) for point in points)
    low, high = percent(min(shares)), percent(max(shares))
    span = low if low == high else f"{low.removesuffix(' %')} to {high}"
    return f"{part} {on_ranks(counts)} ({span} of the total time, {count(num_runs, 'run')})"


def _advice(experiment: Experiment, series: Series, part: str) -> str:
    if part == TRAINING:
        return _about_training(experiment, series)
    loader = series.timed[-1].runs["loader"].iloc[0]
    if part in (LOADING, WAITING) and loader in SLOW_LOADERS:
        gain = _measured_gain(experiment, series)
        return f"use --loader parallel, which reads every byte once per job; {gain}"
    advice = contents()["advice"]
    return str(advice.get(part) or advice.get(loader) or advice["cached"])


def _about_training(experiment: Experiment, series: Series) -> str:
    runs: list[Run] = list(series.timed[-1].runs["run"])
    times = [times for point in series.timed if (times := point.positive(TOTAL))]
    trained, needed = runs[0]["epochs_per_rank"] or 0, published_epochs(experiment)
    gain = estimate_ratio(times[-2], times[-1]) if len(times) > 1 else None
    if experiment.mode != STRONG:
        kind = "weak"
    elif all(map(_uses_all_cores, runs)):
        kind = "all_cores"
    elif gain is None:
        kind = "one_size"
    elif gain.low <= 1:
        words = {"factor": number(gain.value), "interval": interval(gain)}
        return str(contents()["training"]["no_gain"].format(**words))
    elif not needed or runs[0]["settings"].get("data_parallel") == "batch_step":
        kind = "gains"
    else:
        kind = "few_epochs" if trained < needed else "enough_epochs"
    return str(contents()["training"][kind].format(trained=trained, needed=needed))


def _uses_all_cores(run: Run) -> bool:
    """Returns whether a run had one node, computed on CPUs, and had a thread for each core."""
    ranks = run.record.ranks or ()
    if run["devices"] != "cpu" or len({rank.host for rank in ranks}) > 1:
        return False
    return bool(sum(rank.threads for rank in ranks) >= run["num_cores"])


def _measured_gain(experiment: Experiment, series: Series) -> str:
    settings = {**series.settings, "loader": "parallel"}
    other = next((each for each in experiment.series if each.settings == settings), None)
    if other is None:
        return "its effect was not measured here"
    for each in improvements(series, other, TOTAL):
        if each.percent.excludes(0) and each.num_ranks in (series.timed[-1].num_ranks, None):
            return f"here the total time {gained(each)}"
    return "its effect here is not significant, or was measured in too few runs"
