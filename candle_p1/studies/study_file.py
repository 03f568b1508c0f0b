"""A study's file: TOML, in which every key is known, and what contradicts itself is refused.

::

title = "NT3 with two loaders"
benchmark = "nt3"
repeats = 3
minutes = 5              # time limit of one run
flags.epochs = 48        # what all runs have
vary.batch_size = [20, 40]

[[variants]]             # parameters that change together
name = "original"
loader = "original"

[[variants]]
name = "optimised"

[sizes.small]
ranks = [1, 2, 4]        # ranks, variants and what is varied are crossed
flags.size = "small"
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from candle_p1.errors import ParameterError
from candle_p1.records.environment import SETTINGS
from candle_p1.studies.places import RESULT_PLACES
from candle_p1.studies.planned import THREADS_VARIABLE
from candle_p1.studies.study import Size, Study, Variant
from candle_p1.toml_file import (
    COUNT,
    TEXT,
    TEXTS,
    Kind,
    check_key,
    check_value,
    is_list_of,
    read_toml,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SEED = 2019
"""Of the order of runs, where a study names none."""
NAME = r"[\w.+-]+"
NAME_IN_WORDS = "it stands in paths; give it letters, digits and any of _ . + -"


def read_study(path: Path) -> Study:
    """Reads a study's file.

    Raises:
        ParameterError: It cannot be read; a key is unknown or missing; or a value is not of its
            kind, or contradicts another one.
    """
    table = read_toml(path)
    for key, value in table.items():
        check_key(path, key, _STUDY_KEYS)
        check_value(path, key, value, _STUDY_KEYS[key])
    for key in ("title", "benchmark", "sizes"):
        if key not in table:
            raise ParameterError(f"{path}: {key} is missing")
    benchmark = table["benchmark"]
    for name in table["sizes"]:
        if not re.fullmatch(NAME, name):
            raise ParameterError(f"{path}: size {name!r}: {NAME_IN_WORDS}")
    return Study(
        name=path.stem,
        path=path,
        title=table["title"],
        shows=table.get("shows", []),
        benchmarks=[benchmark] if isinstance(benchmark, str) else benchmark,
        seed=table.get("seed", SEED),
        sizes={name: _read_size(path, table, name) for name in table["sizes"]},
    )


def _read_size(path: Path, table: Mapping[str, Any], name: str) -> Size:
    own, within = table["sizes"][name], f"sizes.{name}."
    for key, value in own.items():
        check_key(path, key, ["ranks", *_SIZE_KEYS], within)
        check_value(path, within + key, value, (_SIZE_KEYS | {"ranks": _NUMBERS})[key])
    for place, part in (("", table), (within, own)):
        if both := sorted(part.get("flags", {}).keys() & part.get("vary", {}).keys()):
            raise ParameterError(
                f"{path}: {both[0]} stands in {place}flags and in {place}vary; keep one"
            )
    found = {key: own.get(key, table.get(key)) for key in ("ranks", *_SIZE_KEYS)}
    for key in ("ranks", "repeats", "minutes"):
        if found[key] is None:
            raise ParameterError(f"{path}: {within}{key} is missing")
    # What a size fixes is no longer varied, and what it varies is no longer fixed.
    flags, vary = (_without(table, "flags", own, "vary"), _without(table, "vary", own, "flags"))
    environment = table.get("environment", {}) | own.get("environment", {})
    threads = found["threads"] or []
    size = Size(
        ranks=found["ranks"],
        repeats=found["repeats"],
        minutes=found["minutes"],
        threads=threads if isinstance(threads, list) else [threads],
        flags=flags | own.get("flags", {}),
        vary=vary | own.get("vary", {}),
        environment={
            variable: [value] if isinstance(value, str) else value
            for variable, value in environment.items()
        },
        variants=_read_variants(path, found["variants"] or []),
    )
    _check_together(path, size)
    return size


def _without(
    table: Mapping[str, Any], key: str, own: Mapping[str, Any], other: str
) -> dict[str, Any]:
    """Returns what the study has under a key, less what a size has under the other one."""
    return {
        name: value for name, value in table.get(key, {}).items() if name not in own.get(other, {})
    }


def _read_variants(path: Path, tables: Sequence[Mapping[str, Any]]) -> list[Variant]:
    for i, table in enumerate(tables, start=1):
        name = table.get("name")
        if not isinstance(name, str) or not re.fullmatch(NAME, name):
            raise ParameterError(f"{path}: variant {i}, name {name!r}: {NAME_IN_WORDS}")
    names = [table["name"] for table in tables]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ParameterError(f"{path}: two variants are named {min(repeated)!r}")
    return [
        Variant(table["name"], {key: value for key, value in table.items() if key != "name"})
        for table in tables
    ] or [Variant("", {})]


def _check_together(path: Path, size: Size) -> None:
    """Raises where parts of a size contradict each other, or a record would not tell them."""
    of_variants = {name for variant in size.variants for name in variant.flags}
    if both := sorted(of_variants & size.vary.keys()):
        raise ParameterError(f"{path}: {both[0]} is set by a variant and stands in vary; keep one")
    if "rng_seed" in size.varied:
        raise ParameterError(
            f"{path}: rng_seed cannot be varied: repeat i of a run adds i to it; set it in flags"
        )
    for name in [*size.flags, *size.varied]:
        if name in RESULT_PLACES:
            raise ParameterError(f"{path}: {name} is each run's own, and set by the study")
    for variable in size.environment:
        if variable == THREADS_VARIABLE:
            raise ParameterError(f"{path}: {variable} is what threads sets; write threads = …")
        if not variable.startswith(SETTINGS):
            raise ParameterError(
                f"{path}: environment.{variable} would not stand in a run's record, which notes"
                f" variables that begin with {', '.join(SETTINGS)}"
            )


def _is_value(value: object) -> bool:
    return isinstance(value, (str, bool, int, float)) or (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, (str, bool, int, float)) for item in value)
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _are_distinct(value: object) -> bool:
    """Tells a list of one or more values, none of them twice."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(item not in value[:i] for i, item in enumerate(value))
    )


def _are_numbers(value: object) -> bool:
    return isinstance(value, list) and _are_distinct(value) and all(map(_is_number, value))


def _are_tables(value: object) -> bool:
    return (
        isinstance(value, list)
        and is_list_of(dict, value)
        and all(_is_value(item) for table in value for item in table.values())
    )


_NUMBER = Kind(_is_number, "a whole number above 0")
_NUMBERS = Kind(_are_numbers, "a list of different whole numbers above 0")
_FLAGS = Kind(
    lambda value: isinstance(value, dict) and all(map(_is_value, value.values())),
    "a table of parameters with their values: texts, numbers, true, false, or lists of these",
)
_VARY = Kind(
    lambda value: (
        isinstance(value, dict)
        and all(_are_distinct(item) and all(map(_is_value, item)) for item in value.values())
    ),
    "a table of parameters, each with the list of its different values",
)
_ENVIRONMENT = Kind(
    lambda value: (
        isinstance(value, dict)
        and all(
            isinstance(item, str) or (_are_distinct(item) and is_list_of(str, item))
            for item in value.values()
        )
    ),
    "a table of texts, or of lists of different texts",
)
_TABLES = Kind(_are_tables, "tables [[variants]] of a name and parameters with their values")
_SIZE_KEYS = {
    "repeats": _NUMBER,
    "minutes": _NUMBER,
    "threads": Kind(
        lambda value: _is_number(value) or _are_numbers(value),
        "a whole number above 0, or a list of different ones",
    ),
    "flags": _FLAGS,
    "vary": _VARY,
    "environment": _ENVIRONMENT,
    "variants": _TABLES,
}
"""What the study says for all sizes, and a size for itself."""
_STUDY_KEYS = _SIZE_KEYS | {
    "title": TEXT,
    "shows": TEXTS,
    "benchmark": Kind(
        lambda value: isinstance(value, str) or (_are_distinct(value) and is_list_of(str, value)),
        "the name of a benchmark, or a list of different ones",
    ),
    "seed": COUNT,
    "sizes": Kind(
        lambda value: (
            isinstance(value, dict)
            and bool(value)
            and all(isinstance(size, dict) for size in value.values())
        ),
        "tables [sizes.NAME]",
    ),
}
