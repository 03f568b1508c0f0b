"""The plan of a study: its runs, in the order in which they are executed.

The order is that of randomised complete blocks: every point once in random order, then every point
again, so that a slow hour of the machine affects all points alike. The position of a run within its
block depends only on the SHA-256 of seed, repeat and point. It is therefore the same on every
machine, and neither omitting points nor adding repeats changes the order of the others.

Whoever executes a run, on this machine or in a job, starts the benchmark's script with
`command_flags` on `num_ranks` ranks, with `variables` in their environment.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from candle_p1.benchmark import Benchmark, find_benchmark
from candle_p1.errors import ParameterError, RecordError, SetupError, UnknownFlagError
from candle_p1.files import expand_user, read_regular_file, write_atomically
from candle_p1.parameters.catalog import role_of
from candle_p1.parameters.parameter import Role
from candle_p1.parameters.parameter_set import ParameterSet
from candle_p1.records.record import RECORD_NAME
from candle_p1.scaling import epochs_of_ranks
from candle_p1.studies.study_file import STUDIES, THREADS_VARIABLE, Size, Study, find_study

MAX_RUNS = 10_000
TIMELINE_NAME = "timeline.json"
"""The file of a traced run, beside its record."""
MANIFEST_NAME = "study.json"
"""Names the study of a directory and what the user chose, so that the directory tells its progress.

It holds neither the plan, which follows from the study file, nor the results.
"""


@dataclass(frozen=True)
class Choice:
    """What the user has chosen about a study; None leaves the study's own value.

    `repeats` are the runs of each point, `seed` is that of the order, and `flags` are those of the
    benchmark for all runs, as command-line arguments. With `folds`, each of them is held out once,
    in every repeat.
    """

    size: str | None = None
    ranks: Sequence[int] | None = None
    repeats: int | None = None
    folds: int | None = None
    seed: int | None = None
    flags: Sequence[str] = ()


@dataclass(frozen=True)
class PlannedRun:
    """A run of a study.

    Attributes:
        series: Names what is varied, except for the ranks; "" if nothing is.
        repeat: Which run of its point this is, from 0.
        benchmark: As `find_benchmark` takes it.
        variables: The environment variables that its ranks need.
        flags: The parameters that the study sets, by name, including the repeat's own rng_seed.
        settings: All effective parameters, as a record holds them, except for where results go.
        minutes: Its time limit.
        timeline: Whether Horovod traces it.
    """

    series: str
    repeat: int
    benchmark: str
    num_ranks: int
    variables: Mapping[str, str]
    flags: Mapping[str, Any]
    settings: Mapping[str, Any]
    epochs_per_rank: int
    minutes: int
    study_directory: Path
    timeline: bool = False

    @property
    def point(self) -> str:
        """The name that all repeats of this run share."""
        return "-".join(part for part in (self.series, f"np{self.num_ranks}") if part)

    @property
    def name(self) -> str:
        """The run's name within its study."""
        return f"{self.point}-r{self.repeat}"

    def directory(self, attempt: int = 1) -> Path:
        """Returns the directory of an attempt at this run; attempts count from 1."""
        suffix = "" if attempt == 1 else f"-attempt{attempt}"
        return self.study_directory / (self.name + suffix)

    def attempts(self) -> list[Path]:
        """Returns the directories of this run, in the order of the attempts."""
        pattern = re.compile(rf"{re.escape(self.name)}(?:-attempt(\d+))?")
        names = [path.name for path in self.study_directory.glob(f"{self.name}*")]
        numbers = [int(match[1] or 1) for match in map(pattern.fullmatch, names) if match]
        return [self.directory(number) for number in sorted(numbers)]

    def next_directory(self) -> Path:
        """Returns the directory of the next attempt, which follows all that hold a record."""
        attempts = self.attempts()
        if not attempts or not (attempts[-1] / RECORD_NAME).exists():
            return attempts[-1] if attempts else self.directory()
        _, _, number = attempts[-1].name[len(self.name) :].rpartition("-attempt")
        return self.directory(int(number or 1) + 1)

    def command_flags(self, directory: Path) -> list[str]:
        """Returns the flags for the benchmark's script, whose record goes to a directory."""
        place = {"output_dir": directory.parent, "experiment_id": ".", "run_id": directory.name}
        trace = {"timeline": directory / TIMELINE_NAME} if self.timeline else {}
        return to_argv({**self.flags, **place, **trace})


@dataclass(frozen=True)
class Plan:
    """The runs of a study at a size, in the order in which they are executed."""

    study: Study
    size: str
    choice: Choice
    directory: Path
    runs: Sequence[PlannedRun]

    def write_manifest(self) -> None:
        """Writes MANIFEST_NAME into the study's directory, which is created if needed.

        Raises:
            SetupError: It cannot be written.
        """
        path = self.study.path.resolve()
        name = self.study.name if path.parent == STUDIES else str(path)
        content = {"study": name} | asdict(self.choice) | {"size": self.size}
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_atomically(self.directory / MANIFEST_NAME, json.dumps(content, indent=2) + "\n")
        except OSError as error:
            raise SetupError(
                f"cannot write to {self.directory} ({error.strerror}): choose another directory"
                " for the results"
            ) from error


def read_plan(directory: Path) -> Plan:
    """Returns the plan of the study whose manifest is in a directory.

    Raises:
        RecordError: There is no valid manifest.
        ParameterError: The study file no longer exists, or is wrong.
    """
    path = directory / MANIFEST_NAME
    try:
        content = json.loads(read_regular_file(path))
        study = find_study(content.pop("study"))
        choice = Choice(**content)
    except FileNotFoundError as error:
        raise RecordError(
            f"{directory} holds no study: it has no {MANIFEST_NAME}, which candle-p1 study run"
            " writes"
        ) from error
    except OSError as error:
        raise RecordError(f"{path}: cannot read it: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RecordError(
            f"{path}: this is not what candle-p1 study run writes: delete it, then run the study"
        ) from error
    return make_plan(study, choice, directory.parent, directory.resolve())


def make_plan(study: Study, choice: Choice, output: Path, directory: Path | None = None) -> Plan:
    """Returns the runs of a study, whose results go to ``<study>-<size>`` in `output`.

    If they were moved, `directory` is where they are instead.

    Raises:
        ParameterError: The study has no such size or too many runs, a parameter or a flag is wrong,
            the epochs cannot be divided among the ranks, or two points are the same run.
        DataError: A data file does not exist.
    """
    name, size = study.size(choice.size)
    directory = directory or expand_user(output).absolute() / f"{study.name}-{name}"
    repeats = size.repeats if choice.repeats is None else choice.repeats
    if choice.folds:
        vary = {**size.vary, "fold": [*range(1, choice.folds + 1)]}
        size = size.model_copy(
            update={"flags": {**size.flags, "folds": choice.folds}, "vary": vary}
        )
    seed = study.seed if choice.seed is None else choice.seed
    crossed: list[Sequence[Any]] = [*size.vary.values(), *size.environment.values()]
    crossed += [size.threads or [0], study.benchmark, size.variants, choice.ranks or size.ranks]
    number = repeats * prod(map(len, crossed))
    if number > MAX_RUNS:
        raise ParameterError(
            f"{study.path}: the study has {number:.3g} runs; at most {MAX_RUNS:,} are allowed"
        )
    first = [
        run for each in study.benchmark for run in _points(study, size, each, choice, directory)
    ]
    _check_distinct(study, first)

    def block(repeat: int) -> list[PlannedRun]:
        def key(run: PlannedRun) -> bytes:
            return hashlib.sha256(f"{seed} {repeat} {run.point}".encode()).digest()

        runs = []
        for run in sorted(first, key=key):
            own = {"rng_seed": run.settings["rng_seed"] + repeat}
            flags, settings = {**run.flags, **own}, {**run.settings, **own}
            runs.append(replace(run, repeat=repeat, flags=flags, settings=settings))
        return runs

    runs = [run for repeat in range(repeats) for run in block(repeat)]
    return Plan(study, name, choice, directory, runs)


def _points(
    study: Study, size: Size, benchmark: str, choice: Choice, directory: Path
) -> Iterator[PlannedRun]:
    """Yields the first run of every point of a benchmark."""
    found = find_benchmark(benchmark)
    declared = found.declaration.parameters
    chosen = _chosen_flags(found, choice.flags, size)
    threads = {THREADS_VARIABLE: list(map(str, size.threads))} if size.threads else {}
    varied = {name for name, values in size.environment.items() if len(values) > 1}
    for variant, values, environment, of_threads in product(
        size.variants, _crossed(size.vary), _crossed(size.environment), _crossed(threads)
    ):
        flags = {**size.flags, **chosen, **variant.flags, **values}
        named = values | {name: environment[name] for name in environment if name in varied}
        if len(size.threads) > 1:
            named["threads"] = of_threads[THREADS_VARIABLE]
        names = [found.name] * (len(study.benchmark) > 1) + [variant.name] * bool(variant.name)
        series = "-".join([*names, *(f"{name}-{_text(named[name])}" for name in named)])
        try:
            for name in flags:  # a study's keys are names, so they are not abbreviated
                if name not in declared:
                    raise UnknownFlagError(f"--{name}", [f"--{known}" for known in declared])
            params = found.read_parameters(to_argv(flags))
            if params["ckpt_directory"] is not None:
                raise ParameterError(
                    "ckpt_directory cannot be set: each run writes checkpoints beside its record"
                )
            for num_ranks in choice.ranks or size.ranks:
                yield PlannedRun(
                    series=series,
                    repeat=0,
                    benchmark=benchmark,
                    num_ranks=num_ranks,
                    variables=environment | of_threads,
                    flags=flags | {"rng_seed": params["rng_seed"]},
                    settings=settings_of(params),
                    epochs_per_rank=epochs_of_ranks(params, num_ranks),
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


def to_argv(flags: Mapping[str, Any]) -> list[str]:
    """Returns parameters as command-line arguments."""
    return [
        argument
        for name, value in flags.items()
        for argument in (f"--{name}", *map(str, value if isinstance(value, list) else [value]))
    ]


def _chosen_flags(benchmark: Benchmark, argv: Sequence[str], size: Size) -> dict[str, Any]:
    """Returns the parameters that the user's flags set for all runs."""
    params = benchmark.declaration.parse(argv, benchmark.model_file)
    flags = {name: params[name] for name in params if params.origin(name).kind == "flag"}
    for name in flags:
        if name in size.varied:
            raise ParameterError(f"--{name} cannot be set for all runs: the study varies it")
        if role_of(name) is Role.RESULTS:
            raise ParameterError(f"--{name} cannot be set: the study sets it, for each run")
    return flags


def _crossed(values: Mapping[str, Iterable[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]


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
                " in characters that names cannot contain; turn them into named variants"
            )
        names.add(run.point)
        what = json.dumps([run.benchmark, run.num_ranks, run.variables, run.settings])
        if what in points:
            raise ParameterError(
                f"{study.path}: {points[what]} and {run.point} are the same run; remove one of them"
            )
        points[what] = run.point
