"""The parameters of a run: declared once, read from a file and the flags, then frozen.

A flag precedes the file of ``--config_file``, that precedes the benchmark's own file, and that the
declared default. Whatever is not certain is an error.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from candle_p1.errors import ParameterError, did_you_mean
from candle_p1.files import write_atomically
from candle_p1.parameters.declarations import (
    CANDLE_PARAMETERS,
    RUN_PARAMETERS,
    SUPERVISOR_PARAMETERS,
)
from candle_p1.parameters.parameter import Origin, Parameter
from candle_p1.parameters.parameter_file import SECTION, read_entries, read_literal

__all__ = [
    "CANDLE_PARAMETERS",
    "RUN_PARAMETERS",
    "SUPERVISOR_PARAMETERS",
    "Declaration",
    "EditableParameters",
    "Origin",
    "Parameter",
    "ParameterSet",
]

Settings = dict[str, tuple[Any, Origin]]
"""Checked values with their origins, by name."""

_FLAG = Origin("flag")
_NUMBER_MARK = "\0"  # no word of a command line can hold it


class ParameterSet(Mapping[str, Any]):
    """The parameters of a run, by name or as attributes. It does not change; see `replace`.

    Args:
        declared: The parameters.
        settings: A checked value and its origin for each of them.
    """

    __slots__ = ("_declared", "_settings")
    _declared: dict[str, Parameter]
    _settings: Settings

    def __init__(self, declared: Mapping[str, Parameter], settings: Settings) -> None:
        object.__setattr__(self, "_declared", dict(declared))
        object.__setattr__(self, "_settings", dict(settings))

    def __getitem__(self, name: str) -> Any:
        value = self._settings[name][0]
        return list(value) if isinstance(value, list) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._settings)

    def __len__(self) -> int:
        return len(self._settings)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._settings:
            near = "" if name.startswith("_") else did_you_mean(name, self._settings)
            raise AttributeError(f"there is no parameter {name!r}{near}")
        return self[name]

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"cannot set {name}: the parameters are frozen; use replace()")

    def __repr__(self) -> str:
        return f"ParameterSet({dict(self)})"

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self._declared, self._settings)

    @property
    def declared(self) -> Mapping[str, Parameter]:
        """The declarations of the parameters, by name."""
        return self._declared

    def origin(self, name: str) -> Origin:
        """Returns where the value of a parameter comes from."""
        return self._settings[name][1]

    def replace(self, changes: Mapping[str, Any], kind: str = "program") -> ParameterSet:
        """Returns a set with other values; a value equal to the present one keeps its origin.

        Args:
            changes: Values by name.
            kind: The origin of the changes.

        Raises:
            ParameterError: One is unknown or unfit.
        """
        origin = Origin(kind)
        settings = dict(self._settings)
        for name, value in changes.items():
            if name not in self._declared:
                raise _unknown(name, self._declared, origin)
            checked = self._declared[name].check(value, origin)
            if checked != settings[name][0]:
                settings[name] = (checked, origin)
        return ParameterSet(self._declared, settings)

    def rewrite(self, changes: Mapping[str, Any]) -> ParameterSet:
        """Returns a set in which some values are written otherwise; their origins stay."""
        settings = {name: (value, self.origin(name)) for name, value in changes.items()}
        return ParameterSet(self._declared, self._settings | settings)

    def editable(self) -> EditableParameters:
        """Returns a dictionary of the values that remembers this set."""
        return EditableParameters(self)

    def to_text(self) -> str:
        """Returns a parameter file that reads back to the same values, with origins as comments."""
        lines = [f"[{SECTION}]"]
        for name, (value, origin) in self._settings.items():
            comment = "".join(char if char.isprintable() else "?" for char in str(origin))
            lines.append(f"{name} = {value!r}  # {comment}")
        return "\n".join(lines) + "\n"

    def write(self, path: Path | str) -> None:
        """Writes `to_text` to a file, atomically.

        Raises:
            OSError: The directory is missing, full or read-only.
        """
        write_atomically(Path(path), self.to_text())


class EditableParameters(dict[str, Any]):
    """What CANDLE drivers get from initialize_parameters(): a dictionary they may change.

    Attributes:
        base: The set it came from, which knows the origins.
    """

    base: ParameterSet

    def __init__(self, base: ParameterSet) -> None:
        super().__init__(base)
        self.base = base

    def copy(self) -> EditableParameters:
        """Returns a copy that remembers the same set."""
        return copy(self)

    def __or__(self, other: Mapping[str, Any]) -> EditableParameters:  # type: ignore[override]
        result = self.copy()
        result.update(other)
        return result


class Declaration:
    """The parameters of a program.

    Args:
        groups: The parameters. One declared again in a later group replaces the earlier one; it
            keeps its short flags and its place in --help unless it has others.
        program: The program's name in --help.
        description: What the program does, in --help.
    """

    def __init__(
        self, *groups: Iterable[Parameter], program: str | None = None, description: str = ""
    ) -> None:
        self.program, self.description = program or Path(sys.argv[0]).name, description
        declared: dict[str, Parameter] = {}
        for parameter in (each for group in groups for each in group):
            name = parameter.name
            if name == "help" or hasattr(ParameterSet, name):
                raise ValueError(f"a parameter cannot be named {name!r}")
            if name in declared:
                before = declared[name]
                parameter = replace(
                    parameter,
                    short=parameter.short or before.short,
                    group=parameter.group or before.group,
                )
            declared[name] = parameter
        self.parameters: Mapping[str, Parameter] = declared
        flags = ["-h", *(flag for parameter in declared.values() for flag in parameter.short)]
        if repeated := {flag for flag in flags if flags.count(flag) > 1}:
            raise ValueError(f"declared for two parameters: {', '.join(sorted(repeated))}")

    def parse(self, argv: Sequence[str], model_file: Path | None = None) -> ParameterSet:
        """Returns the parameters that flags and files give; --help prints and exits with 0.

        Args:
            argv: The words of the command line after the program's name.
            model_file: The benchmark's own parameter file.

        Raises:
            ParameterError: A flag or a file is wrong, or a parameter without default is not set.
        """
        settings = self._defaults()
        if model_file is not None:
            settings |= self.read_file(model_file, "model file")
        flags: Settings = {
            name: (self.parameters[name].from_words(words, _FLAG), _FLAG)
            for name, words in self._read_flags(argv, settings).items()
        }
        config_file = flags["config_file"][0] if "config_file" in flags else None
        if config_file is not None:
            settings |= self.read_file(_find(Path(config_file), model_file), "config file")
        return self._complete(ParameterSet(self.parameters, settings | flags))

    def bind(self, parameters: Mapping[str, Any]) -> ParameterSet:
        """Returns the frozen set of what a driver hands over.

        Args:
            parameters: A ParameterSet, which is returned as it is; EditableParameters, whose
                untouched values keep their origins; or a dictionary, which goes over the defaults.

        Raises:
            ParameterError: A parameter is unknown, unfit, removed or not set.
        """
        if isinstance(parameters, ParameterSet):
            if parameters.declared != self.parameters:
                raise ParameterError(f"these are not the parameters of {self.program}")
            return parameters
        if isinstance(parameters, EditableParameters):
            base = self.bind(parameters.base)
            if removed := [name for name in base if name not in parameters]:
                raise ParameterError(
                    f"removed from the parameters: {', '.join(removed)}; set another value, or"
                    " None where it is allowed"
                )
            return base.replace(parameters)
        defaults = ParameterSet(self.parameters, self._defaults())
        return self._complete(defaults.replace(parameters))

    def read_file(self, path: Path, kind: str) -> Settings:
        """Returns the values of a parameter file, with their origins.

        Args:
            path: The file.
            kind: What messages call it: "model file" or "config file".

        Raises:
            ParameterError: It cannot be read, is malformed, or sets a parameter twice, an unknown
                one or one to an unfit value.
        """
        # The model file is known by its name; another file may lie anywhere.
        file = path.name if kind == "model file" else str(path)
        settings: Settings = {}
        for name, text, line in read_entries(path, Origin(kind, file)):
            origin = Origin(kind, file, line)
            if name not in self.parameters:
                raise _unknown(name, self.parameters, origin)
            if name in settings:
                raise ParameterError(
                    f"{name!r} is set twice in {kind} {file}: on lines {settings[name][1].line} and"
                    f" {line}; keep one"
                )
            parameter = self.parameters[name]
            value = read_literal(text, parameter, origin)
            settings[name] = (parameter.check(value, origin), origin)
        return settings

    def _defaults(self) -> Settings:
        return {
            name: (parameter.default, Origin("default"))
            for name, parameter in self.parameters.items()
        }

    def _complete(self, params: ParameterSet) -> ParameterSet:
        missing = [
            name
            for name, parameter in self.parameters.items()
            if parameter.must_be_set and params[name] is None
        ]
        if missing:
            raise ParameterError(
                f"not set: {', '.join(missing)}; put a value into the parameter file, or give"
                f" {', '.join(f'--{name}' for name in missing)}"
            )
        return params

    def _read_flags(self, argv: Sequence[str], settings: Settings) -> dict[str, list[str]]:
        """Returns the words that follow each flag, by name. `settings` are shown in --help."""
        parser = self._parser(settings)
        if "-h" in argv or "--help" in argv:
            parser.print_help()
            parser.exit()
        flags = ["--help", *(f"--{name}" for name in self.parameters)]
        flags += [short for parameter in self.parameters.values() for short in parameter.short]
        words = []
        for word in argv:
            # argparse takes "-1e-3" for a flag, and "-lr0.1" for -l with the value "r0.1".
            if re.match(r"-\.?\d", word):
                words.append(_NUMBER_MARK + word)
                continue
            flag = word.split("=")[0]
            if word.startswith("-") and word != "-" and flag not in flags:
                meant = flag[:2] + flag[2:].replace("-", "_")
                near = did_you_mean(meant, flags) if flag != "--" else ""
                raise ParameterError(f"{flag} is not a flag{near}")
            words.append(word)
        found, left = parser.parse_known_args(words)
        if left:
            word = left[0].removeprefix(_NUMBER_MARK)
            raise ParameterError(f"{word!r} on the command line belongs to no flag")
        return {
            name: [word.removeprefix(_NUMBER_MARK) for word in value]
            for name, value in vars(found).items()
        }

    def _parser(self, settings: Settings) -> argparse.ArgumentParser:
        parser = _Parser(
            prog=self.program,
            description=self.description,
            usage="%(prog)s [--FLAG VALUE ...]",
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )
        headings: dict[str, argparse._ArgumentGroup] = {}
        for name, parameter in self.parameters.items():
            value, origin = settings[name]
            present = repr(value)
            if value is None and parameter.must_be_set:
                present = "none, must be set"
            elif origin.kind != "default":
                present += f" ({origin})"
            help_ = f"{parameter.help} [{parameter.allowed}; default: {present}]"
            heading = parameter.group or "of this benchmark"
            if heading not in headings:
                headings[heading] = parser.add_argument_group(heading)
            headings[heading].add_argument(
                *parameter.short,
                f"--{name}",
                nargs="+" if parameter.many else 1,
                metavar=parameter.type.__name__.upper(),
                help=help_.replace("%", "%%"),
            )
        return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ParameterError(message)


def _find(path: Path, model_file: Path | None) -> Path:
    """Returns a config file's path: in the working directory, else beside the model file."""
    if model_file is not None:
        beside = model_file.parent / path
        with suppress(OSError):
            return beside if not path.exists() and beside.exists() else path
    return path


def _unknown(name: object, known: Iterable[str], origin: Origin) -> ParameterError:
    return ParameterError(f"{name!r} ({origin}) is not a parameter{did_you_mean(str(name), known)}")
