"""Notes for the reader of a report: what is missing, mixed or doubtful about its runs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from candle_p1.reports.compiled import compiled_apart
from candle_p1.reports.points import describe
from candle_p1.reports.quantities import covered, merit
from candle_p1.reports.statistics import MIN_VALUES
from candle_p1.reports.words import listed
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from candle_p1.reports.points import Experiment
    from candle_p1.reports.runs import Runs

MAX_LISTED = 6


def notes_on_all(runs: Runs) -> list[str]:
    """Returns the notes on all records together."""
    statuses = Counter(run.status for run in runs.runs)
    parts = [f"{statuses[status]} {status}" for status in sorted(statuses)]
    notes = [f"{count(len(runs.runs), 'run')}: {listed(parts)}."] if parts else []
    if runs.problems:
        notes.append(
            f"{count(len(runs.problems), 'record')} cannot be read; see the end of the page."
        )
    machines = {run.machine for run in runs.runs if run.machine}
    if len(machines) > 1:
        notes.append(
            f"The runs are from {len(machines)} machines, which are kept apart:"
            f" {'; '.join(sorted(map(str, machines)))}."
        )
    return notes


def notes_on(experiment: Experiment) -> list[str]:
    """Returns the notes on the runs of one experiment."""
    makers = (
        _limited,
        _left_out,
        _trained,
        _repeats,
        _energy,
        _data,
        _versions,
        _threads,
        _engines,
        _repeatable,
        _compiled,
        _clocks,
        _warnings,
    )
    return [note for make in makers for note in make(experiment)]


def _limited(experiment: Experiment) -> Iterator[str]:
    if experiment.limits:
        yield (
            f"The steps of these runs are limited ({describe(dict(experiment.limits))}): an epoch"
            " takes less time than a whole one, and accuracy and loss are those of models that have"
            " hardly been trained. Runs with other limits, or without, have a section of their own."
        )


def _left_out(experiment: Experiment) -> Iterator[str]:
    statuses = Counter(run.status for run in experiment.all_runs if run.status != "ok")
    if statuses:
        parts = [f"{num} {status}" for status, num in sorted(statuses.items())]
        yield (
            f"Not finished, and not included in any number: {listed(parts)}. The table of runs has"
            " the reasons."
        )
    finished = [run for run in experiment.all_runs if run.status == "ok"]
    for why, num in sorted(Counter(run.disturbed for run in finished if run.disturbed).items()):
        yield f"{count(num, 'run')} {'was' if num == 1 else 'were'} {why}; the times are not used."


def _repeats(experiment: Experiment) -> Iterator[str]:
    nums = [len(point.runs) for series in experiment.series for point in series.timed]
    single = sum(num == 1 for num in nums)
    if single:
        yield (
            f"Points with a single run: {single} of {len(nums)}. It is unknown how reliable such"
            " values are."
        )
    few = sum(1 < num < MIN_VALUES for num in nums)
    if few:
        yield (
            f"Points with fewer than {MIN_VALUES} runs: {few} of {len(nums)}. Their medians have no"
            " 95 % interval; the range is shown instead."
        )


def _trained(experiment: Experiment) -> Iterator[str]:
    reasons = Counter(run.stopped for run in experiment.runs if run.stopped)
    for reason, num in sorted(reasons.items()):
        yield (
            f"Training ended early in {count(num, 'run')} ({reason}): times are for fewer epochs"
            " than planned."
        )
    name = merit(experiment.runs)
    diverged = [run for run in experiment.runs if name and run.has_diverged(name)]
    if diverged:
        yield (
            f"The models of {count(len(diverged), 'run')} diverged (their {name} is not a number):"
            f" values of the {name} are for the other runs alone."
        )


def _energy(experiment: Experiment) -> Iterator[str]:
    runs = experiment.runs
    without = [run for run in runs if run.energy_j is None]
    if runs and len(without) == len(runs):
        yield "Energy was not measured."
    elif without:
        yield f"Energy was not measured in {len(without)} of {count(len(runs), 'run')}."
    kinds = Counter(run.energy_kind for run in runs if run.energy_j is not None)
    for kind in ("estimated", "simulated"):
        if kinds[kind]:
            yield f"The energy of {count(kinds[kind], 'run')} is {kind}, not measured."
    parts = covered(runs)
    if len(parts) > 1:
        yield (
            "Energies cover different parts of the machine and are not compared:"
            f" {'; '.join(parts)}."
        )


def _data(experiment: Experiment) -> Iterator[str]:
    synthetic = [run for run in experiment.runs if run.synthetic]
    if synthetic and len(synthetic) == len(experiment.runs):
        yield "The data are synthetic: accuracy and loss say nothing about cancer."
    elif synthetic:
        yield f"The data of {len(synthetic)} of {count(len(experiment.runs), 'run')} are synthetic."


def _versions(experiment: Experiment) -> Iterator[str]:
    names = sorted({name for run in experiment.runs for name in run.versions})
    for name in names:
        values = sorted({run.versions[name] for run in experiment.runs if name in run.versions})
        if len(values) > 1:
            yield f"The runs have different versions of {name}: {listed(values)}."


def _threads(experiment: Experiment) -> Iterator[str]:
    told = set()
    for series in experiment.series:
        threads = {
            point.num_ranks: max((run.threads or 0) for run in point.runs) for point in series.timed
        }
        if len(set(threads.values())) > 1:
            told.add(
                ", ".join(f"{num} on {count(ranks, 'rank')}" for ranks, num in threads.items())
            )
    for words in sorted(told):
        yield f"The number of threads per rank differs within a series: {words}."


def _engines(experiment: Experiment) -> Iterator[str]:
    engines = sorted({run.engine for run in experiment.runs if run.engine})
    if len(engines) > 1:
        yield (
            f"These runs have different engines ({listed(engines)}), which train with different"
            " frameworks: a difference in time between them says nothing about their settings."
        )


def _repeatable(experiment: Experiment) -> Iterator[str]:
    """Names the settings of kernels and communication, which differ on clusters and laptops."""
    found = {run.repeats_exactly for run in experiment.all_runs} - {None}
    of_horovod = sorted({run.fusion for run in experiment.all_runs if run.fusion})
    fusion = f"; Horovod's fusion: {listed(of_horovod)}" if of_horovod else ""
    if found == {True}:
        yield (
            "These runs repeat bit for bit (deterministic True): their kernels are deterministic,"
            f" which can cost time{fusion}."
        )
    elif found == {False}:
        yield (
            "These runs have the settings of a cluster (deterministic False): the fastest kernels,"
            f" whose results may differ in their last digits{fusion}."
        )
    elif found:
        yield (
            "Some of these runs repeat bit for bit (deterministic True), others have the settings"
            " of a cluster (deterministic False), which is faster: a difference in time between"
            f" them may be due to that alone{fusion}."
        )


def _compiled(experiment: Experiment) -> Iterator[str]:
    apart = compiled_apart(experiment.runs)
    if apart:
        yield (
            f"{apart}: speed-ups, scaling efficiencies and other ratios between them also contain"
            " what XLA gains or costs."
        )


def _clocks(experiment: Experiment) -> Iterator[str]:
    facts = [run.record.communication for run in experiment.runs]
    num = sum(each is not None and each.clock_waits_for == "element" for each in facts)
    if num:
        yield (
            f"In {count(num, 'run')}, on GPUs, the communication of gradients is timed by when one"
            " element of each has arrived on the host, so it includes that copy."
        )


def _warnings(experiment: Experiment) -> Iterator[str]:
    found = Counter(text for run in experiment.runs for text in run.record.warnings or ())
    for text, num in found.most_common(MAX_LISTED):
        yield f"Warning in {count(num, 'run')}: {text}."
