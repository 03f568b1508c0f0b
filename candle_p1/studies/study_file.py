"""Study files: where they are, and how they are read; docs/studies.md shows one with all its keys.

Unknown keys, and entries that contradict each other, are errors.
"""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from candle_p1.distributed.engine import HOROVOD, OF_HOROVOD
from candle_p1.errors import ParameterError, did_you_mean
from candle_p1.files import expand_user, shipped
from candle_p1.parameters.catalog import role_of
from candle_p1.parameters.parameter import Role
from candle_p1.records.environment import SETTINGS
from candle_p1.toml_file import TomlTable, read_toml, validate

MAX_VALUES = 1000
THREADS_VARIABLE = "OMP_NUM_THREADS"
STUDIES = shipped("common/studies")
"""The studies of this project."""


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[\w.+-]+", name):
        raise ValueError(
            f"{name!r} becomes part of paths: it may contain letters, digits and _ . + - only"
        )
    return name


def _check_value(value: Any) -> Any:
    values = value if isinstance(value, list) and value else [value]
    if not all(isinstance(each, (str, bool, int, float)) for each in values):
        raise ValueError("a parameter is a string, a number, true, false, or a list of these")
    if any(isinstance(each, str) and re.match(r"-[^\d.]", each) for each in values):
        raise ValueError("a string that begins with '-' would be a flag on the command line")
    return value


def _check_distinct(values: list[Any]) -> list[Any]:
    if len(values) > MAX_VALUES:
        raise ValueError(f"give at most {MAX_VALUES} values")
    if not values or any(value in values[:i] for i, value in enumerate(values)):
        raise ValueError("give one or more distinct values")
    return values


Name = Annotated[str, AfterValidator(_check_name)]
Count = Annotated[int, Field(gt=0, le=10**9)]
Value = Annotated[Any, AfterValidator(_check_value)]
Distinct = AfterValidator(_check_distinct)
OneOrMore = BeforeValidator(lambda value: value if isinstance(value, list) else [value])
"""Accepts a single value in place of a list of one."""


class StudyVariant(BaseModel):
    """Parameters that change together; the name is "" for the only one of a study without any."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    __pydantic_extra__: dict[str, Value]

    name: Name

    @property
    def flags(self) -> Mapping[str, Any]:
        """The parameters, by name."""
        return self.model_extra or {}


class StudyEntries(TomlTable):
    """What a study may define for all sizes, and each size for itself.

    Attributes:
        repeats: The number of runs of each point.
        minutes: The time limit of a run.
        threads: Values of OMP_NUM_THREADS for each rank; empty leaves the number to the rank.
        vary: Values of each parameter that is varied, by name.
        environment: Values of each environment variable, one or several, by name.
        timeline: Whether Horovod traces the runs with several ranks.
    """

    repeats: Count = 0
    minutes: Count = 0
    threads: Annotated[list[Count], OneOrMore, Distinct] = Field(default_factory=list)
    flags: dict[str, Value] = Field(default_factory=dict)
    vary: dict[str, Annotated[list[Value], Distinct]] = Field(default_factory=dict)
    environment: dict[str, Annotated[list[str], OneOrMore, Distinct]] = Field(default_factory=dict)
    variants: list[StudyVariant] = Field(default_factory=list)
    timeline: bool = False


class Size(StudyEntries):
    """A study at one size: what is crossed to give its points, and how often each is run."""

    ranks: Annotated[list[Count], Distinct]

    @property
    def varied(self) -> set[str]:
        """The names of the parameters in which runs differ."""
        return {*self.vary, *(name for variant in self.variants for name in variant.flags)}


class Study(StudyEntries):
    """A study: its entries hold for all sizes, and those of `sizes` are complete.

    Attributes:
        title: The question it answers.
        shows: The parts of the paper it reproduces or belongs to, such as "Figure 6".
        benchmark: The benchmarks to train, as `find_benchmark` takes them; in the file, the path of
            a folder is relative to the file's own.
        seed: That of the order of the runs.
        sizes: By name; the first one is the default.
    """

    path: Path
    title: str
    shows: list[str] = Field(default_factory=list)
    benchmark: Annotated[list[str], OneOrMore, Distinct]
    seed: Annotated[int, Field(ge=0)] = 2019
    sizes: Annotated[dict[Name, Size], Field(min_length=1)]

    @property
    def name(self) -> str:
        """The name of its file, without the suffix."""
        return self.path.stem

    def size(self, name: str | None = None) -> tuple[str, Size]:
        """Returns a size with its name; None selects the first one. Raises ParameterError."""
        name = next(iter(self.sizes)) if name is None else name
        if name not in self.sizes:
            raise ParameterError(
                f"{self.name} has no size {name!r}{did_you_mean(name, self.sizes)}; choose one of"
                f" {', '.join(self.sizes)}"
            )
        return name, self.sizes[name]


def find_study(name: str) -> Study:
    """Returns a study by its name in ``common/studies/``, or by the path of its file.

    Raises:
        ParameterError: There is no such study, or its file is wrong.
    """
    if name.endswith(".toml"):
        return read_study(expand_user(name))
    known = list_studies()
    if name in known:
        return read_study(STUDIES / f"{name}.toml")
    raise ParameterError(
        f"there is no study {reprlib.repr(name)}{did_you_mean(name, known)}; the known ones are"
        f" {', '.join(known) or 'none'}. For a study of your own, give the path of its TOML file"
    )


def list_studies() -> list[str]:
    """Returns the names of the studies of this checkout."""
    return sorted(path.stem for path in STUDIES.glob("*.toml"))


def read_study(path: Path) -> Study:
    """Reads a study file.

    Raises:
        ParameterError: It cannot be read; a key is unknown or missing; or a value has the wrong
            type, or contradicts another one.
    """
    content = read_toml(path)
    if "path" in content:
        raise ParameterError(f"{path}: there is no key 'path'")
    study = validate(Study, content | {"path": path}, path)
    study.benchmark[:] = [_beside(path, name) for name in study.benchmark]
    return study.model_copy(update={"sizes": {name: _size(study, name) for name in study.sizes}})


def _beside(path: Path, benchmark: str) -> str:
    is_path = os.sep in benchmark or benchmark in (os.curdir, os.pardir)
    return str((path.parent / benchmark).resolve()) if is_path else benchmark


def _size(study: Study, name: str) -> Size:
    """Returns a size, whose own entries take precedence over those of the study."""
    own = study.sizes[name]
    for key in ("repeats", "minutes"):
        if not (getattr(own, key) or getattr(study, key)):
            raise ParameterError(f"{study.path}: sizes.{name}.{key} is missing")
    variants = own.variants if "variants" in own.model_fields_set else study.variants
    entries = {
        "repeats": own.repeats or study.repeats,
        "minutes": own.minutes or study.minutes,
        "threads": own.threads or study.threads,
        # What a size fixes is no longer varied, and what it varies is no longer fixed.
        "flags": {key: study.flags[key] for key in study.flags if key not in own.vary} | own.flags,
        "vary": {key: study.vary[key] for key in study.vary if key not in own.flags} | own.vary,
        "environment": study.environment | own.environment,
        "variants": variants or [StudyVariant.model_construct(name="")],
        "timeline": own.timeline if "timeline" in own.model_fields_set else study.timeline,
    }
    size = own.model_copy(update=entries)
    for problem in _contradictions(size):
        raise ParameterError(f"{study.path}: {problem}")
    return size


def _contradictions(size: Size) -> Iterator[str]:
    """Yields where parts of a size contradict each other, or a record would not show them."""
    names = [variant.name for variant in size.variants]
    yield from (f"two variants are named {name!r}" for name in names if names.count(name) > 1)
    of_variants = {name for variant in size.variants for name in variant.flags}
    for fixed, where in (({*size.flags}, "in flags"), (of_variants, "set by a variant")):
        for name in sorted(fixed & size.vary.keys()):
            yield f"{name} is both {where} and in vary; keep one of them"
    if "rng_seed" in size.varied:
        yield (
            "rng_seed cannot be varied, because repeat i of a run adds i to it; set its first value"
            " in flags"
        )
    for name in [*size.flags, *size.varied]:
        if name == "help":
            yield "help is not a parameter"
        if role_of(name) is Role.RESULTS:
            instead = "; to trace its runs, use the key timeline" if name == "timeline" else ""
            yield f"{name} is set by the study, differently for each run{instead}"
    for variable, values in size.environment.items():
        if variable == THREADS_VARIABLE:
            yield f"to set {variable}, use the key threads"
        if not (variable.startswith(SETTINGS) and variable.isidentifier()):
            yield (
                f"environment.{variable} would not appear in a run's record, which holds only"
                f" variables whose names begin with {', '.join(SETTINGS)}"
            )
        is_used = size.timeline or size.flags.get("averaging") == HOROVOD
        if OF_HOROVOD.match(variable) and len(values) > 1 and not is_used:
            yield (
                f"{variable} has no effect on ranks that average in shared memory, so equal runs"
                f' would be compared: also set averaging = "{HOROVOD}" in flags'
            )
