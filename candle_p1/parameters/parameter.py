"""A declared parameter, what it is for, and where a value comes from."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from candle_p1.errors import ParameterError

BOOLEANS = dict.fromkeys(("true", "t", "yes", "y", "1"), True) | dict.fromkeys(
    ("false", "f", "no", "n", "0"), False
)
_FROM_ARGUMENT: dict[type, Callable[[str], Any]] = {
    bool: lambda text: BOOLEANS[text.lower()],
    int: int,
    float: float,
    str: str,
}
_TYPE_NAMES = {
    bool: ("True or False", "booleans"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
}
_INT64 = range(-(2**63), 2**63)
_SHOWN_LENGTH = 80
_MAX_PATH_BYTES, _MAX_NAME_BYTES = 4095, 255
SEVERAL_RANKS = "several ranks"
Needs = Mapping[str, "Sequence[Any]"]
"""What gives a parameter an effect, any of it being enough: other parameters with the values that
do so, where an empty sequence means any that is set and not 0; and SEVERAL_RANKS."""


class Role(Enum):
    """What a parameter is for."""

    LEARNING = "changes what is learned"
    SPEED = "changes speed or memory, but not what is learned"
    SEED = "distinguishes repetitions of a run"
    PLACE = "names or locates what a run reads or keeps for later runs"
    RESULTS = "locates what a run writes, and is different for every run"
    LOGGING = "changes what is monitored, recorded, kept or shown"
    UNUSED = "is accepted from CANDLE's files and programs but has no effect"


@dataclass(frozen=True)
class Origin:
    """Where a value comes from.

    Attributes:
        kind: "default", "model file", "config file", "flag" or "program"; for a data file that
            nobody has named, "synthetic data" or "not read".
        file: The parameter file, as shown to the user.
        line: The line of the file, counted from 1.
        source: The parameter that the value follows from, if it was not set itself.
    """

    kind: str
    file: str | None = None
    line: int | None = None
    source: str | None = None

    def __str__(self) -> str:
        text = self.kind if self.file is None else f"{self.kind} {self.file}"
        if self.line is not None:
            text += f", line {self.line}"
        if self.source is None:
            return text
        return f"{text} --{self.source}" if self.kind == "flag" else f"{text}, {self.source}"

    @property
    def is_explicit(self) -> bool:
        """Whether the user chose the value for this run, by a flag or a config file."""
        return self.kind in ("flag", "config file")


@dataclass(frozen=True)
class Parameter:
    """A declared parameter.

    Attributes:
        name: The key in a file, and the long flag: --name.
        type: bool, int, float or str.
        default: The value if nothing sets another one.
        help: What it means, with the unit if it has one.
        role: What it is for.
        short: Short flags, such as "-e"; CANDLE's "-lr" has two letters.
        choices: The allowed values.
        words: What a bool may be besides True and False.
        minimum: The smallest allowed value.
        maximum: The largest allowed value.
        above: A value it must exceed.
        below: A value it must stay below.
        many: It is a list of values: several arguments on the command line, a list in a file. A
            single value counts as a list of one.
        required: There is no default: a file, a flag or a program must set it.
        optional: None is allowed, also on the command line; implied by the default None.
        needs_support: Only benchmarks that list it in `supports` read it; the others always read
            the default, and setting it causes a warning.
        acts_with: What gives it an effect; it always has one if this is empty.
        old_names: Names that earlier releases of CANDLE gave it, in files and as flags.
        group: Its heading in --help.
    """

    name: str
    type: type
    default: Any
    help: str
    role: Role = Role.LEARNING
    short: tuple[str, ...] = ()
    choices: tuple[Any, ...] | None = None
    words: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    many: bool = False
    required: bool = False
    optional: bool = False
    needs_support: bool = False
    acts_with: Needs = field(default_factory=dict)
    old_names: tuple[str, ...] = ()
    group: str = ""

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name.startswith("_"):
            raise ValueError(f"a parameter cannot be named {self.name!r}")
        if self.type not in _TYPE_NAMES:
            raise TypeError(f"{self.name}: the type is bool, int, float or str, not {self.type}")
        for flag in self.short:
            if not re.fullmatch(r"-[A-Za-z]\w*", flag):
                raise ValueError(f"{self.name}: {flag!r} cannot be a short flag")
        if self.default is not None:
            object.__setattr__(self, "default", self.check(self.default, Origin("default")))
        else:
            object.__setattr__(self, "optional", not self.required)

    @property
    def allowed(self) -> str:
        """The allowed values, in words."""
        one, several = _TYPE_NAMES[self.type]
        one = " or ".join([one, *self.words])
        bounds = {"at least": self.minimum, "above": self.above}
        bounds |= {"at most": self.maximum, "below": self.below}
        limits = [f"{words} {limit}" for words, limit in bounds.items() if limit is not None]
        if self.choices is not None:
            limits = [f"one of {', '.join(map(str, self.choices))}", *limits]
            one = ""
        text = f"a list of {several}" if self.many else one
        if limits:
            separator = ", each " if self.many else ", " if text else ""
            text += separator + " and ".join(limits)
        if self.optional:
            text += ", or None" if limits else " or None"
        return text

    def lacks(self, values: Mapping[str, Any], num_ranks: int) -> str:
        """Returns what this parameter needs to have an effect, in words; "" if it has one.

        It depends on the values of all parameters.
        """
        words = []
        for name, accepted in self.acts_with.items():
            if name == SEVERAL_RANKS:
                acts = num_ranks > 1
            else:
                acts = values[name] in accepted if accepted else bool(values[name])
            if acts:
                return ""
            words.append(" ".join([name, " or ".join(map(str, accepted))]).strip())
        return " or ".join(words)

    def check(self, value: Any, origin: Origin) -> Any:
        """Returns the value converted to this parameter's type, or refuses it.

        Ints are accepted as floats, floats without a fraction as ints (CANDLE Supervisor sets
        timeout to 3600.0), and NumPy scalars and arrays as Python's. A list of lists is read as one
        list: CANDLE's earlier files have a list for each convolution. A bool is not a number, but a
        program may set it to 1 or 0. Numbers must be finite, and integers fit in 64 bits; a string
        is text that UTF-8 can encode, and what names a place is a path that can exist.

        Raises:
            ParameterError: It has another type, or is not allowed.
        """
        if value is None and self.optional:
            return None
        if hasattr(value, "tolist") and not isinstance(value, type):
            value = value.tolist()
        if not self.many:
            return self._check_one(value, value, origin)
        values = value if isinstance(value, (list, tuple)) else [value]
        if values and all(isinstance(each, (list, tuple)) for each in values):
            values = [number for each in values for number in each]
        return [self._check_one(each, value, origin) for each in values]

    def from_arguments(self, arguments: Sequence[str], origin: Origin) -> Any:
        """Returns the checked value of the arguments that follow a flag on the command line."""
        text = " ".join(arguments)
        if text == "None":
            return self.check(None, origin)
        try:
            convert = _FROM_ARGUMENT[self.type]
            values = [each if each in self.words else convert(each) for each in arguments]
        except (ValueError, KeyError):
            raise self.refusal(repr(text), origin) from None
        return self.check(values if self.many else values[0], origin)

    def refusal(self, shown: str, origin: Origin, reason: str = "") -> ParameterError:
        """Returns the error that refuses a value as the user wrote it; it lists what is allowed."""
        return ParameterError(
            f"{self.name} = {_shorten(shown)} ({origin}): {reason or f'must be {self.allowed}'}"
        )

    def _check_one(self, value: Any, whole: Any, origin: Origin) -> Any:
        if self.type is bool and origin.kind == "program" and value in (0, 1):
            value = bool(value)
        is_word = isinstance(value, str) and value in self.words
        converted = value if is_word else _convert(value, self.type)
        if isinstance(converted, str) and (problem := self._problem(converted)):
            raise self.refusal(_show(whole), origin, problem)
        if (
            converted is None
            or (self.choices is not None and converted not in self.choices)
            or (self.minimum is not None and converted < self.minimum)
            or (self.maximum is not None and converted > self.maximum)
            or (self.above is not None and converted <= self.above)
            or (self.below is not None and converted >= self.below)
        ):
            raise self.refusal(_show(whole), origin)
        return converted

    def _problem(self, text: str) -> str:
        """Returns what is wrong with a string; "" if nothing is."""
        try:
            encoded = text.encode()
        except UnicodeEncodeError:
            encoded = b"\0"
        if b"\0" in encoded:
            return "must be text that UTF-8 can encode, without NUL characters"
        if self.role not in (Role.PLACE, Role.RESULTS):
            return ""
        if len(encoded) > _MAX_PATH_BYTES or max(map(len, encoded.split(b"/"))) > _MAX_NAME_BYTES:
            return (
                f"must be a path of at most {_MAX_PATH_BYTES} bytes, each of its names at most"
                f" {_MAX_NAME_BYTES}"
            )
        try:
            Path(text).expanduser()
        except RuntimeError:
            user = text.partition(os.sep)[0]
            return f"must be a path, but there is no home directory {user}"
        return ""


def _convert(value: Any, kind: type) -> Any:
    """Returns the value as exactly `kind`, or None if that would change it."""
    if kind is bool:
        return value if isinstance(value, bool) else None
    if kind is str:
        return str.__str__(value) if isinstance(value, str) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if kind is float:
        try:
            number = float(value)
        except OverflowError:
            return None
        return number if math.isfinite(number) else None
    if isinstance(value, float) and not value.is_integer():
        return None
    return int(value) if int(value) in _INT64 else None


def _show(value: Any) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # Python refuses to print integers of thousands of digits
        return "a value too long to print"


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_LENGTH else f"{line[: _SHOWN_LENGTH - 3]}..."
