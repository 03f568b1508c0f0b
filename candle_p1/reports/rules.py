"""What the records of an experiment show: rules, and what they refuse.

A rule looks at the runs of an experiment and yields claims: sentences, and whether a 95 % interval
supports them. What is not supported is inconclusive; where the records lack what a rule needs, it
raises MissingDataError, which says what is missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import pandas as pd

from candle_p1.reports import experiments as ex
from candle_p1.reports import gains
from candle_p1.reports import statistics as stat
from candle_p1.reports.experiments import Experiment, Point, Quantity, Series, describe
from candle_p1.reports.frame import BATCH, LOADING, STRONG, TRAINING, WAITING, MissingDataError, Run
from candle_p1.reports.gains import Improvement, improvements
from candle_p1.reports.published import published as published_about
from candle_p1.reports.published import published_epochs
from candle_p1.reports.statistics import contents, listed
from candle_p1.text import count

MAX_SENTENCES = MAX_NAMES = 6
"""The number of sentences of one kind about one experiment, if a table has the others."""

IN_TABLES = ("improvement", "other-improvement")
"""The topics whose tables have a row for each sentence."""

Claim = tuple[bool, str]
"""Whether a 95 % interval supports it, and its sentence, without a full stop."""

SLOW_LOADERS = ("original", "chunked", "chunked_rows", "dask", "arrow", "polars")
"""With these, every rank reads the whole file."""


class Finding(NamedTuple):
    """What the records of an experiment say about one thing.

    Attributes:
        topic: The slug of the topic whose table has the numbers.
        sentences: What the records show.
        published: What the paper says about the same.
        inconclusive: What the records show without significance.
        missing: What could not be said and which data are missing; "" where nothing is.
    """

    title: str
    topic: str
    sentences: tuple[str, ...]
    published: tuple[str, ...]
    inconclusive: tuple[str, ...]
    missing: str


def find(experiment: Experiment) -> list[Finding]:
    """Returns what the records of an experiment show, and what they do not allow one to say."""
    return [_apply(experiment, **rule) for rule in contents()["rules"]]


def _apply(
    experiment: Experiment, claims: str, title: str, topic: str, published: Sequence[str] = ()
) -> Finding:
    sure: list[str] = []
    unsure: list[str] = []
    missing = ""
    try:
        for holds, sentence in CLAIMS[claims](experiment):
            (sure if holds else unsure).append(sentence)
        missing = "" if sure or unsure else "no runs can be compared"
    except MissingDataError as error:
        missing = str(error)
    if topic in IN_TABLES and (more := len(sure) - MAX_SENTENCES) > 0:
        sure = [*sure[:MAX_SENTENCES], f"the table has {more} more"]
    names = tuple(series.name for series in experiment.series)
    sentences = tuple(
        f"{text if text.startswith(names) else text[0].upper() + text[1:]}." for text in sure
    )
    told = tuple(map(str, published_about(experiment, *published))) if sure else ()
    return Finding(title, topic, sentences, told, tuple(unsure[:MAX_SENTENCES]), missing)


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
    return f"{verb} by {stat.number(change.value)} % ({stat.interval(change, of)}) {where}"


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
    parts = ex.time_parts(point.runs)
    largest = parts.idxmax(axis=1).unique()
    shares = parts[largest[0]] / parts.sum(axis=1)
    return (largest[0], shares.median()) if len(largest) == 1 and shares.notna().any() else None


def _part_words(part: str, counts: tuple[int, ...], members: list[Series]) -> str:
    """Returns "data loading on 2 and 4 ranks (51 to 60 % of the total time, 6 runs)"."""
    points = [point for each in members for num in counts if (point := each.at(num))]
    shares = [found[1] for point in points if (found := _dominating_part(point))]
    num_runs = sum(len(point.runs) for point in points)
    low, high = stat.percent(min(shares)), stat.percent(max(shares))
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
    times = [times for point in series.timed if (times := point.positive(ex.TOTAL))]
    trained, needed = runs[0]["epochs_per_rank"] or 0, published_epochs(experiment)
    gain = stat.estimate_ratio(times[-2], times[-1]) if len(times) > 1 else None
    if experiment.mode != STRONG:
        kind = "weak"
    elif all(map(_uses_all_cores, runs)):
        kind = "all_cores"
    elif gain is None:
        kind = "one_size"
    elif gain.low <= 1:
        words = {"factor": stat.number(gain.value), "interval": stat.interval(gain)}
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
    for each in improvements(series, other, ex.TOTAL):
        if each.percent.excludes(0) and each.num_ranks in (series.timed[-1].num_ranks, None):
            return f"here the total time {gained(each)}"
    return "its effect here is not significant, or was measured in too few runs"


def _improvement(experiment: Experiment, *, quantity: Quantity, of_method: bool) -> Iterator[Claim]:
    if quantity is ex.ENERGY:
        parts = ex.covered(experiment.runs)
        if not parts:
            raise MissingDataError("energy was not measured in any run")
        if len(parts) > 1:
            told = "; ".join(parts)
            raise MissingDataError(f"energies cover different parts of the machine: {told}")
        quantity = ex.labelled(quantity, experiment.runs)
    pairs = gains.pairs(experiment, {of_method})
    if not pairs:
        raise MissingDataError(gains.NO_METHOD_PAIR if of_method else gains.NO_OTHER_PAIR)
    found_of = {pair: found for pair in pairs if (found := improvements(*pair, quantity))}
    if not found_of:
        raise MissingDataError(
            f"the series to compare have no runs with {quantity.title} on the same number of ranks"
        )
    for pair, found in found_of.items():
        sure = [each for each in found if each.percent.excludes(0)]
        alone = [each for each in sure or found if each.num_ranks]
        alone.sort(key=lambda each: each.percent.value)
        parts = [gained(each) for each in sure or found if each.num_ranks is None]
        parts += ["at best, " * (len(alone) > 1) + gained(each) for each in alone[-1:]]
        compared = f"{quantity.title} of {pair.other.name} compared with {pair.base.name}"
        yield bool(sure), f"{compared}: {'; '.join(parts)}"


def _batch_strategies(experiment: Experiment) -> Iterator[Claim]:
    if experiment.mode != BATCH or "batch_scaling" not in experiment.varied:
        raise MissingDataError("no runs differ in --batch_scaling")
    for num_ranks in experiment.rank_counts:
        if num_ranks > 1:
            name = ex.merit(experiment.runs)
            if name and not experiment.limits:
                yield from _first(experiment, num_ranks, ex.quality_on_test(name))
            yield from _first(experiment, num_ranks, ex.TOTAL)


def _first(experiment: Experiment, num_ranks: int, quantity: Quantity) -> Iterator[Claim]:
    """Yields which series is first on a number of ranks, and how far ahead of the next."""
    is_time = quantity is ex.TOTAL
    runs_of: dict[str, list[pd.DataFrame]] = defaultdict(list)
    for series in experiment.series:
        settings = series.settings if is_time else gains.about_quality(series.settings)
        point = series.at(num_ranks)
        if point is not None:
            runs_of[series.name if is_time else describe(settings)].append(point.runs)
    ranking: list[tuple[float, str, list[float]]] = []
    num_without = 0
    for name, frames in runs_of.items():
        runs = pd.concat(frames)
        values = ex.known(runs, quantity)
        num_without += len(runs) - len(values)
        values = [value for value in values if value > ex.MIN_IN_RATIO]
        values = values if is_time else gains.of_each_seed(runs, quantity)
        if values:
            ranking.append((median(values), name, values))
    if len(ranking) < 2:
        return
    more = not is_time and ex.more_is_better(quantity.name.removeprefix("test_"))
    ranking.sort(key=lambda each: each[0], reverse=more)
    (value, first, values_first), (next_value, second, values_second) = ranking[:2]
    if is_time:
        ahead = stat.estimate_ratio(values_second, values_first)
    else:
        ahead = stat.estimate_difference(values_first, values_second)
    unit = f" {quantity.unit}" if quantity.unit else ""
    most, kind = ("shortest", "factor") if is_time else ("best", "difference")
    without = f". Left out: {count(num_without, 'run')} without a number" if num_without else ""
    best = f"{first} has the {most} {quantity.title}, {stat.number(value)}{unit}"
    following = (
        f"the next is {second} with {stat.number(next_value)}{unit}, a {kind} of {_told(ahead)}"
    )
    told = f"{on_ranks([num_ranks])}, {best}; {following}{without}"
    yield ahead.excludes(1 if is_time else 0), told


def _epochs_needed(experiment: Experiment) -> Iterator[Claim]:
    """Yields whether quality is worse below the epochs per rank that the paper found necessary.

    Where the paper names no number, it is compared with that at the largest number of epochs.
    """
    name = ex.merit(experiment.runs)
    if name is None:
        raise MissingDataError(ex.NOT_EVALUATED)
    if experiment.limits:
        raise MissingDataError("the steps of the runs are limited")
    diverged = ex.num_diverged(experiment.runs, name)
    if diverged:
        raise MissingDataError(
            f"the models of {count(diverged, 'run')} diverged (their {name} is not a number),"
            " and the others alone would look too good"
        )
    needed = published_epochs(experiment)
    missing = []
    trained: set[int] = set()
    for quantity in ex.qualities(name):
        for group in gains.epoch_groups(experiment, quantity):
            label = f"{quantity.title} of {group.name}" if group.name else quantity.title
            enough = max(group.by_epochs) if needed is None else needed
            drops = gains.accuracy_drops(group, enough, ex.more_is_better(name))
            if not drops:
                trained.update(group.by_epochs)
            elif not any(each.difference.is_confident for each in drops):
                missing.append(f"{label}: too few runs for a 95 % interval")
            else:
                more, below = ex.more_is_better(name), f"below {enough} epochs per rank"
                is_sure, verdict = _verdict(drops, below, more, is_told=bool(needed))
                yield is_sure, f"{label} {verdict}"
    if trained:
        enough_words = f"with {needed} epochs per rank or more" if needed else "with more epochs"
        missing.append(
            f"this needs runs {enough_words} and otherwise identical runs with fewer; there are"
            f" runs with {listed(sorted(trained))}"
        )
    if missing:
        raise MissingDataError("; ".join(missing))


def _verdict(
    drops: Sequence[gains.AccuracyDrop], below: str, more_is_better: bool, *, is_told: bool
) -> tuple[bool, str]:
    """Returns whether a comparison with enough epochs has a result, and what it is.

    Says also whether the paper agrees, if it tells how many epochs are needed.
    """
    falls, fall = ("falls", "fall") if more_is_better else ("rises", "rise")
    agrees, differs = (", as published", ", contrary to the paper") if is_told else ("", "")
    nearest, least = drops[0], drops[-1]
    worst = next((each for each in drops if each.is_drop), None)
    at_nearest = f"at {nearest.epochs}, the difference is {_told(nearest.difference)}"
    if worst:
        by = f"at {worst.epochs} by {_told(worst.difference.map(abs))}"
        if worst is nearest:
            return True, f"{falls} {below}{agrees}: {by}"
        if nearest.is_excluded:
            return True, f"{falls}, but not immediately {below}{differs}: {by}; {at_nearest}"
        return True, f"{falls} {below}{agrees}: {by}; {at_nearest}, which is inconclusive"
    also = f"; at {least.epochs}, {_told(least.difference)}" if least is not nearest else ""
    if not all(each.is_excluded for each in drops):
        return False, f"may or may not {fall} {below}: {at_nearest}{also}"
    threshold = gains.DROP_THRESHOLD if more_is_better else stat.percent(gains.DROP_THRESHOLD)
    return True, f"does not {fall} by {threshold} or more {below}{differs}: {at_nearest}{also}"


def _told(estimate: stat.Estimate) -> str:
    return f"{stat.number(estimate.value)} ({stat.interval(estimate)})"


CLAIMS: dict[str, Callable[[Experiment], Iterable[Claim]]] = {
    "dominating_parts": dominating_parts,
    "time_of_method": partial(_improvement, quantity=ex.TOTAL, of_method=True),
    "time_of_others": partial(_improvement, quantity=ex.TOTAL, of_method=False),
    "energy_of_method": partial(_improvement, quantity=ex.ENERGY, of_method=True),
    "energy_of_others": partial(_improvement, quantity=ex.ENERGY, of_method=False),
    "epochs_needed": _epochs_needed,
    "batch_strategies": _batch_strategies,
    "what_to_change": what_to_change,
}
"""What yields what the records show; raises MissingDataError where they lack what it needs."""
