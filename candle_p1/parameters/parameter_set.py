"""The parameters of a run: frozen, each with its origin; and the dictionary that drivers change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from typing import Any

from candle_p1.errors import ParameterError, did_you_mean
from candle_p1.parameters.catalog import KNOWN
from candle_p1.parameters.parameter import Origin, Parameter, Role

SECTION = "Global_Params"
"""The section that CANDLE's files have."""
Settings = dict[str, tuple[Any, Origin]]
"""Checked values with their origins, by name."""


class ParameterSet(Mapping[str, Any]):
    """The parameters of a run by name; immutable, see `replace`.

    It has a checked value and its origin for each declaration. Other settings, of parameters that
    only CANDLE knows, cause a warning.
    """

    def __init__(
        self, declared: Mapping[str, Parameter], settings: Settings, warnings: Iterable[str] = ()
    ) -> None:
        self._declared = dict(declared)
        self._settings = {name: each for name, each in settings.items() if name in declared}
        self._others = {name: each for name, each in settings.items() if name not in declared}
        self._warnings = tuple(dict.fromkeys(warnings))

    def __getitem__(self, name: str) -> Any:
        value = self._settings[name][0]
        return list(value) if isinstance(value, list) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._settings)

    def __len__(self) -> int:
        return len(self._settings)

    def __repr__(self) -> str:
        return f"ParameterSet({dict(self)})"

    @property
    def declared(self) -> Mapping[str, Parameter]:
        """The declarations of the parameters, by name."""
        return self._declared

    @property
    def warnings(self) -> tuple[str, ...]:
        """All warnings; one of them names every parameter that was set but has no effect here."""
        names: dict[Origin, list[str]] = {}
        for name, (value, origin) in (self._settings | self._others).items():
            if self._is_in_vain(name, value):
                names.setdefault(replace(origin, line=None), []).append(name)
        sources = [f"{', '.join(each)} ({origin})" for origin, each in names.items()]
        text = f"parameters of CANDLE without effect here: {', '.join(sources)}"
        return (*self._warnings, *[text] * bool(sources))

    def idle(self, num_ranks: int) -> list[str]:
        """Returns sentences on what the user has set for nothing; see `Parameter.acts_with`."""
        sentences = []
        for name, parameter in self._declared.items():
            origin, lacking = self.origin(name), parameter.lacks(self, num_ranks)
            is_set = self[name] != parameter.default
            if is_set and lacking and (origin.is_explicit or origin.kind == "program"):
                lacking = f"without {lacking}"
            elif is_set and parameter.role is Role.UNUSED and origin.is_explicit:
                lacking = "here"
            else:
                continue
            sentences.append(f"{name} = {self[name]} ({origin}) has no effect {lacking}")
        return sentences

    def _is_in_vain(self, name: str, value: Any) -> bool:
        """Returns whether a parameter that has no effect here asks for something."""
        if parameter := self._declared.get(name):
            return parameter.needs_support and value != parameter.default
        return value is not None and value != KNOWN[name]

    def origin(self, name: str) -> Origin:
        """Returns where the value of a parameter comes from."""
        return self._settings[name][1]

    def derived_origin(self, source: str) -> Origin:
        """Returns the origin of a value that follows from the parameter `source`."""
        return replace(self.origin(source), source=source)

    def replace(self, changes: Mapping[str, Any], source: str | None = None) -> ParameterSet:
        """Returns a set with changed values; a value equal to the present one keeps its origin.

        Without a source, a parameter that the changes follow from, the program made them.

        Raises:
            ParameterError: A parameter is unknown, or a value is not allowed.
        """
        origin = self.derived_origin(source) if source else Origin("program")
        settings = self._settings | self._others
        current = current_names(self._declared)
        for name, value in changes.items():
            name = current.get(name, name)
            if name not in self._declared:
                if name not in KNOWN:
                    raise unknown_parameter(name, self._declared, origin)
                settings[name] = (value, origin)
                continue
            checked = self._declared[name].check(value, origin)
            if checked != settings[name][0]:
                settings[name] = (checked, origin)
        return ParameterSet(self._declared, settings, self._warnings)

    def with_settings(self, settings: Settings, warnings: Iterable[str] = ()) -> ParameterSet:
        """Returns a set with these values and origins, unchecked, and with further warnings."""
        changed = self._settings | self._others | settings
        return ParameterSet(self._declared, changed, [*self._warnings, *warnings])

    def without_vain(self) -> ParameterSet:
        """Returns a set in which what has no effect here, as its warnings say, has its default."""
        vain = {
            name: (self._declared[name].default, Origin("not read"))
            for name, (value, _) in self._settings.items()
            if self._is_in_vain(name, value)
        }
        return ParameterSet(self._declared, self._settings | vain, self.warnings)

    def to_text(self) -> str:
        """Returns the text of a parameter file with the same values, and origins as comments."""
        lines = [f"[{SECTION}]"]
        for name, (value, origin) in self._settings.items():
            comment = "".join(char if char.isprintable() else "?" for char in str(origin))
            lines.append(f"{name} = {value!r}  # {comment}")
        return "\n".join(lines) + "\n"


class EditableParameters(dict[str, Any]):
    """What CANDLE drivers get from initialize_parameters(): a dictionary that they may change.

    Attributes:
        base: The set that it was made from, which holds the origins.
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


def current_names(declared: Mapping[str, Parameter]) -> dict[str, str]:
    """Returns the present name for each of CANDLE's earlier names that has no other meaning."""
    return {
        old: name
        for name, parameter in declared.items()
        for old in parameter.old_names
        if old not in declared
    }


def unknown_parameter(name: object, known: Iterable[str], origin: Origin) -> ParameterError:
    """Returns the error for a parameter that is neither declared nor known to CANDLE."""
    near = did_you_mean(str(name), [*known, *KNOWN])
    return ParameterError(f"{name!r} ({origin}) is not a parameter{near}")
