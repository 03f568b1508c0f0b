"""One declared parameter, and where a value comes from."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from candle_p1.errors import ParameterError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_BOOLEAN_WORDS = dict.fromkeys(("true", "t", "yes", "y", "1"), True) | dict.fromkeys(
    ("false", "f", "no", "n", "0"), False
)
_FROM_WORD: dict[type, Callable[[str], Any]] = {
    bool: lambda word: _BOOLEAN_WORDS[word.lower()],
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


@dataclass(frozen=True)
class Origin:
    """Where a value comes from.

    Attributes:
        kind: "default", "model file", "config file", "flag" or "program".
        file: The parameter file, as shown to the user.
        line: The line of the file, counted from 1.
    """

    kind: str
    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        text = self.kind if self.file is None else f"{self.kind} {self.file}"
        return text if self.line is None else f"{text}, line {self.line}"


@dataclass(frozen=True)
class Parameter:
    """One declared parameter.

    Attributes:
        name: The key in a file, and the long flag: --name.
        type: bool, int, float or str.
        default: Its value where nothing else gives one. None, unless `optional`, stands for no
            default: a file, a flag or a program has to set it.
        help: What it is, with the unit where there is one.
        short: Short flags, such as "-e"; CANDLE's "-lr" has two letters.
        choices: The values it may have.
        minimum: The smallest value it may have.
        maximum: The largest value it may have.
        above: A value it must exceed.
        below: A value it must stay under.
        many: It is a list of values: several words on the command line, a list in a file, where a
            single value is taken as a list of one.
        optional: None is a valid value, also as a word on the command line.
        group: Its heading in --help.
    """

    name: str
    type: type
    default: Any
    help: str
    short: tuple[str, ...] = ()
    choices: tuple[Any, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    many: bool = False
    optional: bool = False
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

    @property
    def must_be_set(self) -> bool:
        """Whether it has no default, not even None."""
        return self.default is None and not self.optional

    @property
    def allowed(self) -> str:
        """The values it may have, in words."""
        one, several = _TYPE_NAMES[self.type]
        limits = [
            f"{words} {limit}"
            for words, limit in (
                ("at least", self.minimum),
                ("above", self.above),
                ("at most", self.maximum),
                ("below", self.below),
            )
            if limit is not None
        ]
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

    def check(self, value: Any, origin: Origin) -> Any:
        """Returns the value as this parameter's type, or refuses it.

        An int is taken as a float, and a float without a fraction as an int (CANDLE Supervisor sets
        timeout to 3600.0); NumPy's scalars and arrays are taken as Python's. A bool is no number.
        Numbers are finite, and integers fit in 64 bits.

        Args:
            value: The value; of a parameter of many values, a list, a tuple or a single one.
            origin: Where it comes from, for the message.

        Raises:
            ParameterError: It has another type, or is none of the values allowed.
        """
        if value is None and self.optional:
            return None
        if hasattr(value, "tolist") and not isinstance(value, type):
            value = value.tolist()
        if not self.many:
            return self._check_one(value, value, origin)
        values = value if isinstance(value, (list, tuple)) else [value]
        return [self._check_one(each, value, origin) for each in values]

    def from_words(self, words: Sequence[str], origin: Origin) -> Any:
        """Returns the value that words of a command line stand for, checked.

        Raises:
            ParameterError: They stand for none of the values allowed.
        """
        text = " ".join(words)
        if text == "None":
            return self.check(None, origin)
        try:
            values = [_FROM_WORD[self.type](word) for word in words]
        except (ValueError, KeyError):
            raise self.refusal(repr(text), origin) from None
        return self.check(values if self.many else values[0], origin)

    def refusal(self, shown: str, origin: Origin, reason: str = "") -> ParameterError:
        """Returns the error that refuses a value.

        Args:
            shown: The value, as the user wrote it.
            origin: Where it comes from.
            reason: What is wrong; by default, what would be allowed.
        """
        return ParameterError(
            f"{self.name} = {_shorten(shown)} ({origin}): {reason or f'must be {self.allowed}'}"
        )

    def _check_one(self, value: Any, whole: Any, origin: Origin) -> Any:
        converted = _convert(value, self.type)
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


def _convert(value: Any, kind: type) -> Any:
    """Returns the value as exactly `kind`, or None where that would not be the same value."""
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
    except (ValueError, RecursionError):  # Python does not print integers of thousands of digits
        return "a value too long to print"


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_LENGTH else f"{line[: _SHOWN_LENGTH - 3]}..."
