"""A study in words and tables: what it would do, and how far it is."""

from __future__ import annotations

import os
import shlex
import statistics
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from candle_p1.benchmark import find_benchmark
from candle_p1.studies.cost import cost, duration, measured
from candle_p1.studies.places import LOG_NAME
from candle_p1.studies.planned import words_of
from candle_p1.studies.screen import result_line
from candle_p1.studies.state import FAILED, OK, RUNNING, STATUSES, SUBMITTED, RunState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from candle_p1.studies.plan import Plan
    from candle_p1.studies.planned import PlannedRun


def plan_lines(plan: Plan, states: Sequence[RunState]) -> Iterator[str]:
    """Yields what a study is, its runs in their order, and what those that are left will take."""
    size = plan.study.sizes[plan.size]
    yield f"{plan.study.name}, {plan.size}: {plan.study.title}"
    if plan.study.shows:
        yield f"shows: {', '.join(plan.study.shows)}"
    yield f"results: {plan.directory}"
    yield f"each run at most {size.minutes} min"
    for i, state in enumerate(states, start=1):
        done = "" if state.status not in (OK, FAILED) else f"  # {state.status}"
        yield f"{i:>{len(str(len(states)))}}  {state.run.name}: {as_typed(state.run)}{done}"
    left = [state.run for state in states if state.is_due()]
    if left:
        yield cost(left, measured(states)).explain()
    elif num_submitted := sum(state.status == SUBMITTED for state in states):
        yield f"{num_submitted} submitted as jobs; nothing else is left to do"
    else:
        yield "nothing is left to do"


def as_typed(run: PlannedRun) -> str:
    """Returns a run as a user would type it, with the flags that the study sets."""
    variables = [f"{name}={value}" for name, value in run.variables.items()]
    ranks = ["--np", str(run.num_ranks)] if run.num_ranks > 1 else []
    name = find_benchmark(run.benchmark).name if os.sep not in run.benchmark else run.benchmark
    return shlex.join([*variables, "candle-p1", "run", name, *ranks, "--", *words_of(run.flags)])


def status_parts(plan: Plan, states: Sequence[RunState]) -> Iterator[str | Table]:
    """Yields how far a study is: a table of its points, runs that failed, and what is left."""
    table = Table(title=f"{plan.study.name}, {plan.size}", box=box.SIMPLE, title_justify="left")
    table.add_column("point")
    statuses = [name for name in STATUSES if any(state.status == name for state in states)]
    for name in [*statuses, "median total (s)"]:
        table.add_column(name, justify="right")
    points: dict[tuple[str, int], list[RunState]] = {}
    for state in states:
        points.setdefault((state.run.series, state.run.num_ranks), []).append(state)
    for of_point in (points[key] for key in sorted(points)):
        totals_s = [each.total_s for each in measured(of_point)]
        table.add_row(
            of_point[0].run.point,
            *(str(sum(state.status == name for state in of_point)) for name in statuses),
            f"{statistics.median(totals_s):.1f}" if totals_s else "",
        )
    yield table
    for state in states:
        if state.status == FAILED and state.directory:
            yield f"{result_line(state)}; see {state.directory / LOG_NAME}"
    left = [state.run for state in states if state.is_due()]
    num = {status: sum(state.status == status for state in states) for status in STATUSES}
    told = [f"{num[OK]} of {len(states)} runs are done"]
    for status, words in ((RUNNING, "under way"), (SUBMITTED, "submitted"), (FAILED, "failed")):
        told += [f"{num[status]} {words}"] * bool(num[status])
    end = f"; left: {cost(left, measured(states)).explain()}" if left else ""
    yield ", ".join(told) + end


def spent(states: Sequence[RunState]) -> str:
    """Returns what the runs that are done have taken, in words."""
    return duration(sum(each.total_s for each in measured(states)))
