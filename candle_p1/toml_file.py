"""TOML files that describe something: every key is known, and every value is of its kind."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from candle_p1.errors import ParameterError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Kind(NamedTuple):
    """What a value may be.

    Attributes:
        fits: Tells whether a value is of this kind.
        wanted: The kind in words, after "it has to be".
    """

    fits: Callable[[object], bool]
    wanted: str


def is_count(value: object) -> bool:
    """Tells whether a value is a whole number, not negative."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_list_of(kind: type, value: object) -> bool:
    """Tells whether a value is a list of values of one type."""
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


TEXT = Kind(lambda value: isinstance(value, str), "a text")
COUNT = Kind(is_count, "a whole number, not negative")
SWITCH = Kind(lambda value: isinstance(value, bool), "true or false")
TEXTS = Kind(lambda value: is_list_of(str, value), "a list of texts")
TABLE_OF_TEXTS = Kind(
    lambda value: isinstance(value, dict) and all(isinstance(text, str) for text in value.values()),
    "a table of texts",
)


def read_toml(path: Path) -> dict[str, Any]:
    """Returns what a file holds.

    Raises:
        ParameterError: It cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ParameterError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ParameterError(f"{path}: not TOML: {error}") from error


def check_key(path: Path, key: str, known: Iterable[str], within: str = "") -> None:
    """Makes sure that a key is a known one.

    Args:
        path: The file, for messages.
        key: The key.
        known: All keys that may stand there.
        within: The table that holds it, with a dot at its end; "" is the file's top.

    Raises:
        ParameterError: It is not known; with the nearest one that is.
    """
    known = list(known)
    if key not in known:
        near = did_you_mean(within + key, [within + name for name in known])
        raise ParameterError(f"{path}: there is no key {within + key!r}{near}")


def check_value(path: Path, key: str, value: object, kind: Kind) -> None:
    """Makes sure that a value is of its kind.

    Args:
        path: The file, for messages.
        key: The key, with the tables that hold it.
        value: Its value.
        kind: What it may be.

    Raises:
        ParameterError: It is something else.
    """
    if not kind.fits(value):
        raise ParameterError(f"{path}: {key} is {value!r}; it has to be {kind.wanted}")
