"""What the records of an experiment show: rules, and what they refuse.

A rule looks at the runs of an experiment and yields claims: sentences, and whether a 95 % interval
supports them. What is not supported is inconclusive; where the records lack what a rule needs, it
raises MissingDataError, which says what is missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import median

import pandas as pd

from candle_p1.reports import columns, quality, speed
from candle_p1.reports.advice import Claim, dominating_parts, gained, on_ranks, what_to_change
from candle_p1.reports.columns import ENERGY, EPOCH, TOTAL, Quantity
from candle_p1.reports.experiments import MIN_IN_RATIO, Experiment, describe
from candle_p1.reports.frame import BATCH, MissingDataError
from candle_p1.reports.published import (
    METHOD_LOADER,
    ORIGINAL_LOADER,
    PAPER_LOADERS,
    published,
    published_epochs,
)
from candle_p1.reports.speed import FileLoad, file_loads, largest_files
from candle_p1.reports.statistics import Estimate, estimate_difference, estimate_ratio
from candle_p1.reports.words import contents, interval, listed, number, percent
from candle_p1.text import count

MAX_SENTENCES = 6
"""The number of sentences of one kind about one experiment; its table has the others."""

COMPARED_ELSEWHERE = {"loader", "load_threads", "staged", "kernels", "epochs"}


@dataclass(frozen=True)
class Rule:
    """A kind of finding; contents.toml explains its fields. `claims` is a key of CLAIMS."""

    claims: str
    title: str
    topic: str
    published: Sequence[str] = ()
    is_headline: bool = False
    in_table: bool = False


@dataclass(frozen=True)
class Finding:
    """What the records of an experiment say about one thing.

    Attributes:
        sentences: What the records show.
        published: What the paper says about the same.
        inconclusive: What the records show without significance.
        missing: What could not be said and which data are missing; "" where nothing is.
    """

    rule: Rule
    sentences: tuple[str, ...]
    published: tuple[str, ...]
    inconclusive: tuple[str, ...]
    missing: str


def find(experiment: Experiment) -> list[Finding]:
    """Returns what the records of an experiment show, and what they do not allow one to say."""
    return [_apply(rule, experiment) for rule in RULES]


def _apply(rule: Rule, experiment: Experiment) -> Finding:
    sure: list[str] = []
    unsure: list[str] = []
    missing = ""
    try:
        for holds, sentence in CLAIMS[rule.claims](experiment):
            (sure if holds else unsure).append(sentence)
        missing = "" if sure or unsure else "no runs can be compared"
    except MissingDataError as error:
        missing = str(error)
    more = len(sure) - MAX_SENTENCES
    if rule.in_table and more > 0:
        sure = [*sure[:MAX_SENTENCES], f"the table has {more} more"]
    names = tuple(series.name for series in experiment.series)
    sentences = tuple(
        f"{text if text.startswith(names) else text[0].upper() + text[1:]}." for text in sure
    )
    told = tuple(map(str, published(experiment, *rule.published))) if sure else ()
    return Finding(rule, sentences, told, tuple(unsure[:MAX_SENTENCES]), missing)


def _improvement(experiment: Experiment, *, quantity: Quantity, of_method: bool) -> Iterator[Claim]:
    if quantity is ENERGY:
        parts = columns.covered(experiment.runs)
        if not parts:
            raise MissingDataError("energy was not measured in any run")
        if len(parts) > 1:
            told = "; ".join(parts)
            raise MissingDataError(f"energies cover different parts of the machine: {told}")
        quantity = columns.labelled(quantity, experiment.runs)
    pairs = speed.pairs(experiment, {of_method})
    if not pairs:
        raise MissingDataError(speed.NO_METHOD_PAIR if of_method else speed.NO_OTHER_PAIR)
    gains = {pair: found for pair in pairs if (found := speed.improvements(*pair, quantity))}
    if not gains:
        raise MissingDataError(
            f"the series to compare have no runs with {quantity.title} on the same number of ranks"
        )
    for pair, found in gains.items():
        sure = [each for each in found if each.percent.excludes(0)]
        alone = [each for each in sure or found if each.num_ranks]
        alone.sort(key=lambda each: each.percent.value)
        parts = [gained(each) for each in sure or found if each.num_ranks is None]
        parts += ["at best, " * (len(alone) > 1) + gained(each) for each in alone[-1:]]
        compared = f"{quantity.title} of {pair.other.name} compared with {pair.base.name}"
        yield bool(sure), f"{compared}: {'; '.join(parts)}"


def _epoch_growth(experiment: Experiment) -> Iterator[Claim]:
    of_series = {e.name: speed.speedups(experiment, e, EPOCH) for e in experiment.series}
    last_of = {name: found[-1] for name, found in of_series.items() if found}
    if not last_of:
        raise MissingDataError("no series was run on two numbers of ranks")
    for name, last in last_of.items():
        growth = last.speedup.map(lambda factor: 1 / factor)
        told = (
            f"{name}: {on_ranks([last.point.num_ranks])}, an epoch takes {number(growth.value)}"
            f" times as long ({interval(growth)}) as the {number(last.base_s)} s"
            f" {on_ranks([last.base.num_ranks])}"
        )
        apart = f"; {last.compiled_apart}" if last.compiled_apart else ""
        yield last.speedup.excludes(1), told + apart


def _method_loading(experiment: Experiment) -> Iterator[Claim]:
    if not experiment.loaders.issuperset(PAPER_LOADERS):
        raise MissingDataError(f"no runs used --loader {' and '.join(PAPER_LOADERS)}")
    return _loading(experiment, ORIGINAL_LOADER, {METHOD_LOADER})


def _other_loading(experiment: Experiment) -> Iterator[Claim]:
    others = experiment.loaders.difference(PAPER_LOADERS)
    if not others:
        raise MissingDataError("no run used another loader than the paper's")
    if experiment.loaders.isdisjoint(PAPER_LOADERS):
        raise MissingDataError(f"no run used --loader {' or '.join(PAPER_LOADERS)}")
    return chain.from_iterable(_loading(experiment, base, others) for base in PAPER_LOADERS)


def _loading(experiment: Experiment, base: str, others: Collection[str]) -> Iterator[Claim]:
    loads_of: dict[str, list[FileLoad]] = defaultdict(list)
    for load in file_loads(experiment, experiment.series):
        loads_of[load.alike].append(load)
    for loads in loads_of.values():
        (largest,) = largest_files(loads, 1)
        of_file = [load for load in loads if (load.role, load.file_mb) == largest]
        counts = sorted({load.num_ranks for load in of_file})
        for num_ranks in dict.fromkeys((counts[0], counts[-1])):
            alike = [load for load in of_file if load.num_ranks == num_ranks]
            first = next((load for load in alike if load.loader == base), None)
            if first:
                yield from _against(first, [load for load in alike if load.loader in others])


def _against(base: FileLoad, others: Sequence[FileLoad]) -> Iterator[Claim]:
    factors: dict[bool, list[str]] = {True: [], False: []}
    for load in others:
        ratio, word = estimate_ratio(base.seconds, load.seconds), "faster"
        if ratio.value < 1:
            ratio, word = ratio.map(lambda factor: 1 / factor), "slower"
        told = f"{load.method} is {word} by a factor of {_told(ratio)}"
        factors[ratio.excludes(1)].append(told)
    told = (
        f"{on_ranks([base.num_ranks])}, loading the {base.role} file ({number(base.file_mb)} MB)"
        f" takes {number(base.estimate.value)} s with {base.method}"
    )
    yield from ((sure, f"{told}; {', '.join(each)}") for sure, each in factors.items() if each)


def _batch_strategies(experiment: Experiment) -> Iterator[Claim]:
    if experiment.mode != BATCH or "batch_scaling" not in experiment.varied:
        raise MissingDataError("no runs differ in --batch_scaling")
    for num_ranks in experiment.rank_counts:
        if num_ranks > 1:
            yield from _best_and_fastest(experiment, num_ranks)


def _other_settings(experiment: Experiment) -> Iterator[Claim]:
    elsewhere = COMPARED_ELSEWHERE | ({"batch_scaling"} if experiment.mode == BATCH else set())
    if elsewhere.issuperset(experiment.varied):
        raise MissingDataError("no other setting was varied")
    yield from _best_and_fastest(experiment, experiment.rank_counts[-1])


def _best_and_fastest(experiment: Experiment, num_ranks: int) -> Iterator[Claim]:
    name = columns.merit(experiment.runs)
    if name and not experiment.limits:
        yield from _first(experiment, num_ranks, columns.quality_on_test(name))
    yield from _first(experiment, num_ranks, TOTAL)


def _first(experiment: Experiment, num_ranks: int, quantity: Quantity) -> Iterator[Claim]:
    """Yields which series is first on a number of ranks, and how far ahead of the next."""
    is_time = quantity is TOTAL
    runs_of: dict[str, list[pd.DataFrame]] = defaultdict(list)
    for series in experiment.series:
        settings = series.settings if is_time else quality.about_quality(series.settings)
        point = series.at(num_ranks)
        if point is not None:
            runs_of[series.name if is_time else describe(settings)].append(point.runs)
    ranking: list[tuple[float, str, list[float]]] = []
    num_without = 0
    for name, frames in runs_of.items():
        runs = pd.concat(frames)
        values = columns.known(runs, quantity)
        num_without += len(runs) - len(values)
        values = [value for value in values if value > MIN_IN_RATIO]
        values = values if is_time else quality.of_each_seed(runs, quantity)
        if values:
            ranking.append((median(values), name, values))
    if len(ranking) < 2:
        return
    more = not is_time and columns.more_is_better(quantity.name.removeprefix("test_"))
    ranking.sort(key=lambda each: each[0], reverse=more)
    (value, first, values_first), (next_value, second, values_second) = ranking[:2]
    if is_time:
        ahead = estimate_ratio(values_second, values_first)
    else:
        ahead = estimate_difference(values_first, values_second)
    unit = f" {quantity.unit}" if quantity.unit else ""
    most, kind = ("shortest", "factor") if is_time else ("best", "difference")
    without = f". Left out: {count(num_without, 'run')} without a number" if num_without else ""
    best = f"{first} has the {most} {quantity.title}, {number(value)}{unit}"
    following = f"the next is {second} with {number(next_value)}{unit}, a {kind} of {_told(ahead)}"
    told = f"{on_ranks([num_ranks])}, {best}; {following}{without}"
    yield ahead.excludes(1 if is_time else 0), told


def _epochs_needed(experiment: Experiment) -> Iterator[Claim]:
    """Yields whether quality is worse below the epochs per rank that the paper found necessary.

    Where the paper names no number, it is compared with that at the largest number of epochs.
    """
    name = columns.merit(experiment.runs)
    if name is None:
        raise MissingDataError(columns.NOT_EVALUATED)
    if experiment.limits:
        raise MissingDataError("the steps of the runs are limited")
    diverged = columns.num_diverged(experiment.runs, name)
    if diverged:
        raise MissingDataError(
            f"the models of {count(diverged, 'run')} diverged (their {name} is not a number),"
            " and the others alone would look too good"
        )
    needed = published_epochs(experiment)
    missing = []
    trained: set[int] = set()
    for quantity in columns.qualities(name):
        for group in quality.epoch_groups(experiment, quantity):
            label = f"{quantity.title} of {group.name}" if group.name else quantity.title
            enough = max(group.by_epochs) if needed is None else needed
            drops = quality.accuracy_drops(group, enough, columns.more_is_better(name))
            if not drops:
                trained.update(group.by_epochs)
            elif not any(each.difference.is_confident for each in drops):
                missing.append(f"{label}: too few runs for a 95 % interval")
            else:
                more, below = columns.more_is_better(name), f"below {enough} epochs per rank"
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
    drops: Sequence[quality.AccuracyDrop], below: str, more_is_better: bool, *, is_told: bool
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
    threshold = quality.DROP_THRESHOLD if more_is_better else percent(quality.DROP_THRESHOLD)
    return True, f"does not {fall} by {threshold} or more {below}{differs}: {at_nearest}{also}"


def _told(estimate: Estimate) -> str:
    return f"{number(estimate.value)} ({interval(estimate)})"


CLAIMS: dict[str, Callable[[Experiment], Iterable[Claim]]] = {
    "dominating_parts": dominating_parts,
    "time_of_method": partial(_improvement, quantity=TOTAL, of_method=True),
    "time_of_others": partial(_improvement, quantity=TOTAL, of_method=False),
    "energy_of_method": partial(_improvement, quantity=ENERGY, of_method=True),
    "energy_of_others": partial(_improvement, quantity=ENERGY, of_method=False),
    "epochs_needed": _epochs_needed,
    "batch_strategies": _batch_strategies,
    "what_to_change": what_to_change,
    "epoch_growth": _epoch_growth,
    "method_loading": _method_loading,
    "other_loading": _other_loading,
    "other_settings": _other_settings,
}
"""What yields what the records show; raises MissingDataError where they lack what it needs."""

RULES = [Rule(**each) for each in contents()["rules"]]
