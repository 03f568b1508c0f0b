"""The state of Keras callbacks, as JSON: which of them have one, and how it is put back.

A callback with methods ``checkpoint_state()`` and ``restore_state(state)`` decides itself; the
state is anything that `encode` takes. Of any other callback of Keras or of a benchmark's author,
those attributes are saved that have changed since training began. The package's own callbacks
without these methods have no state that outlives an epoch.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_TAG, _VALUE = "type", "value"
_KERAS_SETS = {"model", "_model", "params"}
_DERIVED = "min_delta"
"""Of callbacks that monitor a metric, the sign of this setting depends on `monitor_op`, a function,
and Keras sets both when the first epoch ends."""
_OWN_PACKAGE = "candle_p1."


class CallbackStates:
    """The states of a list of callbacks, between the beginning of training and its end.

    Every rank may have additional callbacks of its own after those that all ranks have.

    Args:
        callbacks: The callbacks, in order.

    Attributes:
        lost: What could not be saved so far, as clauses, each one once.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._named: dict[str, Any] = {}
        for callback in callbacks:
            kind, number = type(callback).__name__, 1
            while (name := f"{kind}-{number}") in self._named:
                number += 1
            self._named[name] = callback
        self._initial: dict[str, dict[str, str | int]] = {}
        self.lost: list[str] = []

    def begin(self) -> None:
        """Notes what callbacks are like when training begins, after their `on_train_begin`."""
        self._initial = {
            name: {key: _fingerprint(value) for key, value in _attributes(callback).items()}
            for name, callback in self._named.items()
            if _is_generic(callback)
        }

    def capture(self) -> dict[str, Any]:
        """Returns the states of those callbacks that have one, as JSON values, by name."""
        states: dict[str, Any] = {}
        for name, callback in self._named.items():
            if hasattr(callback, "checkpoint_state"):
                states[name] = encode(callback.checkpoint_state())
            elif name in self._initial and (changed := self._changed(name, callback)):
                states[name] = changed
        return states

    def restore(self, states: Mapping[str, Any]) -> None:
        """Puts back what `capture` returned; states of callbacks that do not exist are ignored."""
        for name, state in states.items():
            if name not in self._named:
                continue
            callback = self._named[name]
            if hasattr(callback, "restore_state"):
                callback.restore_state(decode(state))
            elif name in self._initial:
                for key, value in state.items():
                    setattr(callback, key, decode(value))

    def _changed(self, name: str, callback: Any) -> dict[str, Any]:
        initial, changed, lost = self._initial[name], {}, []
        for key, value in _attributes(callback).items():
            if _fingerprint(value) == initial.get(key):
                continue
            try:
                changed[key] = encode(value)
            except TypeError:
                lost.append(key)
        if lost:
            clause = f"{', '.join(lost)} of the callback {name.rpartition('-')[0]}"
            if clause not in self.lost:
                self.lost.append(clause)
        return changed


def encode(value: Any) -> Any:
    """Returns a value as JSON: numbers, text, None, and lists, tuples and dictionaries of these.

    Numbers of NumPy, tuples, dictionaries whose keys are not text, and numbers that are not finite
    are described by an object, so that `decode` returns what was given.

    Raises:
        TypeError: It is something else.
    """
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {_TAG: f"numpy.{value.dtype.name}", _VALUE: encode(value.item())}
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: "float", _VALUE: str(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [encode(each) for each in value]
    if type(value) is tuple:
        return {_TAG: "tuple", _VALUE: [encode(each) for each in value]}
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: encode(each) for key, each in value.items()}
        items = [[encode(key), encode(each)] for key, each in value.items()]
        return {_TAG: "dict", _VALUE: items}
    raise TypeError(f"{type(value).__name__} cannot be saved")


def decode(value: Any) -> Any:
    """Returns what was given to `encode`."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(each) for key, each in value.items()}
    kind, content = value[_TAG], value[_VALUE]
    if kind == "float":
        return float(content)
    if kind == "tuple":
        return tuple(decode(each) for each in content)
    if kind == "dict":
        return {decode(key): decode(each) for key, each in content}
    return np.dtype(kind.removeprefix("numpy.")).type(decode(content))


def _is_generic(callback: Any) -> bool:
    is_own = type(callback).__module__.startswith(_OWN_PACKAGE)
    return not is_own and not hasattr(callback, "checkpoint_state")


def _attributes(callback: Any) -> dict[str, Any]:
    """Returns the attributes that may be state."""
    omitted = _KERAS_SETS | ({_DERIVED} if hasattr(callback, "monitor_op") else set())
    found = {key: value for key, value in vars(callback).items() if key not in omitted}
    found.pop("monitor_op", None)
    return found


def _fingerprint(value: Any) -> str | int:
    """Returns what tells whether a value has changed: its JSON, or which object it is."""
    try:
        return json.dumps(encode(value))
    except TypeError:
        return id(value)
