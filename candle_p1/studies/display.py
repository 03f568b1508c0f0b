"""What a study shows: its plan, its status, results of runs, and how long the rest will take."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import get_args

from rich.table import Table

from candle_p1.benchmark import find_benchmark
from candle_p1.studies.plan import TIMELINE_NAME, Plan, PlannedRun, to_argv
from candle_p1.studies.state import LOG_NAME, RunState, RunStatus, finished
from candle_p1.text import count
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
    names = []
    for variant in size.variants:
        flags = ", ".join(f"{name} {value}" for name, value in variant.flags.items())
        names += [variant.name + f" ({flags})" * bool(flags)] * bool(variant.name)
    if names:
        screen.say(f"variants: {', '.join(names)}")
    screen.say(f"time limit of each run: {size.minutes} min")
    for i, state in enumerate(states, start=1):
        number = f"{i:>{len(str(len(states)))}}"
        status = f"  # {state.status}" if state.status in ("ok", "failed") else ""
        screen.say_command(_argv(state.run), f"{number}  {state.run.name}: ", status)
    left = remaining([state.run for state in states if state.is_due()], states)
    num_submitted = sum(state.status == "submitted" for state in states)
    submitted = f"; {num_submitted} submitted as jobs" * bool(num_submitted)
    screen.say(left or f"nothing left to do{submitted}")


def _argv(run: PlannedRun) -> list[str]:
    """Returns a run as a user would type it, with the flags that the study sets."""
    variables = [f"{name}={value}" for name, value in run.variables.items()]
    ranks = ["--np", str(run.num_ranks)] if run.num_ranks > 1 else []
    name = find_benchmark(run.benchmark).name if os.sep not in run.benchmark else run.benchmark
    trace = {"timeline": TIMELINE_NAME} if run.timeline else {}
    return [*variables, "candle-p1", "run", name, *ranks, *to_argv({**run.flags, **trace})]


def remaining(due: Sequence[PlannedRun], states: Sequence[RunState]) -> str:
    """Returns how long runs of a study will take: as long as those that have finished, on average.

    If none has, their time limit is an upper bound.
    """
    if not due:
        return ""
    if totals_s := [state.total_s for state in finished(states)]:
        return f"{count(len(due), 'run')}, about {duration(len(due) * statistics.mean(totals_s))}"
    return f"{count(len(due), 'run')}, at most {duration(sum(60 * run.minutes for run in due))}"


def duration(seconds: float) -> str:
    """Returns a time as text: "41 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def result_line(state: RunState) -> str:
    """Returns the result of a run in one line: its time and quality, or why it has none."""
    if state.status != "ok":
        failure = state.record and state.record.failure
        return f"{state.run.name}  {state.status}" + (f": {failure.reason}" if failure else "")
    line = f"{state.run.name}  {state.total_s:.1f} s"
    quality = (state.record and state.record.quality) or {}
    for name in (*SHOWN_METRICS, *quality):
        if name in quality:
            value = quality[name].value
            return f"{line}  {name} {'not finite' if value is None else format(value, '.4g')}"
    return line


def render_status(plan: Plan, states: Sequence[RunState]) -> Iterator[str | Table]:
    """Yields the status of a study: a table of its points, failed runs, and what remains."""
    num = Counter(state.status for state in states)
    shown = [status for status in get_args(RunStatus) if num[status]]
    table = Table("point", title=f"{plan.study.name}, {plan.size}")
    for name in [*shown, "median total (s)"]:
        table.add_column(name, justify="right")
    points: dict[tuple[str, int], list[RunState]] = {}
    for state in states:
        points.setdefault((state.run.series, state.run.num_ranks), []).append(state)
    for _, of_point in sorted(points.items()):
        totals_s = [state.total_s for state in finished(of_point)]
        of_status = Counter(state.status for state in of_point)
        table.add_row(
            of_point[0].run.point,
            *(str(of_status[status]) for status in shown),
            f"{statistics.median(totals_s):.1f}" if totals_s else "",
        )
    yield table
    for state in states:
        if state.status == "failed" and state.directory:
            yield f"{result_line(state)}; see {state.directory / LOG_NAME}"
    counts = [f"{num['ok']} of {len(states)} runs are done"]
    counts += [
        f"{num[status]} {status}" for status in ("running", "submitted", "failed") if num[status]
    ]
    left = remaining([state.run for state in states if state.is_due()], states)
    yield ", ".join(counts) + f"; remaining: {left}" * bool(left)
