"""Two runs, or two sets of runs, side by side: what differs, and the effect on the numbers.

Where the runs of a set differ in settings or numbers of ranks, runs of both sets that agree in them
are compared, and nothing is averaged over them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from candle_p1.errors import ParameterError
from candle_p1.parameters.catalog import role_of
from candle_p1.parameters.parameter import Role
from candle_p1.reports.points import JIT, MIN_IN_RATIO, THREADS, by_value, describe
from candle_p1.reports.quantities import (
    BROADCAST,
    COMMUNICATION,
    ENERGY,
    EPOCH,
    POWER,
    POWER_AND_ENERGY,
    SAMPLES,
    TOTAL,
    TRANSFER,
    WAIT,
    Quantity,
    covered,
    known_values,
    labelled,
    phase_time,
    quality_on_test,
)
from candle_p1.reports.runs import ENGINE
from candle_p1.reports.sides import caveats
from candle_p1.reports.statistics import estimate_difference, estimate_ratio
from candle_p1.reports.words import listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from candle_p1.reports.runs import RecordedRun
    from candle_p1.reports.sides import Side
    from candle_p1.reports.statistics import Estimate

LOWER, HIGHER, SINGLE = "B is lower", "B is higher", "single run"
RANKS, NODES, MACHINE = "ranks", "nodes", "machine"
"""The names of these among the settings."""

ABSENT = "absent"
PARAMETER, REPEAT = "parameter", "repeat"
KINDS = (PARAMETER, "plan", "machine", "version", REPEAT, "place or logging")
"""Of differences, in the order in which they are listed."""

ROLES = {Role.LEARNING: PARAMETER, Role.SPEED: PARAMETER, Role.SEED: REPEAT}
"""The kinds of differences by the roles of parameters; those of others are the last kind."""


@dataclass(frozen=True)
class Row:
    """A quantity with its values on both sides.

    Attributes:
        change: B / A, or B - A for a figure of merit; None where it is unknown.
        is_ratio: Whether `change` is a ratio.
    """

    quantity: Quantity
    a: tuple[float, ...]
    b: tuple[float, ...]
    change: Estimate | None
    is_ratio: bool

    @property
    def verdict(self) -> str:
        """LOWER or HIGHER where a 95 % interval excludes no change; otherwise why not."""
        if self.change is None:
            return "only on one side" if not (self.a and self.b) else "no ratio: 0 or less"
        if self.change.num == (1, 1):
            return SINGLE
        return self.change.claim(1 if self.is_ratio else 0, HIGHER, LOWER)

    def to_dict(self) -> dict[str, Any]:
        """Returns the row as plain values for JSON."""
        sides = {
            name: {"median": median(values) if values else None, "values": values}
            for name, values in (("a", self.a), ("b", self.b))
        }
        return {
            "name": self.quantity.name,
            "title": self.quantity.title,
            "unit": self.quantity.unit,
            **sides,
            "ratio" if self.is_ratio else "difference": asdict(self.change)
            if self.change
            else None,
            "verdict": self.verdict,
        }


@dataclass(frozen=True)
class Pairing:
    """Runs of both sides that belong together.

    Attributes:
        settings: Those that differ among the runs of a side, and agree here; "" where none do.
    """

    settings: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Difference:
    """Something that differs between the sides, with its values in words; `kind` is in KINDS."""

    kind: str
    name: str
    a: str
    b: str


@dataclass(frozen=True)
class RunComparison:
    """A comparison of two sets of runs.

    Attributes:
        pairings: At least one.
        differences: By kind and name.
        warnings: What makes the numbers hard to compare.
    """

    a: Side
    b: Side
    pairings: tuple[Pairing, ...]
    differences: tuple[Difference, ...]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the comparison as plain values for JSON."""
        return {
            "a": self.a.to_dict(),
            "b": self.b.to_dict(),
            "warnings": list(self.warnings),
            "comparisons": [
                {"settings": pairing.settings, "quantities": [r.to_dict() for r in pairing.rows]}
                for pairing in self.pairings
            ],
            "differences": [asdict(difference) for difference in self.differences],
        }


def compare(a: Side, b: Side) -> RunComparison:
    """Returns the comparison.

    Raises:
        ParameterError: The benchmarks differ, a side has no finished run, or no runs of both sides
            have the same settings.
    """
    _check_benchmarks(a, b)
    for side in (a, b):
        if not side.timed:
            raise ParameterError(
                f"{side.name}: no run has finished, so there is nothing to compare"
            )
    pairings, unpaired = _pair(a, b)
    if not pairings:
        raise ParameterError(
            f"no runs of {a.name} and {b.name} have the same settings: {'; '.join(unpaired)}. Name"
            " runs with the same settings and numbers of ranks"
        )
    warnings = (*caveats(a, b), *unpaired)
    return RunComparison(a, b, tuple(pairings), tuple(_differences(a, b)), warnings)


def _check_benchmarks(a: Side, b: Side) -> None:
    names = [sorted({run.benchmark for run in side.runs}) for side in (a, b)]
    if names[0] != names[1] or len(names[0]) > 1:
        raise ParameterError(
            f"{a.name} holds runs of {listed(names[0])}, {b.name} of {listed(names[1])}: name runs"
            " of the same benchmark"
        )


def _pair(a: Side, b: Side) -> tuple[list[Pairing], list[str]]:
    """Returns what is compared, and sentences about runs without a counterpart."""
    varied = _varied(a.timed) | _varied(b.timed)
    groups = [_grouped(side.timed, varied) for side in (a, b)]
    keys = groups[0].keys() | groups[1].keys()
    pairings, unpaired = [], []
    for key in sorted(keys, key=lambda key: [by_value(value) for _, value in key]):
        settings = describe(dict(key))
        of_a, of_b = (group.get(key) for group in groups)
        if of_a and of_b:
            pairings.append(Pairing(settings, tuple(_rows(of_a, of_b))))
        else:
            unpaired.append(f"only {(a if of_a else b).name} has runs with {settings}")
    return pairings, unpaired


def _settings(run: RecordedRun) -> dict[str, Any]:
    return {
        RANKS: run.num_ranks,
        **run.settings,
        **run.horovod_settings,
        THREADS: run.threads,
        JIT: run.jit_compile,
        NODES: run.num_nodes,
        MACHINE: str(run.machine),
    }


def _varied(runs: Sequence[RecordedRun]) -> set[str]:
    """Returns the settings in which runs differ.

    Horovod's settings, threads, nodes and jit_compile usually follow from the number of ranks; they
    count only where they differ on the same number of ranks.
    """
    values: dict[Any, set[str]] = defaultdict(set)
    for run in runs:
        for name, value in _settings(run).items():
            follows = name in run.horovod_settings or name in (THREADS, NODES, JIT)
            values[name, run.num_ranks if follows else None].add(repr(value))
    return {name for (name, _), found in values.items() if len(found) > 1}


def _grouped(runs: Sequence[RecordedRun], varied: set[str]) -> dict[Any, list[RecordedRun]]:
    groups = defaultdict(list)
    for run in runs:
        settings = _settings(run)
        key = tuple((name, settings.get(name, ABSENT)) for name in sorted(varied))
        groups[key].append(run)
    return groups


def _rows(a: Sequence[RecordedRun], b: Sequence[RecordedRun]) -> list[Row]:
    """Returns total, phases in their order, further times, energies, and quality."""
    runs = [*a, *b]
    phases = list(dict.fromkeys(name for run in runs for name in run.phase_s))
    measured = [TOTAL, *map(phase_time, phases), BROADCAST, WAIT, TRANSFER]
    measured += [EPOCH, SAMPLES, COMMUNICATION]
    if len(covered(runs)) == 1:
        measured += [replace(ENERGY, title="energy of the run"), *map(_phase_energy, phases)]
        measured.append(replace(POWER, title="mean power of the run"))
        measured += [labelled(each, runs) for pair in POWER_AND_ENERGY for each in pair]
    rows = [_row(quantity, a, b, is_ratio=True) for quantity in measured]
    rows = [row for row in rows if any(row.a) or any(row.b)]
    figures = dict.fromkeys(name for run in runs for name in run.quality)
    return rows + [_row(quality_on_test(name), a, b, is_ratio=False) for name in figures]


def _phase_energy(phase: str) -> Quantity:
    return Quantity(f"energy_{phase}_j", f"energy of {phase}", "J", lambda run: run.phase_j(phase))


def _row(
    quantity: Quantity, a: Sequence[RecordedRun], b: Sequence[RecordedRun], *, is_ratio: bool
) -> Row:
    values = [tuple(known_values(runs, quantity)) for runs in (a, b)]
    change = None
    if all(values):
        if not is_ratio:
            change = estimate_difference(values[1], values[0])
        elif min(*values[0], *values[1]) > MIN_IN_RATIO:
            change = estimate_ratio(values[1], values[0])
    return Row(quantity, values[0], values[1], change, is_ratio)


def _differences(a: Side, b: Side) -> list[Difference]:
    found = []
    for kind, facts in (
        (PARAMETER, _parameters),
        ("plan", lambda run: run.plan),
        ("machine", _machine),
        ("version", lambda run: run.versions),
    ):
        of_sides = [_values(facts(run) for run in side.runs) for side in (a, b)]
        for name in sorted(of_sides[0].keys() | of_sides[1].keys()):
            values = [side.get(name, []) for side in of_sides]
            if sorted(values[0]) != sorted(values[1]):
                words = [", ".join(each) or ABSENT for each in values]
                kind_of = (
                    ROLES.get(role_of(name), "place or logging") if kind == PARAMETER else kind
                )
                found.append(Difference(kind_of, name, words[0], words[1]))
    return sorted(found, key=lambda each: (KINDS.index(each.kind), each.name))


def _values(facts: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Returns the values of each fact in words, each once, in order of appearance."""
    values: dict[str, dict[str, None]] = defaultdict(dict)
    for each in facts:
        for name, value in each.items():
            values[name][str(value)] = None
    return {name: list(found) for name, found in values.items()}


def _parameters(run: RecordedRun) -> Mapping[str, Any]:
    """Returns the parameters, with the engine that was used: "auto" does not say which."""
    return run.parameters if run.engine is None else {**run.parameters, ENGINE: run.engine}


def _machine(run: RecordedRun) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "ranks": run.num_ranks,
        "nodes": run.num_nodes,
        "launcher": run.record.launcher,
        "threads of a rank": run.threads,
        JIT: run.jit_compile,
        "hosts": " ".join(run.hosts) or None,
    }
    if run.machine:
        facts |= run.machine._asdict() | {"devices": ", ".join(run.machine.devices)}
    environment = run.record.environment
    facts |= (environment.settings if environment else {}) | dict(run.horovod_settings)
    return {name: value for name, value in facts.items() if value is not None}
