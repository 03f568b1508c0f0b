"""What a study shows: its plan, its progress while it runs, and its status."""

from __future__ import annotations

import os
import statistics
from typing import TYPE_CHECKING

from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from candle_p1.benchmark import find_benchmark
from candle_p1.studies.cost import estimate, explain
from candle_p1.studies.planned_run import TIMELINE_NAME, to_argv
from candle_p1.studies.run_state import (
    FAILED,
    LOG_NAME,
    OK,
    RUNNING,
    STATUSES,
    SUBMITTED,
    RunState,
    finished,
)
from candle_p1.studies.similar import SimilarRuns

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from candle_p1.studies.cost import CostEstimate
    from candle_p1.studies.plan import Plan
    from candle_p1.studies.planned_run import PlannedRun
    from candle_p1.studies.study_file import StudyVariant
    from candle_p1.training.screen import Screen

SHOWN_METRICS = ("accuracy", "r2", "loss")
"""The first of these that a run has is shown as its quality, or else its first metric."""


def show_plan(plan: Plan, states: Sequence[RunState], screen: Screen) -> None:
    """Shows a study's title, its runs in order, and how long the remaining ones will take."""
    size = plan.study.sizes[plan.size]
    screen.say(f"{plan.study.name}, {plan.size}: {plan.study.title}")
    if plan.study.shows:
        screen.say(f"shows: {', '.join(plan.study.shows)}")
    screen.say(f"results: {plan.directory}")
    if names := [_variant_line(variant) for variant in size.variants if variant.name]:
        screen.say(f"variants: {', '.join(names)}")
    screen.say(f"time limit of each run: {size.minutes} min")
    for i, state in enumerate(states, start=1):
        number = f"{i:>{len(str(len(states)))}}"
        status = f"  # {state.status}" if state.status in (OK, FAILED) else ""
        screen.say_command(_argv(state.run), f"{number}  {state.run.name}: ", status)
    if due := _estimates_of_due(plan, states):
        screen.say(explain(due))
    elif num_submitted := sum(state.status == SUBMITTED for state in states):
        screen.say(f"nothing is left to do here; {num_submitted} submitted as jobs")
    else:
        screen.say("nothing is left to do")


def _estimates_of_due(plan: Plan, states: Sequence[RunState]) -> list[CostEstimate]:
    done, similar = finished(states), SimilarRuns.beside(plan.directory)
    return [estimate(state.run, done, similar) for state in states if state.is_due()]


def _argv(run: PlannedRun) -> list[str]:
    """Returns a run as a user would type it, with the flags that the study sets."""
    variables = [f"{name}={value}" for name, value in run.variables.items()]
    ranks = ["--np", str(run.num_ranks)] if run.num_ranks > 1 else []
    name = find_benchmark(run.benchmark).name if os.sep not in run.benchmark else run.benchmark
    trace = ["--timeline", TIMELINE_NAME] if run.timeline else []
    return [*variables, "candle-p1", "run", name, *ranks, *to_argv(run.flags), *trace]


def _variant_line(variant: StudyVariant) -> str:
    """Returns a variant with the parameters that set it apart, as "chunked (loader chunked)"."""
    flags = ", ".join(f"{name} {value}" for name, value in variant.flags.items())
    return f"{variant.name} ({flags})" if flags else variant.name


def study_bar(screen: Screen) -> Progress:
    """Returns the progress bar of a study; the field "left" of its task is the remaining time."""
    return screen.bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("runs"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )


def result_line(state: RunState) -> str:
    """Returns the result of a run in one line: its time and quality, or why it has none."""
    if state.status != OK:
        reason = state.failure_reason
        return f"{state.run.name}  {state.status}" + (f": {reason}" if reason else "")
    return f"{state.run.name}  {state.total_s:.1f} s  {_quality(state)}".rstrip()


def _quality(state: RunState) -> str:
    quality = state.quality
    name = next((name for name in (*SHOWN_METRICS, *quality) if name in quality), None)
    if name is None:
        return ""
    value = quality[name]
    return f"{name} {'not finite' if value is None else format(value, '.4g')}"


def status_parts(plan: Plan, states: Sequence[RunState]) -> Iterator[str | Table]:
    """Yields the status of a study: a table of its points, failed runs, and what remains."""
    table = Table(title=f"{plan.study.name}, {plan.size}", box=box.SIMPLE, title_justify="left")
    table.add_column("point")
    num = {status: sum(state.status == status for state in states) for status in STATUSES}
    shown = [status for status in STATUSES if num[status]]
    for name in [*shown, "median total (s)"]:
        table.add_column(name, justify="right")
    points: dict[tuple[str, int], list[RunState]] = {}
    for state in states:
        points.setdefault((state.run.series, state.run.num_ranks), []).append(state)
    for of_point in (points[key] for key in sorted(points)):
        totals_s = [state.total_s for state in finished(of_point)]
        table.add_row(
            of_point[0].run.point,
            *(str(sum(state.status == status for state in of_point)) for status in shown),
            f"{statistics.median(totals_s):.1f}" if totals_s else "",
        )
    yield table
    for state in states:
        if state.status == FAILED and state.directory:
            yield f"{result_line(state)}; see {state.directory / LOG_NAME}"
    counts = [f"{num[OK]} of {len(states)} runs are done"]
    for status in (RUNNING, SUBMITTED, FAILED):
        counts += [f"{num[status]} {status}"] * bool(num[status])
    due = _estimates_of_due(plan, states)
    yield ", ".join(counts) + (f"; remaining: {explain(due)}" if due else "")
