"""What makes the numbers of two sets of runs hard to compare."""

from __future__ import annotations

from typing import TYPE_CHECKING

from candle_p1.reports.quantities import covered
from candle_p1.reports.words import listed
from candle_p1.text import count

if TYPE_CHECKING:
    from candle_p1.reports.sides import Side


def caveats(a: Side, b: Side) -> list[str]:
    """Returns what makes the numbers hard to compare, in sentences without a full stop."""
    found = []
    kinds = [{run.synthetic for run in side.timed} for side in (a, b)]
    data = [sorted({str(run.data) for run in side.timed}) for side in (a, b)]
    if kinds[0] != kinds[1]:
        found.append(f"synthetic data against real ones: A {listed(data[0])}; B {listed(data[1])}")
    elif data[0] != data[1]:
        found.append(f"other data: A {listed(data[0])}; B {listed(data[1])}")
    seeds = [{run.parameters.get("data_seed") for run in side.timed} for side in (a, b)]
    if kinds == [{True}, {True}] and seeds[0] != seeds[1]:
        found.append("synthetic data of other seeds")
    machines = [sorted({str(run.machine) for run in side.timed}) for side in (a, b)]
    if machines[0] != machines[1]:
        found.append(f"other machine: A {listed(machines[0])}; B {listed(machines[1])}")
    elif len(machines[0]) > 1:
        found.append(f"either side has runs of several machines: {'; '.join(machines[0])}")
    ranks = [sorted({run.num_ranks for run in side.timed}) for side in (a, b)]
    if len(ranks[0]) == len(ranks[1]) == 1 and ranks[0] != ranks[1]:
        found.append(f"other number of workers: A {ranks[0][0]}, B {ranks[1][0]}")
    energies = [
        sorted({run.energy_kind for run in side.timed if run.energy_j is not None})
        for side in (a, b)
    ]
    if all(energies) and energies != [["measured"], ["measured"]]:
        found.append(f"energy is {listed(energies[0])} in A and {listed(energies[1])} in B")
    if len(covered([*a.timed, *b.timed])) > 1:
        parts = ["; ".join(covered(side.timed)) or "unknown" for side in (a, b)]
        found.append(f"energy is of other parts, not compared: A {parts[0]}; B {parts[1]}")
    for name, side in (("A", a), ("B", b)):
        found += _caveats_about(name, side)
    both = {run.path for run in a.runs} & {run.path for run in b.runs}
    if both:
        found.append(f"{count(len(both), 'run')} in A and in B")
    return found


def _caveats_about(name: str, side: Side) -> list[str]:
    found = []
    reasons = sorted({run.disturbed for run in side.timed if run.disturbed})
    left_out = [run for run in side.runs if run.status == "ok" and run not in side.timed]
    unfinished = [run for run in side.runs if run.status != "ok"]
    if reasons:
        found.append(f"{name} was {listed(reasons)}, which slows a run down")
    if left_out:
        found.append(f"{name}: {count(len(left_out), 'run')} left out, traced or profiled")
    if unfinished:
        states = listed(sorted({run.status for run in unfinished}))
        found.append(f"{name}: {count(len(unfinished), 'run')} left out, {states}")
    return found
