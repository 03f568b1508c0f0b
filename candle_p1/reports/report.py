"""The report of some runs: its sections, each described once, and its page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec

from candle_p1.records.summary import details
from candle_p1.reports.drawing import Drawing
from candle_p1.reports.experiments import Experiment, describe, group
from candle_p1.reports.export import extrap_files, tidy, to_csv
from candle_p1.reports.figures.charts import draw_figures
from candle_p1.reports.figures.time import run_figures
from candle_p1.reports.frame import Run, Runs
from candle_p1.reports.notes import notes_on, notes_on_all
from candle_p1.reports.published import content
from candle_p1.reports.render import ReportTable, Section, Statement, page_of
from candle_p1.reports.rules import Finding, find
from candle_p1.reports.sections import TOPICS, Topic, free_slug
from candle_p1.reports.words import contents
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
    experiments = group(runs.runs)
    for experiment in experiments:
        slug = free_slug(experiment, {section.slug for section in sections})
        starting(experiment.title)
        findings = find(experiment) if len(experiment.runs) else []
        sections.append(_section(experiment, slug, findings, with_model=with_model))
        summaries.append(_summary(experiment, slug, findings))
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


def _section(
    experiment: Experiment, slug: str, findings: Iterable[Finding], *, with_model: bool
) -> Section:
    figures, missing = draw_figures(experiment, slug)
    made = (_part(experiment, topic, slug, figures) for topic in TOPICS)
    parts = [part for part in made if part]
    placed = {figure.slug for part in parts for figure in part.figures}
    if with_model:
        from candle_p1.reports.model_page import model_section

        parts += filter(None, [model_section(experiment, slug)])
    unsaid = [
        Statement(each.rule.title, [f"{why}." for why in (*each.inconclusive, each.missing) if why])
        for each in findings
        if each.inconclusive or each.missing
    ]
    title = f"No conclusion about {count(len(unsaid), 'question')}"
    parts += [Section("", title, statements=unsaid, is_folded=True)] if unsaid else []
    common = Section(
        "", "Settings shared by all of these runs", [describe(experiment.common)], is_folded=True
    )
    return Section(
        slug,
        experiment.title,
        [experiment.where],
        notes_on(experiment),
        figures=[each for each in figures if each.slug not in placed],
        missing=missing,
        sections=[*parts, common],
    )


def _part(
    experiment: Experiment, topic: Topic, prefix: str, figures: Iterable[Drawing]
) -> Section | None:
    """Returns what is drawn and tabulated about a topic; None where nothing is."""
    table = topic.make_table(experiment, prefix)
    names = tuple(f"{prefix}-{kind}" for kind in topic.figures)
    drawn = [each for each in figures if each.slug.rstrip("-0123456789") in names]
    if not (table or drawn):
        return None
    tables, slug = [table] if table else [], f"{prefix}-{topic.slug}"
    return Section(slug, topic.title, figures=drawn, tables=tables)


def _summary(experiment: Experiment, slug: str, findings: Iterable[Finding]) -> Section:
    if not len(experiment.runs):
        lead = ["No run with valid times has finished, so nothing can be said."]
        return Section("", experiment.title, lead)
    said = [
        Statement(each.rule.title, [*each.sentences, *each.published], f"{slug}-{each.rule.topic}")
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
