"""What the records of an experiment show: rules, each with its sentence, and what they refuse.

A rule looks at the runs of an experiment and yields claims: the words of its sentence, and whether
a 95 % interval supports them. What is not supported is inconclusive; where the records lack what a
rule needs, it raises MissingDataError, which says what is missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import pandas as pd

from candle_p1.reports.advice import dominating_parts, gained, on_ranks, what_to_change
from candle_p1.reports.columns import (
    ENERGY,
    EPOCH,
    NOT_EVALUATED,
    TOTAL,
    Quantity,
    covered,
    known,
    labelled,
    merit,
    more_is_better,
    num_diverged,
    qualities,
    quality_on_test,
)
from candle_p1.reports.experiments import MIN_IN_RATIO, describe
from candle_p1.reports.frame import BATCH, STRONG
from candle_p1.reports.missing import MissingDataError
from candle_p1.reports.published import (
    EPOCHS_TOLD,
    METHOD_LOADER,
    ORIGINAL_LOADER,
    published,
    published_epochs,
)
from candle_p1.reports.quality import (
    DROP_THRESHOLD,
    AccuracyDrop,
    about_quality,
    accuracy_drops,
    epoch_groups,
    of_each_seed,
)
from candle_p1.reports.speed import (
    NO_METHOD_PAIR,
    NO_OTHER_PAIR,
    improvements,
    method_pairs,
    other_pairs,
    speedups,
)
from candle_p1.reports.statistics import Estimate, estimate_difference, estimate_ratio
from candle_p1.reports.times import FileLoad, file_loads, largest_files
from candle_p1.reports.words import interval, listed, number, percent
from candle_p1.text import count

if TYPE_CHECKING:
    from candle_p1.reports.experiments import Experiment
    from candle_p1.reports.speed import Speedup

    Claim = tuple[bool, dict[str, str]]
    """Whether it holds, and the words of its sentence."""

MAX_SENTENCES = 6
"""The number of sentences of one kind about one experiment; its table has the others."""

PAPER_LOADERS = (ORIGINAL_LOADER, METHOD_LOADER)
COMPARED_ELSEWHERE = {"loader", "load_threads", "staged", "kernels", "epochs"}


@dataclass(frozen=True)
class Rule:
    """A kind of finding.

    Attributes:
        title: What it is about.
        table: The last part of the slug of the table that has its numbers.
        sentence: The template of its sentences.
        claims: Yields what the records show; raises MissingDataError where they lack what it needs.
        published: The quantities of which the paper's values belong to it.
        is_headline: Whether it belongs in the summary.
        in_table: Whether its table has what more than MAX_SENTENCES sentences would say.
    """

    title: str
    table: str
    sentence: str
    claims: Callable[[Experiment], Iterable[Claim]]
    published: tuple[str, ...] = ()
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
        for holds, words in rule.claims(experiment):
            (sure if holds else unsure).append(rule.sentence.format(**words))
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


def _improvement(experiment: Experiment, quantity: Quantity, table: str) -> Iterator[Claim]:
    """Yields by how much series improve a quantity, if it can be compared."""
    pairs_of, without, _ = PAIRS[table]
    if quantity is ENERGY:
        parts = covered(experiment.runs)
        if not parts:
            raise MissingDataError("energy was not measured in any run")
        if len(parts) > 1:
            raise MissingDataError(
                f"energies cover different parts of the machine: {'; '.join(parts)}"
            )
        quantity = labelled(quantity, experiment.runs)
    pairs = pairs_of(experiment)
    if not pairs:
        raise MissingDataError(without)
    gains = {pair: found for pair in pairs if (found := improvements(*pair, quantity))}
    if not gains:
        raise MissingDataError(
            f"the series to compare have no runs with {quantity.title} on the same number of ranks"
        )
    for pair, found in gains.items():
        sure = [each for each in found if each.percent.excludes(0)]
        together = [each for each in sure or found if each.num_ranks is None]
        alone = [each for each in sure or found if each.num_ranks]
        best = sorted(alone, key=lambda each: each.percent.value)[-1:]
        at_best = "at best, " if len(alone) > 1 else ""
        told = [*map(gained, together), *(f"{at_best}{gained(each)}" for each in best)]
        words = {"quantity": quantity.title, "other": pair.other.name, "base": pair.base.name}
        yield bool(sure), words | {"gains": "; ".join(told)}


def _speed(experiment: Experiment) -> Iterator[Claim]:
    """Yields how much faster the runs on the most ranks are than those on the fewest."""
    what = "speed-up" if experiment.mode == STRONG else "T(base) / T(P)"
    for words, last in _on_most_ranks(experiment, TOTAL):
        also = ""
        if last.efficiency is not None:
            also = f", a scaling efficiency of {number(last.efficiency.value)}"
        if last.base.num_ranks != 1:
            words["base"] += ", because there is no run on 1 rank"
        ratio = _told(last.speedup)
        yield last.speedup.excludes(1), words | {"what": what, "ratio": ratio, "efficiency": also}


def _epoch_growth(experiment: Experiment) -> Iterator[Claim]:
    """Yields how the time per epoch changes with the number of ranks."""
    for words, last in _on_most_ranks(experiment, EPOCH):
        growth = last.speedup.map(lambda ratio: 1 / ratio)
        told = {"factor": number(growth.value), "interval": interval(growth)}
        yield growth.excludes(1), words | told


def _on_most_ranks(
    experiment: Experiment, quantity: Quantity
) -> list[tuple[dict[str, str], Speedup]]:
    """Returns the last speed-up of each series, with its words."""
    of_series = {each.name: speedups(experiment, each, quantity) for each in experiment.series}
    found = []
    for name, last in ((name, each[-1]) for name, each in of_series.items() if each):
        words = {"series": name, "ranks": on_ranks([last.point.num_ranks])}
        words |= {"base_s": number(last.base_s), "base": on_ranks([last.base.num_ranks])}
        found.append(
            (words | {"apart": "; ".join(["", *filter(None, [last.compiled_apart])])}, last)
        )
    if not found:
        raise MissingDataError("no series was run on two numbers of ranks")
    return found


def _loading(
    experiment: Experiment, bases: Collection[str], others: Collection[str]
) -> Iterator[Claim]:
    """Yields how loaders compare with others, on the fewest and on the most ranks."""
    for base in bases:
        loads = file_loads(experiment, experiment.series)
        for alike in dict.fromkeys(load.alike for load in loads):
            of_files = [load for load in loads if load.alike == alike]
            (largest,) = largest_files(of_files, 1)
            of_file = [load for load in of_files if (load.role, load.file_mb) == largest]
            counts = sorted({load.num_ranks for load in of_file})
            for num_ranks in dict.fromkeys((counts[0], counts[-1])):
                alike_runs = [load for load in of_file if load.num_ranks == num_ranks]
                first = next((load for load in alike_runs if load.loader == base), None)
                if first:
                    yield from _against(first, [e for e in alike_runs if e.loader in others])


def _against(base: FileLoad, others: Sequence[FileLoad]) -> Iterator[Claim]:
    """Yields how loads of one file on one number of ranks compare with another one."""
    words = {
        "ranks": on_ranks([base.num_ranks]),
        "role": base.role,
        "mb": number(base.file_mb),
        "seconds": number(base.estimate.value),
        "method": base.method,
    }
    factors: dict[bool, list[str]] = {True: [], False: []}
    for load in others:
        ratio, word = estimate_ratio(base.seconds, load.seconds), "faster"
        if ratio.value < 1:
            ratio, word = ratio.map(lambda factor: 1 / factor), "slower"
        told = f"{load.method} is {word} by a factor of {_told(ratio)}"
        factors[ratio.excludes(1)].append(told)
    yield from ((sure, words | {"factors": ", ".join(f)}) for sure, f in factors.items() if f)


def _method_loading(experiment: Experiment) -> Iterator[Claim]:
    if not experiment.loaders.issuperset(PAPER_LOADERS):
        raise MissingDataError(f"no runs used --loader {' and '.join(PAPER_LOADERS)}")
    yield from _loading(experiment, [ORIGINAL_LOADER], {METHOD_LOADER})


def _other_loading(experiment: Experiment) -> Iterator[Claim]:
    others = experiment.loaders.difference(PAPER_LOADERS)
    if not others:
        raise MissingDataError("no run used another loader than the paper's")
    if experiment.loaders.isdisjoint(PAPER_LOADERS):
        raise MissingDataError(f"no run used --loader {' or '.join(PAPER_LOADERS)}")
    yield from _loading(experiment, PAPER_LOADERS, others)


def _batch_strategies(experiment: Experiment) -> Iterator[Claim]:
    """Yields which scaling of the batch size is best and which is fastest, at each scale."""
    if experiment.mode != BATCH or "batch_scaling" not in experiment.varied:
        raise MissingDataError("no runs differ in --batch_scaling")
    for num_ranks in experiment.rank_counts:
        if num_ranks > 1:
            yield from _best_and_fastest(experiment, num_ranks)


def _other_settings(experiment: Experiment) -> Iterator[Claim]:
    """Yields which series is fastest and which is best on the most ranks, where others vary."""
    elsewhere = COMPARED_ELSEWHERE | ({"batch_scaling"} if experiment.mode == BATCH else set())
    if elsewhere.issuperset(experiment.varied):
        raise MissingDataError("no other setting was varied")
    yield from _best_and_fastest(experiment, experiment.rank_counts[-1])


def _best_and_fastest(experiment: Experiment, num_ranks: int) -> Iterator[Claim]:
    name = merit(experiment.runs)
    if name and not experiment.limits:
        yield from _first(experiment, num_ranks, quality_on_test(name), more_is_better(name))
    yield from _first(experiment, num_ranks, TOTAL, more=False)


def _first(
    experiment: Experiment, num_ranks: int, quantity: Quantity, more: bool
) -> Iterator[Claim]:
    """Yields which series is first on a number of ranks, and how far ahead of the next."""
    runs_of: dict[str, list[pd.DataFrame]] = defaultdict(list)
    is_time = quantity is TOTAL
    for series in experiment.series:
        point = series.at(num_ranks)
        if point is not None:
            name = series.name if is_time else describe(about_quality(series.settings))
            runs_of[name].append(point.runs)
    ranking: list[tuple[float, str, list[float]]] = []
    num_without = 0
    for name, frames in runs_of.items():
        runs = pd.concat(frames)
        values = known(runs, quantity)
        num_without += len(runs) - len(values)
        values = (
            [v for v in values if v > MIN_IN_RATIO] if is_time else of_each_seed(runs, quantity)
        )
        if values:
            ranking.append((median(values), name, values))
    if len(ranking) < 2:
        return
    ranking.sort(key=lambda each: each[0], reverse=more)
    (value, first, values_first), (next_value, second, values_second) = ranking[:2]
    if is_time:
        ahead = estimate_ratio(values_second, values_first)
    else:
        ahead = estimate_difference(values_first, values_second)
    unit = f" {quantity.unit}" if quantity.unit else ""
    yield (
        ahead.excludes(1 if is_time else 0),
        {
            "ranks": on_ranks([num_ranks]),
            "first": first,
            "most": f"{'the shortest' if is_time else 'the best'} {quantity.title}",
            "value": f"{number(value)}{unit}",
            "second": second,
            "next": f"{number(next_value)}{unit}",
            "ahead": f"a {'factor' if is_time else 'difference'} of {_told(ahead)}",
            "left_out": f". Left out: {count(num_without, 'run')} without a number"
            * bool(num_without),
        },
    )


def _epochs_needed(experiment: Experiment) -> Iterator[Claim]:
    """Yields whether quality is worse below the epochs per rank that the paper found necessary.

    Where the paper names no number, it is compared with that at the largest number of epochs.
    """
    name = merit(experiment.runs)
    if name is None:
        raise MissingDataError(NOT_EVALUATED)
    if experiment.limits:
        raise MissingDataError("the steps of the runs are limited")
    diverged = num_diverged(experiment.runs, name)
    if diverged:
        raise MissingDataError(
            f"the models of {count(diverged, 'run')} diverged (their {name} is not a number),"
            " and the others alone would look too good"
        )
    needed = published_epochs(experiment)
    missing = []
    trained: set[int] = set()
    for quantity in qualities(name):
        for group in epoch_groups(experiment, quantity):
            label = f"{quantity.title} of {group.name}" if group.name else quantity.title
            enough = max(group.by_epochs) if needed is None else needed
            drops = accuracy_drops(group, enough, more_is_better(name))
            if not drops:
                trained.update(group.by_epochs)
            elif not any(each.difference.is_confident for each in drops):
                missing.append(f"{label}: too few runs for a 95 % interval")
            else:
                is_sure, verdict = _verdict(drops, more_is_better(name), is_told=bool(needed))
                below = f"below {enough} epochs per rank"
                yield is_sure, {"quality": label, "verdict": verdict.format(below=below)}
    if trained:
        enough_words = f"with {needed} epochs per rank or more" if needed else "with more epochs"
        missing.append(
            f"this needs runs {enough_words} and otherwise identical runs with fewer; there are"
            f" runs with {listed(sorted(trained))}"
        )
    if missing:
        raise MissingDataError("; ".join(missing))


def _verdict(
    drops: Sequence[AccuracyDrop], more_is_better: bool, *, is_told: bool
) -> tuple[bool, str]:
    """Returns whether a comparison with enough epochs has a result, and what it is.

    Says also whether the paper agrees, if it tells how many epochs are needed.
    """
    falls, fall = ("falls", "fall") if more_is_better else ("rises", "rise")
    agrees, differs = (", as published", ", contrary to the paper") if is_told else ("", "")

    def size(drop: AccuracyDrop) -> str:
        return f"at {drop.epochs} by {_told(drop.difference.map(abs))}"

    nearest, least = drops[0], drops[-1]
    if nearest.is_drop:
        return True, f"{falls} {{below}}{agrees}: {size(nearest)}"
    at_nearest = f"at {nearest.epochs}, the difference is {_told(nearest.difference)}"
    worst = next((each for each in drops if each.is_drop), None)
    if worst and nearest.is_excluded:
        but = f"{falls}, but not immediately {{below}}{differs}"
        return True, f"{but}: {size(worst)}; {at_nearest}"
    if worst:
        still = f"{at_nearest}, which is inconclusive"
        return True, f"{falls} {{below}}{agrees}: {size(worst)}; {still}"
    also = f"; at {least.epochs}, {_told(least.difference)}" if least is not nearest else ""
    if not all(each.is_excluded for each in drops):
        return False, f"may or may not {fall} {{below}}: {at_nearest}{also}"
    threshold = f"{DROP_THRESHOLD}" if more_is_better else percent(DROP_THRESHOLD)
    not_by = f"does not {fall} by {threshold} or more {{below}}{differs}"
    return True, f"{not_by}: {at_nearest}{also}"


def _told(estimate: Estimate) -> str:
    return f"{number(estimate.value)} ({interval(estimate)})"


LOADS = "{ranks}, loading the {role} file ({mb} MB) takes {seconds} s with {method}; {factors}"
FIRST = "{ranks}, {first} has {most}, {value}; the next is {second} with {next}, {ahead}{left_out}"
PAIRS = {
    "improvement": (method_pairs, NO_METHOD_PAIR, "the paper's loading"),
    "other-improvement": (other_pairs, NO_OTHER_PAIR, "other loaders and kernels"),
}
"""The pairs of series that tables of improvements compare, what to say of none, and their name."""

RULES = (
    Rule(
        "What dominates",
        "shares",
        "{series}: the largest part of the time is {parts}",
        dominating_parts,
        ("dominates",),
        is_headline=True,
    ),
    *(
        Rule(
            f"{quantity.title.capitalize()} with {compared}",
            table,
            "{quantity} of {other} compared with {base}: {gains}",
            partial(_improvement, quantity=quantity, table=table),
            (f"improvement_{quantity.name}",) if table == "improvement" else (),
            is_headline=True,
            in_table=True,
        )
        for quantity in (TOTAL, ENERGY)
        for table, (_, _, compared) in PAIRS.items()
    ),
    Rule(
        "Epochs per rank",
        "quality",
        "{quality} {verdict}",
        _epochs_needed,
        (*EPOCHS_TOLD, "loss"),
        is_headline=True,
    ),
    Rule(
        "Scaling of the batch size",
        "quality",
        FIRST,
        _batch_strategies,
        ("best_strategy", "total_s", "batch_size_limit", "accuracy"),
        is_headline=True,
    ),
    Rule(
        "What to change", "shares", "{series}, {ranks}: {advice}", what_to_change, is_headline=True
    ),
    Rule(
        "Speed-up",
        "scaling",
        "{series}: {ranks}, the {what} of the total time is {ratio}{efficiency}, relative to"
        " {base_s} s {base}{apart}",
        _speed,
        in_table=True,
    ),
    Rule(
        "Time per epoch",
        "training",
        "{series}: {ranks}, an epoch takes {factor} times as long ({interval}) as the {base_s} s"
        " {base}{apart}",
        _epoch_growth,
        ("epoch_s",),
        in_table=True,
    ),
    Rule("The paper's loading", "loading", LOADS, _method_loading, ("improvement_load_s",)),
    Rule("Other loaders", "loading", LOADS, _other_loading),
    Rule("Other settings", "times", FIRST, _other_settings),
)
