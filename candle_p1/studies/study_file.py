"""Study files: where they are, and how they are read.

A study file is TOML. Unknown keys, and entries that contradict each other, are errors::

    title = "NT3 with two loaders"
    benchmark = "nt3"
    repeats = 3
    minutes = 5              # time limit of one run
    flags.epochs = 48        # parameters of all runs
    vary.batch_size = [20, 40]

    [[variants]]             # parameters that change together
    name = "original"
    loader = "original"

    [[variants]]
    name = "optimised"

    [sizes.small]
    ranks = [1, 2, 4]        # crossed with the variants and with what is varied
    flags.size = "small"
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from candle_p1.errors import ParameterError, did_you_mean
from candle_p1.parameters.catalog import role_of
from candle_p1.parameters.parameter import Role
from candle_p1.records.environment import SETTINGS
from candle_p1.studies.planned_run import THREADS_VARIABLE
from candle_p1.studies.study import Size, Study, StudyVariant
from candle_p1.toml_file import TomlTable, read_toml, validate

DEFAULT_SEED = 2019


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
    return value


def _check_distinct(values: list[Any]) -> list[Any]:
    if not values or any(value in values[:i] for i, value in enumerate(values)):
        raise ValueError("give one or more different values")
    return values


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


Name = Annotated[str, AfterValidator(_check_name)]
Count = Annotated[int, Field(gt=0)]
Value = Annotated[Any, AfterValidator(_check_value)]
Distinct = AfterValidator(_check_distinct)
OneOrMore = BeforeValidator(_as_list)
"""Accepts a single value in place of a list of one."""


class _VariantTable(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    __pydantic_extra__: dict[str, Value]

    name: Name


class _CommonTable(TomlTable):
    """What the study may define for all sizes, and each size for itself."""

    repeats: Count | None = None
    minutes: Count | None = None
    threads: Annotated[list[Count], OneOrMore, Distinct] | None = None
    flags: dict[str, Value] = Field(default_factory=dict)
    vary: dict[str, Annotated[list[Value], Distinct]] = Field(default_factory=dict)
    environment: dict[str, Annotated[list[str], OneOrMore, Distinct]] = Field(default_factory=dict)
    variants: list[_VariantTable] | None = None


class _SizeTable(_CommonTable):
    ranks: Annotated[list[Count], Distinct]


class _StudyTable(_CommonTable):
    title: str
    shows: list[str] = Field(default_factory=list)
    benchmark: Annotated[list[str], OneOrMore, Distinct]
    seed: Annotated[int, Field(ge=0)] = DEFAULT_SEED
    sizes: Annotated[dict[Name, _SizeTable], Field(min_length=1)]


def find_study(name: str) -> Study:
    """Returns a study by its name in ``common/studies/``, or by the path of its file.

    Raises:
        ParameterError: There is no such study, or its file is wrong.
    """
    if name.endswith(".toml"):
        return read_study(Path(name).expanduser())
    path = studies_directory() / f"{name}.toml"
    if path.is_file():
        return read_study(path)
    known = list_studies()
    raise ParameterError(
        f"there is no study {name!r}{did_you_mean(name, known)}; the known ones are"
        f" {', '.join(known) or 'none'}. For a study of your own, give the path of its TOML file"
    )


def list_studies() -> list[str]:
    """Returns the names of the studies of this checkout."""
    return sorted(path.stem for path in studies_directory().glob("*.toml"))


def studies_directory() -> Path:
    """Returns where the checkout keeps its studies; a package installed elsewhere has none."""
    return Path(__file__).resolve().parent.parent.parent / "common/studies"


def read_study(path: Path) -> Study:
    """Reads a study file.

    Raises:
        ParameterError: It cannot be read; a key is unknown or missing; or a value has the wrong
            type, or contradicts another one.
    """
    table = validate(_StudyTable, read_toml(path), path)
    return Study(
        name=path.stem,
        path=path,
        title=table.title,
        shows=table.shows,
        benchmarks=table.benchmark,
        seed=table.seed,
        sizes={name: _size(path, table, name) for name in table.sizes},
    )


def _size(path: Path, study: _StudyTable, name: str) -> Size:
    """Returns a size, whose own entries take precedence over those of the study."""
    own = study.sizes[name]
    for prefix, table in (("", study), (f"sizes.{name}.", own)):
        if both := sorted(table.flags.keys() & table.vary.keys()):
            raise ParameterError(
                f"{path}: {both[0]} is both in {prefix}flags and in {prefix}vary; keep one of them"
            )
    repeats, minutes = own.repeats or study.repeats, own.minutes or study.minutes
    if repeats is None or minutes is None:
        missing = "repeats" if repeats is None else "minutes"
        raise ParameterError(f"{path}: sizes.{name}.{missing} is missing")
    variants = study.variants if own.variants is None else own.variants
    size = Size(
        ranks=own.ranks,
        repeats=repeats,
        minutes=minutes,
        threads=own.threads or study.threads or [],
        # What a size fixes is no longer varied, and what it varies is no longer fixed.
        flags={key: study.flags[key] for key in study.flags if key not in own.vary} | own.flags,
        vary={key: study.vary[key] for key in study.vary if key not in own.flags} | own.vary,
        environment=study.environment | own.environment,
        variants=[StudyVariant(each.name, each.model_extra or {}) for each in variants or []]
        or [StudyVariant("", {})],
    )
    _check_together(path, size)
    return size


def _check_together(path: Path, size: Size) -> None:
    """Raises where parts of a size contradict each other, or a record would not show them."""
    names = [variant.name for variant in size.variants]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ParameterError(f"{path}: two variants are named {min(repeated)!r}")
    of_variants = {name for variant in size.variants for name in variant.flags}
    if both := sorted(of_variants & size.vary.keys()):
        raise ParameterError(
            f"{path}: {both[0]} is both set by a variant and in vary; keep one of them"
        )
    if "rng_seed" in size.varied:
        raise ParameterError(
            f"{path}: rng_seed cannot be varied, because repeat i of a run adds i to it; set its"
            " first value in flags"
        )
    for name in [*size.flags, *size.varied]:
        if role_of(name) is Role.RESULTS:
            raise ParameterError(f"{path}: {name} is set by the study, differently for each run")
    for variable in size.environment:
        if variable == THREADS_VARIABLE:
            raise ParameterError(f"{path}: to set {variable}, use the key threads")
        if not variable.startswith(SETTINGS):
            raise ParameterError(
                f"{path}: environment.{variable} would not appear in a run's record, which holds"
                f" only variables whose names begin with {', '.join(SETTINGS)}"
            )
