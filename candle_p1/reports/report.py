"""The report of some runs: its sections, each described once, and its page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from statistics import harmonic_mean
from typing import Any

from candle_p1.records.summary import details
from candle_p1.reports import experiments as ex
from candle_p1.reports.charts import draw_figures
from candle_p1.reports.experiments import Experiment, Point, Quantity, describe
from candle_p1.reports.export import extrap_files, tidy, to_csv
from candle_p1.reports.frame import PARTS, Run, Runs
from candle_p1.reports.gains import (
    compiled_apart,
    gains_table,
    loading_table,
    of_each_seed,
    scaling_table,
)
from candle_p1.reports.over_time import run_figures
from candle_p1.reports.published import all_published, content, published
from candle_p1.reports.render import Cell, Content, ReportTable, Section, Statement, page_of
from candle_p1.reports.rules import Finding, find
from candle_p1.reports.statistics import MIN_VALUES, contents, estimate_mean, listed
from candle_p1.text import count, printable

MAX_RUNS = 20
"""Of more runs, the list is folded."""


def make_report(
    runs: Runs,
    starting: Callable[[str], None] = lambda _title: None,
    *,
    with_model: bool = False,
) -> tuple[Section, dict[str, str | bytes]]:
    """Returns the page of some runs, and files for other programs by their paths beside it.

    `starting` is called with the title of each section before it is made.
    """
    sections: list[Section] = []
    summaries: list[Section] = []
    experiments = ex.group(runs.runs)
    for experiment in experiments:
        starting(experiment.title)
        findings = find(experiment) if len(experiment.runs) else []
        sections.append(_section(experiment, findings, with_model=with_model))
        summaries.append(_summary(experiment, findings))
    table = tidy(runs.runs)
    exports: dict[str, str | bytes] = {"runs.csv": to_csv(table)}
    if find_spec("pyarrow"):
        exports["runs.parquet"] = table.to_parquet(None, engine="pyarrow", index=False)
    exports |= {f"extrap/{name}": text for name, text in extrap_files(experiments).items()}
    machines = "".join(f" {name}: {words}." for name, words in content()["machines"].items())
    paper, said = content()["sources"]["paper"], contents()["report"]
    lead = said["lead"].format(paper=paper, machines=machines)
    summary = Section("summary", "Summary", sections=summaries)
    sections = [*([summary] if summaries else []), *sections, *_lists(runs)]
    notes = list(notes_on_all(runs))
    return Section("", said["title"], [lead], notes, sections=sections), exports


def run_page(run: Run) -> Section:
    """Returns the page of a run: its figures, and all of its tables."""
    notes = []
    if run["limits"]:
        limits = ", ".join(f"{name} {steps}" for name, steps in run["limits"])
        notes.append(f"The steps were limited ({limits}): the model has hardly been trained.")
    figures, missing = run_figures(run)
    title = f"{run['benchmark']} on {count(run['num_ranks'], 'rank')}: {run['status']}"
    return page_of(title, details(run.record), figures, notes=notes, missing=missing)


def _section(experiment: Experiment, findings: Iterable[Finding], *, with_model: bool) -> Section:
    figures, missing = draw_figures(experiment)
    parts: list[Section] = []
    for topic in contents()["topics"]:
        table = topic_table(experiment, topic)
        kinds = {f"{experiment.slug}-{kind}" for kind in topic.get("figures", ())}
        drawn = [each for each in figures if each.slug.rstrip("-0123456789") in kinds]
        figures = [each for each in figures if each not in drawn]
        if table or drawn:
            slug, tables = f"{experiment.slug}-{topic['slug']}", [table] if table else []
            parts.append(Section(slug, topic["title"], figures=drawn, tables=tables))
    if with_model:
        from candle_p1.reports.model_page import model_section

        parts += filter(None, [model_section(experiment)])
    unsaid = [
        Statement(each.title, [f"{why}." for why in (*each.inconclusive, each.missing) if why])
        for each in findings
        if each.inconclusive or each.missing
    ]
    title = f"No conclusion about {count(len(unsaid), 'question')}"
    parts += [Section("", title, statements=unsaid, is_folded=True)] if unsaid else []
    common = Section(
        "", "Settings shared by all of these runs", [describe(experiment.common)], is_folded=True
    )
    return Section(
        experiment.slug,
        experiment.title,
        [experiment.where],
        notes_on(experiment),
        figures=figures,
        missing=missing,
        sections=[*parts, common],
    )


def _summary(experiment: Experiment, findings: Iterable[Finding]) -> Section:
    if not len(experiment.runs):
        lead = ["No run with valid times has finished, so nothing can be said."]
        return Section("", experiment.title, lead)
    said = [
        Statement(each.title, [*each.sentences, *each.published], f"{experiment.slug}-{each.topic}")
        for each in findings
        if each.sentences
    ]
    return Section("", experiment.title, [experiment.where], statements=said)


def _lists(runs: Runs) -> Iterator[Section]:
    headings = (
        "record", "benchmark", "ranks", "seed", "status", "total (s)", "started", "remark",
    )  # fmt: skip
    rows = [
        (
            *(run["record"], run["benchmark"], run["num_ranks"], str(run["seed"]), run["status"]),
            *(run["total_s"], run["started"][:19], _remark(run)),
        )
        for run in runs.runs
    ]
    title = f"All {len(rows)} runs"
    table = ReportTable("runs", "All runs", headings, rows)
    yield Section("runs", title, tables=[table], is_folded=len(rows) > MAX_RUNS)
    problems = [(printable(str(path)), reason) for path, reason in runs.problems.items()]
    title = "Records that cannot be read"
    table = ReportTable("unreadable", title, ("record", "reason"), problems)
    if problems:
        yield Section("unreadable", title, tables=[table])


def _remark(run: Run) -> str:
    segments, perturbed_by = run["num_segments"], run["perturbed_by"]
    told = [f"continued, {count(segments, 'segment')}"] if segments > 1 else []
    if perturbed_by and "continued" not in perturbed_by:
        told.append(perturbed_by)
    return "; ".join([*told, *filter(None, [run["failure"]])])


Column = Quantity | tuple[str, Callable[[Point], Cell]]
"""A quantity, of which the median is shown, or a heading and what its column shows of a point."""


def topic_table(experiment: Experiment, topic: Mapping[str, Any]) -> ReportTable | None:
    """Returns the table of a topic of contents.toml, without empty columns; None without rows."""
    headings, rows, notes = TABLES[topic["slug"]](experiment)
    if not rows:
        return None
    told = map(str, published(experiment, *topic.get("published", ())))
    notes = [*filter(None, [topic.get("note")]), *notes, *told]
    slug = f"{experiment.slug}-{topic['slug']}"
    return ReportTable(slug, topic["title"], headings, rows, notes).without_empty_columns()


def of_points(
    experiment: Experiment,
    columns: Sequence[Column],
    which: Callable[[Point], object] = lambda point: len(point.runs),
) -> Content:
    """Returns a table with a row for each point that has runs with times."""
    headings = [each.heading if isinstance(each, Quantity) else each[0] for each in columns]
    rows = [
        (
            *(series.name, point.num_ranks),
            *(point.estimate(e) if isinstance(e, Quantity) else e[1](point) for e in columns),
        )
        for series in experiment.series
        for point in series.points
        if which(point)
    ]
    return ("series", "ranks", *headings), rows, []


def _times(experiment: Experiment) -> Content:
    columns: list[Column] = [("runs", lambda point: len(point.runs))]
    if (experiment.all_runs["status"] != "ok").any():
        columns.append(("not finished", lambda point: point.num_unfinished))
    columns += [ex.TOTAL, ex.LOAD, ex.BROADCAST, ex.WAIT, ex.TRANSFER, ex.TRAIN]
    return of_points(experiment, columns, lambda p: len(p.runs) or p.num_unfinished)


def _epochs(point: Point) -> Cell:
    """Returns the epochs of each rank, as "3 to 7" where some runs were stopped early."""
    found = sorted(set(point.values("epochs_per_rank")))
    if len(found) > 1:
        return f"{found[0]} to {found[-1]}"
    return found[0] if found else None


def _mean_rate(point: Point) -> Cell:
    """Returns all work over all time."""
    rates = point.values(ex.SAMPLES)
    return harmonic_mean(rates) if rates else None


def _batch_size(point: Point) -> Cell:
    size: Cell = point.runs["run"].iloc[0]["plan_batch_size"]
    return size


EPOCHS_PER_RANK = ("epochs per rank", _epochs)


def _quality(experiment: Experiment) -> Content:
    name = ex.merit(experiment.runs)
    if not name:
        return [], [], []
    batch_size = ("batch size", _batch_size)
    on_test = ex.quality_on_test(name)

    def mean(point: Point) -> Cell:
        """Returns the mean over repeats and folds, also of runs that were continued."""
        runs = point.all_runs[point.all_runs["status"] == "ok"]
        return estimate_mean(of_each_seed(runs, on_test), max(runs["folds"], default=0))

    shown: list[Column] = [EPOCHS_PER_RANK, batch_size, *ex.qualities(name), ex.naive(name)]
    shown.append((f"mean {on_test.title}", mean))
    headings, rows, notes = of_points(experiment, shown)
    return headings, rows, [*notes, *[contents()["mean"]["note"]] * any(row[-1] for row in rows)]


def _efficiency(experiment: Experiment) -> Content:
    communication = Quantity("communication_percent", "communication in training", "%")
    shown = (communication, ex.LOAD_BALANCE, ex.COMMUNICATION_EFFICIENCY, ex.PARALLEL_EFFICIENCY)
    return of_points(experiment, shown, lambda p: p.num_ranks > 1 and len(p.runs))


def _power(experiment: Experiment) -> Content:
    """Returns time per epoch, mean power and energy: the paper's Tables 2, 5 and 6."""
    runs = experiment.runs
    columns = (ex.EPOCH, *(ex.labelled(e, runs) for pair in ex.POWER_AND_ENERGY for e in pair))
    rates = sorted({hz for hz in ex.known(runs[runs["energy_j"].notna()], "power_hz") if hz})
    note = contents()["power"]["note"].format(rates=listed([f"{hz:g}" for hz in rates]))
    headings, rows, _ = of_points(experiment, columns, lambda p: p.values(ex.ENERGY))
    of_paper = [str(each) for each in all_published() if each.quantity == "power_rate"]
    return headings, rows, [note, *of_paper]


TABLES: dict[str, Callable[[Experiment], Content]] = {
    "times": _times,
    "shares": partial(
        of_points, columns=[Quantity(f"percent_{part}", part, "%") for part in PARTS]
    ),
    "training": partial(
        of_points,
        columns=(EPOCHS_PER_RANK, ex.EPOCH, ex.FIRST_STEP, (ex.SAMPLES.heading, _mean_rate)),
    ),
    "improvement": partial(gains_table, of_method=True),
    "other-improvement": partial(gains_table, of_method=False),
    "scaling": scaling_table,
    "quality": _quality,
    "efficiency": _efficiency,
    "power": _power,
    "loading": loading_table,
}
"""What makes the table of a topic."""


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
    for why, num in sorted(Counter(ex.known(all_runs[finished], "perturbed_by")).items()):
        yield _note("perturbed", num, verb="was" if num == 1 else "were", why=why)
    for why, num in sorted(Counter(filter(None, runs["stopped"])).items()):
        yield _note("stopped", num, why=why)
    name = ex.merit(runs)
    if name and (num := ex.num_diverged(runs, name)):
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
    parts = ex.covered(runs)
    if len(parts) > 1:
        yield _note("energy_parts", parts="; ".join(parts))


def _data(experiment: Experiment) -> Iterator[str]:
    num, of_all = ex.known(experiment.runs, "synthetic").count(True), len(experiment.runs)
    if num:
        yield _note("synthetic" if num == of_all else "some_synthetic", of_all, num=num)


def _settings(experiment: Experiment) -> Iterator[str]:
    """Names what differs between clusters and laptops, or between runs that should be alike."""
    runs = experiment.runs
    for column in sorted(name for name in map(str, runs) if name.startswith("version_")):
        values = sorted(set(ex.known(runs, column)))
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
    fusions = sorted(set(ex.known(experiment.all_runs, "fusion")))
    fusion = f"; Horovod's fusion: {listed(fusions)}" if fusions else ""
    found = set(ex.known(experiment.all_runs, "deterministic"))
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
    for text, num in warnings.most_common(6):
        yield _note("warning", num, text=text)


def _counted(values: Iterable[str]) -> str:
    return listed([f"{num} {value}" for value, num in sorted(Counter(values).items())])
