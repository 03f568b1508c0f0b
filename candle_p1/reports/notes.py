"""Notes for the reader of a report: what is missing, mixed or doubtful about its runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from candle_p1.reports.columns import covered, known, merit, num_diverged
from candle_p1.reports.experiments import Experiment, describe
from candle_p1.reports.frame import Runs
from candle_p1.reports.speed import compiled_apart
from candle_p1.reports.statistics import MIN_VALUES
from candle_p1.reports.words import contents, listed
from candle_p1.text import count

MAX_LISTED = 6


def _note(name: str, num_runs: int = 0, /, **words: object) -> str:
    """Returns a note of contents.toml."""
    return str(contents()["notes"][name].format(runs=count(num_runs, "run"), **words))


def notes_on_all(runs: Runs) -> Iterator[str]:
    """Yields the notes on all records together."""
    if runs.runs:
        statuses = _counted(run["status"] for run in runs.runs)
        yield _note("runs", len(runs.runs), statuses=statuses)
    if runs.problems:
        yield _note("unreadable", records=count(len(runs.problems), "record"))
    machines = {run["machine"] for run in runs.runs if run["machine"]}
    if len(machines) > 1:
        yield _note("machines", num=len(machines), names="; ".join(sorted(machines)))


def notes_on(experiment: Experiment) -> list[str]:
    """Returns the notes on the runs of one experiment."""
    makers = (_which, _repeats, _energy, _data, _settings, _measured)
    return [note for make in makers for note in make(experiment)]


def _which(experiment: Experiment) -> Iterator[str]:
    runs, all_runs = experiment.runs, experiment.all_runs
    if experiment.limits:
        yield _note("limited", limits=describe(dict(experiment.limits)))
    finished = all_runs["status"] == "ok"
    if not finished.all():
        yield _note("unfinished", statuses=_counted(all_runs.loc[~finished, "status"]))
    for why, num in sorted(Counter(known(all_runs[finished], "perturbed_by")).items()):
        yield _note("perturbed", num, verb="was" if num == 1 else "were", why=why)
    for why, num in sorted(Counter(filter(None, runs["stopped"])).items()):
        yield _note("stopped", num, why=why)
    name = merit(runs)
    if name and (num := num_diverged(runs, name)):
        yield _note("diverged", num, merit=name)


def _repeats(experiment: Experiment) -> Iterator[str]:
    nums = [len(point.runs) for series in experiment.series for point in series.timed]
    if num := nums.count(1):
        yield _note("single", num=num, all=len(nums))
    if num := sum(1 < each < MIN_VALUES for each in nums):
        yield _note("few", num=num, all=len(nums), least=MIN_VALUES)


def _energy(experiment: Experiment) -> Iterator[str]:
    runs = experiment.runs
    measured = runs[runs["energy_j"].notna()]
    if len(runs) and not len(measured):
        yield _note("no_energy")
    elif without := len(runs) - len(measured):
        yield _note("some_energy", len(runs), num=without)
    for kind in ("estimated", "simulated"):
        if num := int((measured["energy_kind"] == kind).sum()):
            yield _note("energy_kind", num, kind=kind)
    parts = covered(runs)
    if len(parts) > 1:
        yield _note("energy_parts", parts="; ".join(parts))


def _data(experiment: Experiment) -> Iterator[str]:
    num, of_all = known(experiment.runs, "synthetic").count(True), len(experiment.runs)
    if num:
        yield _note("synthetic" if num == of_all else "some_synthetic", of_all, num=num)


def _settings(experiment: Experiment) -> Iterator[str]:
    """Names what differs between clusters and laptops, or between runs that should be alike."""
    runs = experiment.runs
    for column in sorted(name for name in map(str, runs) if name.startswith("version_")):
        values = sorted(set(known(runs, column)))
        if len(values) > 1:
            yield _note("versions", name=column.removeprefix("version_"), versions=listed(values))
    told = set()
    for series in experiment.series:
        threads = {p.num_ranks: max(p.values("threads"), default=0) for p in series.timed}
        if len(set(threads.values())) > 1:
            words = (f"{num} on {count(ranks, 'rank')}" for ranks, num in threads.items())
            told.add(", ".join(words))
    for words_of in sorted(told):
        yield _note("threads", threads=words_of)
    engines = sorted(set(filter(None, runs["engine"])))
    if len(engines) > 1:
        yield _note("engines", engines=listed(engines))
    fusions = sorted(set(known(experiment.all_runs, "fusion")))
    fusion = f"; Horovod's fusion: {listed(fusions)}" if fusions else ""
    found = set(known(experiment.all_runs, "deterministic"))
    if found:
        kind = "some_" if len(found) > 1 else "not_" if found == {False} else ""
        yield _note(f"{kind}deterministic", fusion=fusion)
    if which := compiled_apart(runs["run"]):
        yield _note("compiled", which=which)


def _measured(experiment: Experiment) -> Iterator[str]:
    records = [run.record for run in experiment.runs["run"]]
    facts = [record.communication for record in records]
    if num := sum(each is not None and each.clock_waits_for == "element" for each in facts):
        yield _note("element", num)
    warnings = Counter(text for record in records for text in record.warnings or ())
    for text, num in warnings.most_common(MAX_LISTED):
        yield _note("warning", num, text=text)


def _counted(values: Iterable[str]) -> str:
    return listed([f"{num} {value}" for value, num in sorted(Counter(values).items())])
