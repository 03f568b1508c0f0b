"""Notes for the reader of a report: what is missing, mixed or doubtful about its runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from candle_p1.reports.columns import covered, known, merit, num_diverged
from candle_p1.reports.experiments import Experiment, describe
from candle_p1.reports.frame import Runs
from candle_p1.reports.speed import compiled_apart
from candle_p1.reports.statistics import MIN_VALUES
from candle_p1.reports.words import listed
from candle_p1.text import count

MAX_LISTED = 6


def notes_on_all(runs: Runs) -> Iterator[str]:
    """Yields the notes on all records together."""
    if runs.runs:
        yield f"{count(len(runs.runs), 'run')}: {_counted(run['status'] for run in runs.runs)}."
    if runs.problems:
        num = count(len(runs.problems), "record")
        yield f"{num} cannot be read; see the end of the page."
    machines = {run["machine"] for run in runs.runs if run["machine"]}
    if len(machines) > 1:
        yield (
            f"The runs are from {len(machines)} machines, which are kept apart:"
            f" {'; '.join(sorted(machines))}."
        )


def notes_on(experiment: Experiment) -> list[str]:
    """Returns the notes on the runs of one experiment."""
    makers = (_which, _repeats, _energy, _data, _settings, _measured)
    return [note for make in makers for note in make(experiment)]


def _which(experiment: Experiment) -> Iterator[str]:
    runs, all_runs = experiment.runs, experiment.all_runs
    if experiment.limits:
        yield (
            f"The steps of these runs are limited ({describe(dict(experiment.limits))}): an epoch"
            " takes less time than a whole one, and accuracy and loss are those of models that have"
            " hardly been trained. Runs with other limits, or without, have a section of their own."
        )
    finished = all_runs["status"] == "ok"
    if not finished.all():
        yield (
            "Not finished, and not included in any number:"
            f" {_counted(all_runs.loc[~finished, 'status'])}. The table of runs has the reasons."
        )
    for why, num in sorted(Counter(known(all_runs[finished], "perturbed_by")).items()):
        yield f"{count(num, 'run')} {'was' if num == 1 else 'were'} {why}; the times are not used."
    for reason, num in sorted(Counter(filter(None, runs["stopped"])).items()):
        yield (
            f"Training ended early in {count(num, 'run')} ({reason}): times are for fewer epochs"
            " than planned."
        )
    name = merit(runs)
    if name and (num := num_diverged(runs, name)):
        yield (
            f"The models of {count(num, 'run')} diverged (their {name} is not a number): values of"
            f" the {name} are for the other runs alone."
        )


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


def _energy(experiment: Experiment) -> Iterator[str]:
    runs = experiment.runs
    measured = runs[runs["energy_j"].notna()]
    if len(runs) and not len(measured):
        yield "Energy was not measured."
    elif len(measured) < len(runs):
        without = len(runs) - len(measured)
        yield f"Energy was not measured in {without} of {count(len(runs), 'run')}."
    for kind in ("estimated", "simulated"):
        if num := int((measured["energy_kind"] == kind).sum()):
            yield f"The energy of {count(num, 'run')} is {kind}, not measured."
    parts = covered(runs)
    if len(parts) > 1:
        yield (
            "Energies cover different parts of the machine and are not compared:"
            f" {'; '.join(parts)}."
        )


def _data(experiment: Experiment) -> Iterator[str]:
    num, of_all = int((experiment.runs["synthetic"] == True).sum()), len(experiment.runs)  # noqa: E712
    if num and num == of_all:
        yield "The data are synthetic: accuracy and loss say nothing about cancer."
    elif num:
        yield f"The data of {num} of {count(of_all, 'run')} are synthetic."


def _settings(experiment: Experiment) -> Iterator[str]:
    """Names what differs between clusters and laptops, or between runs that should be alike."""
    runs = experiment.runs
    for column in sorted(name for name in map(str, runs) if name.startswith("version_")):
        values = sorted(set(known(runs, column)))
        if len(values) > 1:
            name = column.removeprefix("version_")
            yield f"The runs have different versions of {name}: {listed(values)}."
    told = set()
    for series in experiment.series:
        threads = {p.num_ranks: max(p.values("threads"), default=0) for p in series.timed}
        if len(set(threads.values())) > 1:
            words = (f"{num} on {count(ranks, 'rank')}" for ranks, num in threads.items())
            told.add(", ".join(words))
    for words_of in sorted(told):
        yield f"The number of threads per rank differs within a series: {words_of}."
    engines = sorted(set(filter(None, runs["engine"])))
    if len(engines) > 1:
        yield (
            f"These runs have different engines ({listed(engines)}), which train with different"
            " frameworks: a difference in time between them says nothing about their settings."
        )
    fusions = sorted(set(known(experiment.all_runs, "fusion")))
    fusion = f"; Horovod's fusion: {listed(fusions)}" if fusions else ""
    found = frozenset(known(experiment.all_runs, "deterministic"))
    if found:
        yield REPEATABLE[found].format(fusion=fusion)
    apart = compiled_apart(runs["run"])
    if apart:
        yield (
            f"{apart}: speed-ups, scaling efficiencies and other ratios between them also contain"
            " what XLA gains or costs."
        )


REPEATABLE = {
    frozenset({True}): "These runs repeat bit for bit (deterministic True): their kernels are"
    " deterministic, which can cost time{fusion}.",
    frozenset({False}): "These runs have the settings of a cluster (deterministic False): the"
    " fastest kernels, whose results may differ in their last digits{fusion}.",
    frozenset({True, False}): "Some of these runs repeat bit for bit (deterministic True), others"
    " have the settings of a cluster (deterministic False), which is faster: a difference in time"
    " between them may be due to that alone{fusion}.",
}


def _measured(experiment: Experiment) -> Iterator[str]:
    records = [run.record for run in experiment.runs["run"]]
    facts = [record.communication for record in records]
    num = sum(each is not None and each.clock_waits_for == "element" for each in facts)
    if num:
        yield (
            f"In {count(num, 'run')}, on GPUs, the communication of gradients is timed by when one"
            " element of each has arrived on the host, so it includes that copy."
        )
    warnings = Counter(text for record in records for text in record.warnings or ())
    for text, num in warnings.most_common(MAX_LISTED):
        yield f"Warning in {count(num, 'run')}: {text}."


def _counted(values: Iterable[str]) -> str:
    return listed([f"{num} {value}" for value, num in sorted(Counter(values).items())])
