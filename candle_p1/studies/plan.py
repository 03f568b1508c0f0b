"""The plan of a study: its runs, in the order in which they are executed.

The order is that of randomised complete blocks: every point once in random order, then every point
again, so that a slow hour of the machine affects all points alike. The position of a run within its
block depends only on the SHA-256 of seed, repeat and point. It is therefore the same on every
machine, and neither omitting points nor adding repeats changes the order of the others.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from candle_p1.benchmark import find_benchmark
from candle_p1.errors import ParameterError, UnknownFlagError
from candle_p1.files import expand_user
from candle_p1.parameters.catalog import role_of
from candle_p1.parameters.parameter import Role
from candle_p1.scaling import epochs_of_ranks
from candle_p1.studies.planned_run import PlannedRun, to_argv

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from candle_p1.benchmark import Benchmark
    from candle_p1.parameters.parameter_set import ParameterSet
    from candle_p1.studies.study_file import Size, Study

MAX_RUNS = 10_000


@dataclass(frozen=True)
class Choice:
    """What the user has chosen about a study; None leaves the study's own value.

    Attributes:
        size: One of its sizes; None selects the first.
        ranks: Numbers of ranks.
        repeats: Runs of each point.
        seed: Seed of the order.
        flags: Flags of the benchmark for all runs, as command-line arguments.
    """

    size: str | None = None
    ranks: Sequence[int] | None = None
    repeats: int | None = None
    seed: int | None = None
    flags: Sequence[str] = ()


@dataclass(frozen=True)
class Plan:
    """The runs of a study.

    Attributes:
        study: The study.
        size: The name of its size.
        choice: What the user has chosen.
        directory: Where the results go.
        runs: In the order in which they are executed.
    """

    study: Study
    size: str
    choice: Choice
    directory: Path
    runs: Sequence[PlannedRun]

    @property
    def most_ranks(self) -> int:
        """The number of ranks of the largest run."""
        return max(run.num_ranks for run in self.runs)


def make_plan(study: Study, choice: Choice, output: Path, directory: Path | None = None) -> Plan:
    """Returns the runs of a study.

    Args:
        study: The study.
        choice: What the user has chosen.
        output: Where the results of studies go; this one's go to ``<study>-<size>`` in it.
        directory: Where they are instead, if they were moved.

    Raises:
        ParameterError: The study has no such size, a parameter or a flag is wrong, the epochs
            cannot be divided among the ranks, or two points are the same run.
        DataError: A data file does not exist.
    """
    name, size = study.size(choice.size)
    directory = directory or expand_user(output).absolute() / f"{study.name}-{name}"
    repeats = size.repeats if choice.repeats is None else choice.repeats
    _check_number(study, size, choice, repeats)
    first = [
        run
        for benchmark in study.benchmark
        for run in _points(study, size, benchmark, choice, directory)
    ]
    _check_distinct(study, first)
    seed = study.seed if choice.seed is None else choice.seed
    runs = [
        _repeat(run, repeat)
        for repeat in range(repeats)
        for run in sorted(first, key=lambda run, repeat=repeat: _position(seed, repeat, run))  # type: ignore[misc]
    ]
    return Plan(study, name, choice, directory, runs)


def _check_number(study: Study, size: Size, choice: Choice, repeats: int) -> None:
    """Raises an error if a study has more runs than anybody could wait for."""
    varied = [*size.vary.values(), *size.environment.values()]
    number = repeats * len(study.benchmark) * len(size.variants) * prod(map(len, varied))
    number *= len(choice.ranks or size.ranks) * max(1, len(size.threads))
    if number > MAX_RUNS:
        raise ParameterError(
            f"{study.path}: these would be {number:.3g} runs; a study has at most {MAX_RUNS:,}"
        )


def _points(
    study: Study, size: Size, benchmark: str, choice: Choice, directory: Path
) -> Iterator[PlannedRun]:
    """Yields the first run of every point of a benchmark."""
    found = find_benchmark(benchmark)
    chosen = _chosen_flags(found, choice.flags, size)
    all_threads: list[int | None] = [*size.threads] or [None]
    for variant, values, variables, threads in product(
        size.variants, _crossed(size.vary), _crossed(size.environment), all_threads
    ):
        flags = {**size.flags, **chosen, **variant.flags, **values}
        series = _series(
            [found.name] * (len(study.benchmark) > 1) + [variant.name] * bool(variant.name),
            values
            | {name: variables[name] for name in variables if len(size.environment[name]) > 1}
            | ({"threads": threads} if len(size.threads) > 1 else {}),
        )
        try:
            declared = found.declaration.parameters
            for name in flags:  # a study's keys are names, so they are not abbreviated
                if name not in declared:
                    raise UnknownFlagError(f"--{name}", [f"--{known}" for known in declared])
            params = found.read_parameters(to_argv(flags))
            if params["ckpt_directory"] is not None:
                raise ParameterError(
                    "ckpt_directory cannot be set: each run writes checkpoints beside its record"
                )
            for num_ranks in choice.ranks or size.ranks:
                epochs = epochs_of_ranks(params, num_ranks)
                yield PlannedRun(
                    series=series,
                    repeat=0,
                    benchmark=benchmark,
                    num_ranks=num_ranks,
                    threads=threads,
                    environment=variables,
                    flags=flags | {"rng_seed": params["rng_seed"]},
                    settings=settings_of(params),
                    epochs_per_rank=epochs,
                    minutes=size.minutes,
                    study_directory=directory,
                    timeline=size.timeline and num_ranks > 1,  # one rank has none
                )
        except ParameterError as error:
            where = f", {series}" if series else ""
            raise ParameterError(f"{study.path}{where}: {error}") from error


def settings_of(params: ParameterSet) -> dict[str, Any]:
    """Returns the parameters, except for where results go, in the types that JSON gives back."""
    settings = {name: value for name, value in params.items() if role_of(name) is not Role.RESULTS}
    return json.loads(json.dumps(settings))  # type: ignore[no-any-return]


def _chosen_flags(benchmark: Benchmark, argv: Sequence[str], size: Size) -> dict[str, Any]:
    """Returns the parameters that the user's flags set for all runs.

    Raises:
        ParameterError: A flag is wrong, or sets what the study varies or sets itself.
    """
    params = benchmark.declaration.parse(argv, benchmark.model_file)
    flags = {name: params[name] for name in params if params.origin(name).kind == "flag"}
    for name in flags:
        if name in size.varied:
            raise ParameterError(f"--{name} cannot be set for all runs: the study varies it")
        if role_of(name) is Role.RESULTS:
            raise ParameterError(f"--{name} cannot be set: the study sets it, for each run")
    return flags


def _crossed(values: Mapping[str, Iterable[Any]]) -> list[dict[str, Any]]:
    """Returns every combination of values, by name; no values have one empty combination."""
    return [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]


def _series(names: Sequence[str], values: Mapping[str, Any]) -> str:
    """Returns the name of a series, which is valid in paths and in names of jobs."""
    return "-".join([*names, *(f"{name}-{_text(value)}" for name, value in values.items())])


def _text(value: Any) -> str:
    text = "_".join(map(str, value)) if isinstance(value, list) else str(value)
    return re.sub(r"[^\w.+-]", "_", text)


def _check_distinct(study: Study, runs: Sequence[PlannedRun]) -> None:
    """Raises if two points have the same name, or two names mean the same run."""
    names: set[str] = set()
    points: dict[str, str] = {}
    for run in runs:
        if run.point in names:
            raise ParameterError(
                f"{study.path}: two points are named {run.point}, because their values differ only"
                " in characters that names do not contain; make them variants with names"
            )
        names.add(run.point)
        what = json.dumps([run.benchmark, run.num_ranks, run.variables, run.settings])
        if what in points:
            raise ParameterError(
                f"{study.path}: {points[what]} and {run.point} are the same run; remove one of them"
            )
        points[what] = run.point


def _repeat(run: PlannedRun, repeat: int) -> PlannedRun:
    """Returns another run of the same point, with its own seed."""
    seed = {"rng_seed": run.settings["rng_seed"] + repeat}
    return replace(
        run, repeat=repeat, flags={**run.flags, **seed}, settings={**run.settings, **seed}
    )


def _position(seed: int, repeat: int, run: PlannedRun) -> bytes:
    """Returns the key by which the runs of a block are sorted."""
    return hashlib.sha256(f"{seed} {repeat} {run.point}".encode()).digest()
