"""Errors that a user can act on.

Every error that this package raises on purpose is a CandleError, which ends a command with code 2.
Its message names the file, line or parameter and says what to do. Any other exception is a bug, and
is shown with its traceback.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

Error = TypeVar("Error", bound="CandleError")

EXIT_CODE = 2
"""The exit code of a command that ends with a CandleError."""


class CandleError(Exception):
    """An error whose message is meant for the user, without a traceback.

    Attributes:
        agreed: All ranks raise this same error, so that one of them can report it for all.
        printed: The user has already been told, with the rank's name.
        exit_code: With which a command ends.
    """

    agreed: bool = False
    printed: bool = False
    exit_code: int = EXIT_CODE

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles the message and the attributes, because errors are sent between ranks."""
        new = copyreg.__newobj__  # type: ignore[attr-defined]  # pickle has a short form of it
        return new, (type(self), *self.args), self.__dict__

    def on_all_ranks(self: Error) -> Error:
        """Marks the error as raised by all ranks, and returns it."""
        self.agreed = True
        return self


class ParameterError(CandleError):
    """A parameter that is unknown, malformed, out of range, or inconsistent with another one."""


class UnknownFlagError(ParameterError):
    """A flag that a benchmark does not have; `known` are those that it has."""

    def __init__(self, flag: str, known: Iterable[str]) -> None:
        self.flag, self.known = flag, list(known)
        meant = flag[:2] + flag[2:].replace("-", "_")
        near = did_you_mean(meant, self.known) if flag != "--" else ""
        super().__init__(f"{flag} is not a flag{near}")


class DataError(CandleError):
    """A data file that cannot be used.

    Args:
        problem: What is wrong, as a clause ("the label is empty").
        path: The file.
        line: The line, counted from 1, if known.
        column: The field within the line, counted from 1, if known.
    """

    def __init__(
        self, problem: str, path: Path | str, line: int | None = None, column: int | None = None
    ) -> None:
        self.problem, self.path, self.line, self.column = problem, str(path), line, column
        places = {"line": line, "column": column}
        where = [self.path, *(f"{what} {n}" for what, n in places.items() if n is not None)]
        super().__init__(f"{', '.join(where)}: {problem}")


class SetupError(CandleError):
    """Something in the installation, the launcher or the machine is missing or unsuitable."""


class ModelError(CandleError):
    """Runs, measurements or published values from which no model of the time can be made."""


class RecordError(CandleError):
    """A run record that cannot be read or does not match its schema."""


class CheckpointError(CandleError):
    """A checkpoint that is damaged, does not fit the run, or cannot be written."""


class DistributedError(CandleError):
    """Ranks that disagree when they must not, or gradients that are not averaged."""


class RunInterrupted(CandleError):  # noqa: N818
    """A run that a signal, of this number, has asked to save a checkpoint and end, and that has."""

    def __init__(self, message: str, number: int) -> None:
        self.number, self.exit_code = number, 128 + number
        super().__init__(message)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns " (did you mean 'x'?)" for the closest known name, or "" if none is close."""
    by_lower = {each.lower(): each for each in known}
    near = get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f" (did you mean {by_lower[near[0]]!r}?)" if near else ""
