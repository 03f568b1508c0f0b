"""CANDLE's parameter file: sections, which have no meaning, and ``key = value``.

A value is a Python literal. Lines that begin with # or ; are comments, and so is everything after
a # that follows a value, as in Python.
"""

from __future__ import annotations

import ast
import configparser
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from candle_p1.errors import ParameterError
from candle_p1.files import read_regular_file
from candle_p1.parameters.parameter import Origin, Parameter

SECTION = "Global_Params"
"""The section that CANDLE's files have."""


def read_entries(path: Path, origin: Origin) -> list[tuple[str, str, int]]:
    """Returns the entries of a file, which messages call `origin`: key, text of the value, line."""
    try:
        return list(_LineNumberParser(_read_text(path)).entries())
    except configparser.MissingSectionHeaderError as error:
        raise ParameterError(
            f"{replace(origin, line=error.lineno)}: a section must come before the first key; begin"
            f" the file with [{SECTION}]"
        ) from None
    except configparser.ParsingError as error:
        raise ParameterError(
            f"{replace(origin, line=error.errors[0][0])}: neither a [section], a key = value nor a"
            " # comment"
        ) from None


def read_literal(text: str, parameter: Parameter, origin: Origin) -> Any:
    """Returns the value of a text that is a Python literal, or raises ParameterError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # invalid escapes such as '\d'
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        reason = f"must be {parameter.allowed}, as Python writes it"
        bare = text.partition("#")[0].strip()
        if parameter.type is str and re.fullmatch(r"[^'\"\n]+", bare):
            reason = f"strings need quotes: {parameter.name} = {bare!r}"
        elif "\n" in text:
            reason += "; an indented line continues the value above it"
        raise parameter.refusal(text or "nothing", origin, reason) from None


def read_any(text: str) -> Any:
    """Returns the value of a text that may be a Python literal, or else the text itself."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


class _LineNumberParser(configparser.RawConfigParser):
    """Prefixes every key with its line number, which configparser does not keep.

    No key is therefore repeated for configparser; the caller must look for duplicates.
    """

    def __init__(self, text: str) -> None:
        self._number = 0
        super().__init__(default_section="", strict=False)
        self.read_file(self._count(text.split("\n")))

    def optionxform(self, optionstr: str) -> str:
        return f"{self._number}:{optionstr}"

    def entries(self) -> Iterator[tuple[str, str, int]]:
        for section in self.sections():
            for key, text in self.items(section):
                number, _, name = key.partition(":")
                yield name, text, int(number)

    def _count(self, lines: list[str]) -> Iterator[str]:
        for self._number, line in enumerate(lines, start=1):
            yield line


def _read_text(path: Path) -> str:
    try:
        return read_regular_file(path, "utf-8-sig")
    except FileNotFoundError:
        problem = "it does not exist; check the name"
    except IsADirectoryError:
        problem = "it is a directory; name a file in it"
    except UnicodeDecodeError as error:
        problem = f"byte {error.start} is not UTF-8; save the file as UTF-8 text"
    except (OSError, ValueError) as error:
        problem = f"it cannot be read ({getattr(error, 'strerror', None) or error})"
    raise ParameterError(f"parameter file {path}: {problem}")
