"""Two runs, or two sets of runs, side by side: what differs, and the effect on the numbers.

Where the runs of a set differ in settings or numbers of ranks, runs of both sets that agree in them
are compared, and nothing is averaged over them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import pandas as pd

from candle_p1.errors import ParameterError
from candle_p1.parameters.catalog import role_of
from candle_p1.parameters.parameter import Role
from candle_p1.reports import experiments as ex
from candle_p1.reports import statistics as stat
from candle_p1.reports.experiments import Quantity
from candle_p1.reports.frame import ENGINE, HOROVOD, Run, load_frame
from candle_p1.reports.render import ReportTable
from candle_p1.reports.statistics import contents, listed
from candle_p1.text import count

LOWER, HIGHER, SINGLE = "B is lower", "B is higher", "single run"
ABSENT = "absent"
PARAMETER, REPEAT, PLACE = "parameter", "repeat", "place or logging"
KINDS = (PARAMETER, "plan", "machine", "version", REPEAT, PLACE)
"""Of differences, in the order in which they are listed."""

ROLES = {Role.LEARNING: PARAMETER, Role.SPEED: PARAMETER, Role.SEED: REPEAT}
"""The kinds of differences by the roles of parameters; those of others are the last kind."""

OF_MACHINE = {
    "ranks": "num_ranks",
    "nodes": "num_nodes",
    "threads of a rank": "threads",
    **{name: name for name in (ex.JIT, "hosts", "cpu", "num_cores", "memory_gib", "devices")},
}
"""The columns that are differences of machines, by what they are called."""


@dataclass(frozen=True, eq=False)
class Side:
    """One of the two sets of runs that are compared, as the user called it."""

    name: str
    runs: tuple[Run, ...]

    @cached_property
    def all_runs(self) -> pd.DataFrame:
        """All of its runs, as a table."""
        return load_frame(self.runs)

    @cached_property
    def timed(self) -> pd.DataFrame:
        """The runs whose numbers are compared: unperturbed ones, or else perturbed ones."""
        finished = self.all_runs[self.all_runs["status"] == "ok"]
        unperturbed = ex.timed(finished)
        return unperturbed if len(unperturbed) else finished


@dataclass(frozen=True)
class Row:
    """A quantity, its values on both sides, and whether their ratio or difference is told."""

    quantity: Quantity
    a: tuple[float, ...]
    b: tuple[float, ...]
    is_ratio: bool

    @cached_property
    def change(self) -> stat.Estimate | None:
        """B / A or, of a figure of merit, B - A; None where it is not known."""
        if not (self.a and self.b):
            return None
        if not self.is_ratio:
            return stat.estimate_difference(self.b, self.a)
        is_positive = min(*self.a, *self.b) > ex.MIN_IN_RATIO
        return stat.estimate_ratio(self.b, self.a) if is_positive else None

    @property
    def verdict(self) -> str:
        """LOWER or HIGHER where a 95 % interval excludes no change; otherwise why not."""
        if self.change is None:
            return "only on one side" if not (self.a and self.b) else "no ratio: 0 or less"
        if self.change.num == (1, 1):
            return SINGLE
        return self.change.claim(1 if self.is_ratio else 0, HIGHER, LOWER)

    @property
    def medians(self) -> list[stat.Estimate | None]:
        """The medians of both sides."""
        return [stat.estimate_median(v) if v else None for v in (self.a, self.b)]

    def to_dict(self) -> dict[str, Any]:
        """Returns the row as plain values for JSON."""
        sides = {
            name: {"median": each.value if each else None, "values": values}
            for name, each, values in zip("ab", self.medians, (self.a, self.b), strict=True)
        }
        change = asdict(self.change) if self.change else None
        kind = "ratio" if self.is_ratio else "difference"
        return asdict(self.quantity) | sides | {kind: change, "verdict": self.verdict}


class Difference(NamedTuple):
    """Something that differs between the sides, with its values in words; `kind` is in KINDS."""

    kind: str
    name: str
    a: str
    b: str


@dataclass(frozen=True)
class RunComparison:
    """A comparison of two sets of runs; the warnings say what makes the numbers hard to compare.

    The pairings are of runs of both sides that agree in the settings that differ within a side;
    they are by these settings, in words.
    """

    a: Side
    b: Side
    pairings: dict[str, list[Row]]
    differences: tuple[Difference, ...]
    warnings: tuple[str, ...]

    def render(self) -> Iterator[str | ReportTable]:
        """Yields the warnings, the numbers and the differences, for the terminal."""
        for name, side in (("A", self.a), ("B", self.b)):
            yield f"{name}: {side.name}, {count(len(side.timed), 'run')}"
        yield from (f"warning: {warning}" for warning in self.warnings)
        headings = ("quantity", "A", "B", "B / A", "")
        for settings, rows in self.pairings.items():
            cells = [(r.quantity.heading, *r.medians, r.change, r.verdict) for r in rows]
            yield ReportTable("", settings, headings, cells)
        yield f"Medians, and B / A, or B - A for quality. {contents()['legend']}"
        if self.differences:
            yield ReportTable("", "differences", ("kind", "name", "A", "B"), self.differences)
        else:
            yield "no difference in parameters, plan, machine or versions"

    def to_dict(self) -> dict[str, Any]:
        """Returns the comparison as plain values for JSON."""
        sides = {
            name: {
                "name": side.name,
                "num_runs": len(side.timed),
                "num_left_out": len(side.runs) - len(side.timed),
                "records": side.timed["record"].tolist(),
            }
            for name, side in (("a", self.a), ("b", self.b))
        }
        return sides | {
            "warnings": list(self.warnings),
            "comparisons": [
                {"settings": settings, "quantities": [row.to_dict() for row in rows]}
                for settings, rows in self.pairings.items()
            ],
            "differences": [difference._asdict() for difference in self.differences],
        }


def compare(a: Side, b: Side) -> RunComparison:
    """Returns the comparison.

    Raises:
        ParameterError: The benchmarks differ, a side has no finished run, or no runs of both sides
            have the same settings.
    """
    names = [sorted({run["benchmark"] for run in side.runs}) for side in (a, b)]
    if names[0] != names[1] or len(names[0]) > 1:
        raise ParameterError(
            f"{a.name} holds runs of {listed(names[0])}, {b.name} of {listed(names[1])}: name runs"
            " of the same benchmark"
        )
    for side in (a, b):
        if not any(run["status"] == "ok" for run in side.runs):
            raise ParameterError(
                f"{side.name}: no run has finished, so there is nothing to compare"
            )
    pairings, unpaired = _pair(a, b)
    if not pairings:
        raise ParameterError(
            f"no runs of {a.name} and {b.name} have the same settings: {'; '.join(unpaired)}. Name"
            " runs with the same settings and numbers of ranks"
        )
    warnings = (*_caveats(a, b), *unpaired)
    return RunComparison(a, b, pairings, tuple(_differences(a, b)), warnings)


def _pair(a: Side, b: Side) -> tuple[dict[str, list[Row]], list[str]]:
    varied = _varied(a.timed["run"]) | _varied(b.timed["run"])
    groups = [_grouped(side.timed["run"], varied) for side in (a, b)]
    keys = groups[0].keys() | groups[1].keys()
    pairings, unpaired = dict[str, list[Row]](), []
    for key in sorted(keys, key=lambda key: [ex.by_value(value) for _, value in key]):
        settings = ex.describe(dict(key))
        of_a, of_b = (group.get(key) for group in groups)
        if of_a and of_b:
            pairings[settings] = _rows(load_frame(of_a), load_frame(of_b))
        else:
            unpaired.append(f"only {(a if of_a else b).name} has runs with {settings}")
    return pairings, unpaired


def _settings(run: Run) -> dict[str, Any]:
    placement = {ex.THREADS: run["threads"], ex.JIT: run["jit_compile"], "nodes": run["num_nodes"]}
    machine = {"machine": str(run["machine"])}
    return {"ranks": run["num_ranks"], **run["settings"], **placement, **machine}


def _varied(runs: Iterable[Run]) -> set[str]:
    """Returns the settings in which runs differ.

    Horovod's settings, threads, nodes and jit_compile usually follow from the number of ranks; they
    count only where they differ on the same number of ranks.
    """

    def follows(name: str) -> bool:
        return name.startswith(HOROVOD) or name in (ex.THREADS, "nodes", ex.JIT)

    return ex.varying(
        (name, follows(name) and run["num_ranks"], value)
        for run in runs
        for name, value in _settings(run).items()
    )


def _grouped(runs: Iterable[Run], varied: set[str]) -> dict[Any, list[Run]]:
    groups = defaultdict(list)
    for run in runs:
        settings = _settings(run)
        groups[tuple((name, settings.get(name, ABSENT)) for name in sorted(varied))].append(run)
    return groups


def _rows(a: pd.DataFrame, b: pd.DataFrame) -> list[Row]:
    """Returns total, phases in their order, further times, energies, and quality."""
    runs = load_frame([*a["run"], *b["run"]])
    phases = list(dict.fromkeys(name for run in runs["run"] for name in run.record.phases or ()))
    measured = [ex.TOTAL, *map(ex.phase_time, phases), ex.BROADCAST, ex.WAIT]
    measured += [ex.TRANSFER, ex.EPOCH, ex.SAMPLES, ex.COMMUNICATION]
    if len(ex.covered(runs)) == 1:
        of_phases = (Quantity(f"energy_{name}_j", f"energy of {name}", "J") for name in phases)
        measured += [replace(ex.ENERGY, title="energy of the run"), *of_phases]
        measured.append(replace(ex.POWER, title="mean power of the run"))
        pairs = ex.POWER_AND_ENERGY
        measured += [ex.labelled(each, runs) for pair in pairs for each in pair]

    def row(quantity: Quantity, *, is_ratio: bool) -> Row:
        return Row(quantity, tuple(ex.known(a, quantity)), tuple(ex.known(b, quantity)), is_ratio)

    rows = [row(quantity, is_ratio=True) for quantity in measured]
    rows = [each for each in rows if any(each.a) or any(each.b)]
    figures = dict.fromkeys(name for names in runs["merits"] for name in names)
    merits = [ex.quality_on_test(name) for name in figures if ex.known(runs, f"test_{name}")]
    return rows + [row(quantity, is_ratio=False) for quantity in merits]


def _differences(a: Side, b: Side) -> list[Difference]:
    facts: list[dict[Any, dict[str, None]]] = [defaultdict(dict), defaultdict(dict)]
    for side, words in zip((a, b), facts, strict=True):
        for run in side.runs:
            for key, value in _facts(run).items():
                words[key][str(value)] = None  # each once, in order of appearance
    found = []
    for kind, name in facts[0].keys() | facts[1].keys():
        values = [list(words[kind, name]) for words in facts]
        if sorted(values[0]) != sorted(values[1]):
            of_kind = ROLES.get(role_of(name), PLACE) if kind == PARAMETER else kind
            found.append(Difference(of_kind, name, *(", ".join(v) or ABSENT for v in values)))
    return sorted(found, key=lambda each: (KINDS.index(each.kind), each.name))


def _facts(run: Run) -> dict[tuple[str, str], Any]:
    environment = run.record.environment
    of_machine = {name: run[column] for name, column in OF_MACHINE.items()}
    of_machine |= {"launcher": run.record.launcher}
    of_machine |= environment.settings if environment else {}
    of_machine |= {k: v for k, v in run["settings"].items() if k.startswith(HOROVOD)}
    found = {("machine", name): v for name, v in of_machine.items() if v is not None}
    for column, value in run.facts.items():
        kind, _, name = column.partition("_")
        if kind in (PARAMETER, "plan", "version"):
            found[kind, name] = value
    # The parameter "auto" does not say which engine was used.
    return found | ({(PARAMETER, ENGINE): run["engine"]} if run["engine"] else {})


def _caveats(a: Side, b: Side) -> Iterator[str]:
    """Yields what makes the numbers hard to compare, in sentences without a full stop."""
    sides = (a, b)
    kinds = [set(side.timed["synthetic"]) for side in sides]
    for column, what in contents()["caveats"].items():
        values = _words_of(sides, column)
        if all(values) and values[0] != values[1]:
            if column == "data" and kinds[0] != kinds[1]:
                what = "synthetic data are compared with real data"
            yield f"{what}: A {listed(values[0])}; B {listed(values[1])}"
    seeds, ranks = (_words_of(sides, name) for name in ("parameter_data_seed", "num_ranks"))
    if kinds == [{True}, {True}] and seeds[0] != seeds[1]:
        yield "the synthetic data have different seeds"
    if len(ranks[0]) == len(ranks[1]) == 1 and ranks[0] != ranks[1]:
        yield f"the numbers of ranks differ: A {ranks[0][0]}, B {ranks[1][0]}"
    energies = [sorted(ex.energy_kinds(side.timed)) for side in sides]
    if all(energies) and energies != [["measured"], ["measured"]]:
        yield f"energy is {listed(energies[0])} in A and {listed(energies[1])} in B"
    parts = [ex.covered(side.timed) for side in sides]
    if len({*parts[0], *parts[1]}) > 1:
        words = ["; ".join(each) or "unknown" for each in parts]
        yield (
            "energies cover different parts of the machine and are not compared:"
            f" A {words[0]}; B {words[1]}"
        )
    for name, side in (("A", a), ("B", b)):
        if reasons := sorted(set(ex.known(side.timed, "perturbed_by"))):
            yield f"{name} was {listed(reasons)}, which changes the times of a run"
        finished = side.all_runs["status"] == "ok"
        if num := int(finished.sum()) - len(side.timed):
            yield f"{name}: {count(num, 'run')} left out, traced, profiled or continued"
        if num := int((~finished).sum()):
            states = listed(sorted(set(side.all_runs.loc[~finished, "status"])))
            yield f"{name}: {count(num, 'run')} left out, {states}"
    both = {run.path for run in a.runs} & {run.path for run in b.runs}
    if both:
        yield f"{count(len(both), 'run')} in A and also in B"


def _words_of(sides: Iterable[Side], column: str) -> list[list[str]]:
    return [sorted({str(value) for value in ex.known(side.timed, column)}) for side in sides]
