"""TOML files that describe something: machines, studies, published values.

A file is read into a pydantic model: ``validate(MODEL, read_toml(path), path)``. Whatever does not
fit it becomes one ParameterError, which names the file and the key.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from candle_p1.errors import ParameterError, did_you_mean
from candle_p1.files import read_regular_bytes

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_BYTES = 32 * 2**10
"""No file that a person writes is larger; a larger one could take minutes to parse."""
INT64 = range(-(2**63), 2**63)
MAX_SHOWN = 200
"""Characters of a key that are shown."""

Model = TypeVar("Model", bound=BaseModel)


class TomlTable(BaseModel):
    """A table of a TOML file: every key is declared, and no value is converted to another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _suggest_keys(cls, table: Any) -> Any:
        """Refuses an unknown key as extra="forbid" does, and suggests the nearest known one."""
        for key in table if isinstance(table, dict) else ():
            if key not in cls.model_fields:
                raise ValueError(f"there is no key {key!r}{did_you_mean(key, cls.model_fields)}")
        return table


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the content of a file.

    Raises:
        ParameterError: It cannot be read, or is not TOML.
    """
    try:
        data = read_regular_bytes(path, MAX_BYTES)
        content = tomllib.loads(data.decode("utf-8-sig"))
    except OSError as error:
        raise ParameterError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"{path}: not TOML: {error}") from error
    for key, value in _entries(content):
        if isinstance(value, int) and value not in INT64:
            raise ParameterError(f"{path}: {key} does not fit in 64 bits")
        if "\0" in key or (isinstance(value, str) and "\0" in value):
            raise ParameterError(f"{path}: {key!r} contains a NUL character")
    return content


def _entries(content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields every value that is neither a table nor a list, with its key and those around it."""
    left: list[tuple[str, Any]] = list(content.items())
    while left:
        key, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{key[-MAX_SHOWN:]}.{inner}", each) for inner, each in value.items()]
        elif isinstance(value, list):
            left += [(key, each) for each in value]
        else:
            yield key, value


def validate(model: type[Model], content: dict[str, Any], path: Path) -> Model:
    """Returns the content of a file, to which the caller may have added keys, as a model.

    Raises:
        ParameterError: The content does not fit the model; names every key that is wrong.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        problems = [_problem(details) for details in error.errors()]
        raise ParameterError(f"{path}: " + "\n  ".join(problems)) from error


def _problem(details: ErrorDetails) -> str:
    key = ".".join(str(part) for part in details["loc"])
    if details["type"] == "missing":
        return f"{key} is missing"
    if details["type"] == "value_error":  # raised by a validator, whose message says it all
        message = str(details["ctx"]["error"])
        return f"{key}: {message}" if key else message
    message = details["msg"]
    return f"{key} is {reprlib.repr(details['input'])}: {message[:1].lower()}{message[1:]}"
