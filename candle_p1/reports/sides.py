"""The two sides of a comparison, and the caveats that apply to it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from candle_p1.reports.quantities import covered
from candle_p1.reports.words import listed
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from candle_p1.reports.runs import RecordedRun

SPEED_SETTINGS: Mapping[str, Callable[[RecordedRun], object]] = {
    "engine (what averaged the gradients)": lambda run: run.engine,
    "deterministic (whether runs repeat bit for bit)": lambda run: run.repeats_exactly,
    "Horovod's fusion": lambda run: run.fusion,
    "jit_compile (whether XLA compiled the training step)": lambda run: run.jit_compile,
}
"""Settings that differ between a laptop and a cluster, or with the ranks, and affect times."""


@dataclass(frozen=True, eq=False)
class Side:
    """One of the two sets of runs that are compared.

    Attributes:
        name: What the user called it.
        runs: All of its runs, by start.
    """

    name: str
    runs: tuple[RecordedRun, ...]

    @cached_property
    def timed(self) -> tuple[RecordedRun, ...]:
        """The runs whose numbers are compared: undisturbed ones, or else disturbed ones."""
        finished = [run for run in self.runs if run.status == "ok"]
        return tuple(run for run in finished if run.is_timed) or tuple(finished)

    def to_dict(self) -> dict[str, Any]:
        """Returns the side as plain values for JSON."""
        return {
            "name": self.name,
            "num_runs": len(self.timed),
            "num_left_out": len(self.runs) - len(self.timed),
            "records": [run.place for run in self.timed],
        }

    def distinct(self, attribute: Callable[[RecordedRun], object]) -> list[str]:
        """Returns what the timed runs have, each value once and as text."""
        return sorted({str(attribute(run)) for run in self.timed})


def caveats(a: Side, b: Side) -> list[str]:
    """Returns what makes the numbers hard to compare, in sentences without a full stop."""
    found = []
    sides = (a, b)
    data = [listed(side.distinct(lambda run: run.data)) for side in sides]
    kinds = [{run.synthetic for run in side.timed} for side in sides]
    if kinds[0] != kinds[1]:
        found.append(f"synthetic data are compared with real data: A {data[0]}; B {data[1]}")
    elif data[0] != data[1]:
        found.append(f"the data differ: A {data[0]}; B {data[1]}")
    seeds = [side.distinct(lambda run: run.parameters.get("data_seed")) for side in sides]
    if kinds == [{True}, {True}] and seeds[0] != seeds[1]:
        found.append("the synthetic data have different seeds")
    machines = [side.distinct(lambda run: run.machine) for side in sides]
    if machines[0] != machines[1]:
        found.append(f"the machines differ: A {listed(machines[0])}; B {listed(machines[1])}")
    elif len(machines[0]) > 1:
        found.append(f"both sides have runs on several machines: {'; '.join(machines[0])}")
    for what, attribute in SPEED_SETTINGS.items():
        known = [
            {str(v) for run in side.timed if (v := attribute(run)) is not None} for side in sides
        ]
        if all(known) and known[0] != known[1]:
            words = [listed(sorted(values)) for values in known]
            found.append(f"{what} differs, which affects times: A {words[0]}; B {words[1]}")
    ranks = [side.distinct(lambda run: run.num_ranks) for side in sides]
    if len(ranks[0]) == len(ranks[1]) == 1 and ranks[0] != ranks[1]:
        found.append(f"the numbers of ranks differ: A {ranks[0][0]}, B {ranks[1][0]}")
    energies = [
        sorted({run.energy_kind for run in side.timed if run.energy_j is not None})
        for side in sides
    ]
    if all(energies) and energies != [["measured"], ["measured"]]:
        found.append(f"energy is {listed(energies[0])} in A and {listed(energies[1])} in B")
    if len(covered([*a.timed, *b.timed])) > 1:
        parts = ["; ".join(covered(side.timed)) or "unknown" for side in sides]
        found.append(
            "energies cover different parts of the machine and are not compared:"
            f" A {parts[0]}; B {parts[1]}"
        )
    for name, side in (("A", a), ("B", b)):
        found += _caveats_about(name, side)
    both = {run.path for run in a.runs} & {run.path for run in b.runs}
    if both:
        found.append(f"{count(len(both), 'run')} in A and also in B")
    return found


def _caveats_about(name: str, side: Side) -> list[str]:
    found = []
    reasons = sorted({run.disturbed for run in side.timed if run.disturbed})
    left_out = [run for run in side.runs if run.status == "ok" and run not in side.timed]
    unfinished = [run for run in side.runs if run.status != "ok"]
    if reasons:
        found.append(f"{name} was {listed(reasons)}, which changes the times of a run")
    if left_out:
        found.append(
            f"{name}: {count(len(left_out), 'run')} left out, traced, profiled or continued"
        )
    if unfinished:
        states = listed(sorted({run.status for run in unfinished}))
        found.append(f"{name}: {count(len(unfinished), 'run')} left out, {states}")
    return found
