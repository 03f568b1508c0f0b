"""The parameters of a program, and how their values are read from files and flags.

A flag takes precedence over the file of ``--config_file``, which takes precedence over the
benchmark's own file, and that over the declared default. Anything ambiguous is an error.

A parameter file has sections, which have no meaning, and ``key = value``. A value is a Python
literal. Lines that begin with # or ; are comments, and so is everything after a # that follows a
value, as in Python.
"""

from __future__ import annotations

import argparse
import ast
import configparser
import re
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from candle_p1.errors import ParameterError, UnknownFlagError
from candle_p1.files import read_regular_file
from candle_p1.parameters.catalog import CANDLES, KNOWN, REGISTERED_ONLY
from candle_p1.parameters.parameter import BOOLEANS, Needs, Origin, Parameter
from candle_p1.parameters.parameter_set import (
    SECTION,
    EditableParameters,
    ParameterSet,
    Settings,
    current_names,
    unknown_parameter,
)

_FLAG = Origin("flag")
_NO_LITERAL = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)


class _WholeWords(argparse.HelpFormatter):
    """Help whose lines are broken between words only, not at hyphens."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


class Declaration:
    """The parameters of a program.

    Args:
        groups: The parameters. A parameter that a later group declares again replaces the earlier
            one, and keeps the earlier short flags, old names and heading unless it has its own.
        program: Its name in --help.
        description: What it does, in --help.
        choices: The allowed values of parameters that do not list them, by name.
        acts_with: What gives parameters an effect that do not say so themselves, by name.
    """

    def __init__(
        self,
        *groups: Iterable[Parameter],
        program: str | None = None,
        description: str = "",
        choices: Mapping[str, Sequence[str]] | None = None,
        acts_with: Mapping[str, Needs] | None = None,
    ) -> None:
        self.program, self.description = program or Path(sys.argv[0]).name, description
        choices, acts_with = choices or {}, acts_with or {}
        declared: dict[str, Parameter] = {}
        for parameter in (each for group in groups for each in group):
            name = parameter.name
            if name == "help":
                raise ValueError(f"a parameter cannot be named {name!r}")
            if before := declared.get(name):
                kept = ("short", "old_names", "group")
                own = {field: getattr(parameter, field) or getattr(before, field) for field in kept}
                parameter = replace(parameter, **own)
            if name in choices and parameter.choices is None:
                parameter = replace(parameter, choices=tuple(choices[name]))
            if name in acts_with and not parameter.acts_with:
                parameter = replace(parameter, acts_with=acts_with[name])
            declared[name] = parameter
        if unknown := {*choices, *acts_with} - declared.keys():
            raise ValueError(f"there are no parameters {sorted(unknown)}")
        self.parameters: Mapping[str, Parameter] = declared
        flags = ["-h", *(flag for name in declared for flag in self._flags(name))]
        if repeated := {flag for flag in flags if flags.count(flag) > 1}:
            raise ValueError(f"declared for two parameters: {', '.join(sorted(repeated))}")
        self._current_names = current_names(declared)

    def parse(self, argv: Sequence[str], model_file: Path | None = None) -> ParameterSet:
        """Returns the parameters as set by flags and files; --help prints and exits with 0.

        Raises:
            ParameterError: A flag or a file is wrong, or a parameter without a default is not set.
        """
        settings = self._defaults()
        if model_file is not None:
            settings |= self.read_file(model_file, "model file")
        flags: Settings = {
            name: (self._from_arguments(name, arguments), _FLAG)
            for name, arguments in self._read_flags(argv, settings).items()
        }
        config_file = flags["config_file"][0] if "config_file" in flags else None
        if config_file is not None:
            settings |= self.read_file(_find(Path(config_file), model_file), "config file")
        return self._complete(ParameterSet(self.parameters, settings | flags))

    def bind(self, parameters: Mapping[str, Any]) -> ParameterSet:
        """Returns the frozen set of the parameters that a driver passes.

        Args:
            parameters: A ParameterSet, which is returned unchanged; EditableParameters, whose
                unchanged values keep their origins; or a dictionary, which overrides the defaults.

        Raises:
            ParameterError: A parameter is unknown, removed or not set, or a value is not allowed.
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

        Also those of CANDLE's other parameters, as they are. A file that Supervisor writes may set
        a parameter to None under its present name and to a value under an earlier one. `kind` is
        what messages call the file: "model file" or "config file".

        Raises:
            ParameterError: It cannot be read, is malformed, sets an unknown parameter or the same
                one twice, or sets a value that is not allowed.
        """
        # The name is enough to identify the model file; a config file may be anywhere.
        file = path.name if kind == "model file" else str(path)
        settings: Settings = {}
        keys: dict[str, str] = {}
        for key, text, line in read_entries(path, Origin(kind, file)):
            origin = Origin(kind, file, line)
            name = self._current_names.get(key, key)
            if parameter := self.parameters.get(name):
                value = parameter.check(read_literal(text, parameter, origin), origin)
            elif name in KNOWN:
                value = read_any(text)
            else:
                raise unknown_parameter(name, self.parameters, origin)
            if before := settings.get(name):
                if keys[name] == key or None not in (before[0], value):
                    raise ParameterError(
                        f"{name!r} is set twice in {kind} {file}: on lines {before[1].line} and"
                        f" {line}; keep one"
                    )
                if value is None:
                    continue
            settings[name], keys[name] = (value, origin), key
        return settings

    def _defaults(self) -> Settings:
        origin = Origin("default")
        return {name: (each.default, origin) for name, each in self.parameters.items()}

    def _complete(self, params: ParameterSet) -> ParameterSet:
        required = [name for name, parameter in self.parameters.items() if parameter.required]
        if missing := [name for name in required if params[name] is None]:
            raise ParameterError(
                f"not set: {', '.join(missing)}; set a value in the parameter file, or give"
                f" {', '.join(f'--{name}' for name in missing)}"
            )
        return params

    def _read_flags(self, argv: Sequence[str], settings: Settings) -> dict[str, list[str]]:
        """Returns the arguments after each flag, by name; --help shows `settings`."""
        if "-h" in argv or "--help" in argv:
            self._print_help(settings)
            sys.exit(0)
        found: dict[str, list[str]] = {}
        name, takes_more = "", False
        for argument in argv:
            if re.fullmatch(r"[^-].*|-?|-\.?\d.*", argument, re.DOTALL):  # "-1e-3" is a number
                if not takes_more:
                    raise ParameterError(
                        f"{argument!r} on the command line does not belong to a flag"
                    )
                found[name].append(argument)
                takes_more = name not in self.parameters or self.parameters[name].many
                continue
            flag, has_value, value = argument.partition("=")
            name, takes_more = self._meant(flag), not has_value
            found[name] = [value] if has_value else []
        return found

    def _meant(self, flag: str) -> str:
        """Returns the name of the parameter that a flag sets.

        As with CANDLE, which uses argparse, a beginning of a name is enough if no other name begins
        so; but only CANDLE's names may be abbreviated, so that its lines keep their meaning when
        other names are added.

        Raises:
            ParameterError: None is meant, or it may be one of several.
        """
        names = {flag: name for name in self.parameters for flag in self._flags(name)}
        if flag in names:
            return names[flag]
        long = flag.removeprefix("--") if flag.startswith("--") else flag.removeprefix("-")
        for name in (long, self._current_names.get(long)):
            if name in self.parameters or name in KNOWN:
                return str(name)
        abbreviated = CANDLES & {*self.parameters, *REGISTERED_ONLY}
        found = sorted(name for name in abbreviated if name.startswith(long))
        if not flag.startswith("--") or not long or not found:
            raise UnknownFlagError(flag, ["--help", *names])
        if len(found) > 1:
            raise ParameterError(
                f"{flag} is ambiguous: it may stand for {', '.join(f'--{n}' for n in found)};"
                " write the flag in full"
            )
        return found[0]

    def _from_arguments(self, name: str, arguments: list[str]) -> Any:
        """Returns the value of a flag; a boolean one without arguments is True."""
        parameter = self.parameters.get(name)
        if not arguments and (parameter is None or parameter.type is bool):
            return True
        if parameter is None:
            text = " ".join(arguments)
            is_bool = isinstance(KNOWN[name], bool)
            return BOOLEANS.get(text.lower(), text) if is_bool else read_any(text)
        if not arguments:
            raise ParameterError(f"{'/'.join(self._flags(name))} needs a value")
        return parameter.from_arguments(arguments, _FLAG)

    def _flags(self, name: str) -> list[str]:
        return [*self.parameters[name].short, f"--{name}"]

    def _print_help(self, settings: Settings) -> None:
        usage = "%(prog)s [--FLAG VALUE ...]"
        parser = argparse.ArgumentParser(
            self.program, usage, self.description, formatter_class=_WholeWords
        )
        names = dict.fromkeys(each.group for each in self.parameters.values())
        groups = {name: parser.add_argument_group(name or "of this benchmark") for name in names}
        for name, parameter in self.parameters.items():
            value, origin = settings[name]
            present = repr(value)
            if value is None and parameter.required:
                present = "none, must be set"
            elif origin.kind != "default":
                present += f" ({origin})"
            help_ = f"{parameter.help} [{parameter.allowed}; default: {present}]"
            groups[parameter.group].add_argument(
                *self._flags(name),
                nargs="+" if parameter.many else 1,
                metavar=parameter.type.__name__.upper(),
                help=help_.replace("%", "%%"),
            )
        parser.print_help()


def _find(path: Path, model_file: Path | None) -> Path:
    """Returns a config file's path: in the working directory, else beside the model file."""
    with suppress(OSError):
        beside = model_file and model_file.parent / path
        return beside if beside and not path.exists() and beside.exists() else path
    return path


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
        return _literal(text, "error")
    except _NO_LITERAL:
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
        return _literal(text, "ignore")
    except _NO_LITERAL:
        return text


def _literal(text: str, on_warning: Literal["error", "ignore"]) -> Any:
    """Returns the value of a literal; Python warns of an invalid escape in it."""
    with warnings.catch_warnings():
        warnings.simplefilter(on_warning)
        return ast.literal_eval(text)


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
