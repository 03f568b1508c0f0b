"""What training depends on: reading it from a live model and its callbacks, and putting it back.

Weights and optimizer are the same on every rank. The states of random layers and, in the middle of
an epoch, of metrics and of layers such as batch normalization are each rank's own. A gradient that
is being accumulated over several passes is no part of the state, because checkpoints are only
written between two updates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from candle_p1.distributed.callbacks import evaluate_shared
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.distributed.replicas import restore_state, seed_states
from candle_p1.errors import CandleError
from candle_p1.training.best_epoch import STATE

if TYPE_CHECKING:
    from numpy.typing import NDArray

WEIGHTS, OPTIMIZER, SEED, METRIC = "weights/", "optimizer/", "seed/", "metric/"
BEST = "best/"
"""What the names of arrays begin with."""

KERAS_STATES: Mapping[Any, Sequence[str]] = {
    keras.callbacks.EarlyStopping: STATE,
    keras.callbacks.History: ("epoch", "history"),
    keras.callbacks.ModelCheckpoint: (
        "best",
        "_batches_seen_since_last_saving",
        "_last_batch_seen",
    ),
    keras.callbacks.ReduceLROnPlateau: ("best", "cooldown_counter", "wait"),
}
"""The attributes in which callbacks of Keras keep their state; of its others nothing is saved."""


class LiveArray:
    """A variable or an array, of which rows can be copied without a temporary copy of the whole.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        nbytes: Its size in bytes.
    """

    def __init__(self, variable: Any) -> None:
        self._variable = variable
        self.shape: tuple[int, ...] = tuple(variable.shape)
        self.dtype = np.dtype(variable.dtype)
        self.nbytes = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def copy_into(self, rows: slice, out: NDArray[Any]) -> None:
        """Copies rows, or a scalar whatever the rows, into an array of their shape.

        With the state in main memory this reads it in place. The view does not outlive the call:
        as long as there is one, TensorFlow copies the variable before it updates it.
        """
        view = view_of(self._variable)
        np.copyto(out, view[rows] if self.shape else view)


def view_of(variable: Any) -> NDArray[Any]:
    """Returns the value of a ``keras.Variable`` in place if it is in main memory, else a copy."""
    if isinstance(variable, np.ndarray):
        return variable
    value = variable.value
    if keras.backend.backend() == "tensorflow":
        value = value.read_value()  # NumPy copies a variable, but not a tensor
    return np.asarray(value)


def replicated_arrays(
    model: Any, *, with_optimizer: bool = True, best: Sequence[Any] = ()
) -> dict[str, LiveArray]:
    """Returns the arrays that are the same on every rank, by name.

    Names do not depend on the number of ranks. A later variable with the name of an earlier one has
    a number.

    Args:
        model: A compiled ``keras.Model`` whose optimizer is built.
        with_optimizer: Whether the optimizer's state, with its iterations, learning rate and loss
            scale, belongs to it.
        best: The weights of the best epoch, in the order of the model's, if they belong to it.
    """
    variables = _replicated(model, with_optimizer=with_optimizer)
    named = {f"{BEST}{name}": array for name, array in zip(variables, best, strict=False)}
    return {name: LiveArray(each) for name, each in (variables | named).items()}


def restore_replicated(
    model: Any, read: Callable[[str], NDArray[Any]], names: Iterable[str]
) -> None:
    """Puts saved arrays into a model; the optimizer keeps its state if none is among them.

    Args:
        model: As for `replicated_arrays`.
        read: Returns a saved array, which need not outlive the next call.
        names: Those that `read` knows: all of the model, maybe without the optimizer.
    """
    variables = _replicated(model, with_optimizer=any(name.startswith(OPTIMIZER) for name in names))
    for name, variable in variables.items():
        variable.assign(read(name))


def own_arrays(model: Any, *, within_epoch: bool) -> dict[str, NDArray[Any]]:
    """Returns copies of what is this rank's own, small arrays by name.

    Within an epoch, the states of metrics belong to it; each epoch resets them.
    """
    variables = _own(model, within_epoch=within_epoch)
    return {name: np.array(keras.ops.convert_to_numpy(each)) for name, each in variables.items()}


def attach_state(model: Any) -> None:
    """Puts the state of the steps into the variables of the model, which JAX keeps outside."""
    if keras.backend.backend() == "jax":
        model.jax_state_sync()


def loss_so_far(model: Any) -> float:
    """Returns the mean loss of this rank's steps in an epoch that is not complete.

    It is 0 if the model does not keep one.
    """
    tracker = next((metric for metric in model.metrics if metric.name == "loss"), None)
    return 0.0 if tracker is None else float(keras.ops.convert_to_numpy(tracker.result()))


def restore_own(model: Any, saved: Mapping[str, NDArray[Any]], *, within_epoch: bool) -> None:
    """Puts a rank's own arrays back; others among the saved ones are ignored.

    Within an epoch this must happen after Keras has reset the metrics, when it begins.

    Raises:
        CandleError: An array is missing or has another shape.
    """
    for name, variable in _own(model, within_epoch=within_epoch).items():
        if name not in saved or saved[name].shape != tuple(variable.shape):
            raise CandleError(f"the checkpoint does not have this model's {name}")
        variable.assign(saved[name])
    if within_epoch:
        restore_state(model, saved)


def build_metrics(model: Any, batch: Any) -> None:
    """Makes the variables of a model's metrics with any batch, so that they can be restored."""
    if keras.backend.backend() == "tensorflow":
        evaluate_shared(model, [batch], SerialCommunicator())
    else:
        model._symbolic_build(data_batch=batch)


class CallbackStates:
    """The states of callbacks: of Keras's own, by name; of others through two methods.

    They are ``checkpoint_state()``, which returns what JSON can hold, and ``restore_state(state)``.

    Args:
        callbacks: The callbacks, and other objects with these methods, in order. Every rank may
            have additional ones after those that all ranks have.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._named: dict[str, Any] = {}
        for callback in callbacks:
            kind, number = type(callback).__name__, 1
            while (name := f"{kind}-{number}") in self._named:
                number += 1
            self._named[name] = callback

    @property
    def unknown(self) -> list[str]:
        """The classes of callbacks that may have a state of which `capture` does not know all."""
        kinds = [type(each).__name__ for each in self._named.values() if _may_lose_state(each)]
        return list(dict.fromkeys(kinds))

    def capture(self) -> dict[str, Any]:
        """Returns the states of those callbacks that have one, as JSON values, by name.

        Raises:
            CandleError: A state cannot be JSON.
        """
        states: dict[str, Any] = {}
        for name, callback in self._named.items():
            if hasattr(callback, "checkpoint_state"):
                state = callback.checkpoint_state()
            else:
                state = {key: getattr(callback, key) for key in _attributes(callback)}
            if state:
                states[name] = _as_json(name, state)
        return states

    def restore(self, states: Mapping[str, Any]) -> None:
        """Puts back what `capture` returned; states of callbacks that do not exist are ignored."""
        for name, state in states.items():
            if name not in self._named:
                continue
            callback = self._named[name]
            if hasattr(callback, "restore_state"):
                callback.restore_state(state)
            else:
                known = [key for key in _attributes(callback) if key in state]
                vars(callback).update({key: state[key] for key in known})


def _may_lose_state(callback: Any) -> bool:
    if hasattr(callback, "checkpoint_state"):
        return False
    if type(callback).__module__.startswith(("keras.", "candle_p1.")):
        return bool(getattr(callback, "restore_best_weights", False))
    return len(vars(callback)) > len(vars(keras.callbacks.Callback()))


def _attributes(callback: Any) -> list[str]:
    """Returns the attributes in which a callback of Keras keeps its state."""
    kinds = [kind for kind in KERAS_STATES if isinstance(callback, kind)]
    return [name for kind in kinds for name in KERAS_STATES[kind] if hasattr(callback, name)]


def _as_json(name: str, state: Any) -> Any:
    """Returns a state as it is read from JSON: NumPy's numbers and arrays are numbers and lists."""
    try:
        return json.loads(json.dumps(state, default=lambda value: value.tolist()))
    except (AttributeError, TypeError, ValueError) as error:
        kind = name.rpartition("-")[0]
        raise CandleError(f"the state of the callback {kind} cannot be saved: {error}") from error


def _replicated(model: Any, *, with_optimizer: bool) -> dict[str, Any]:
    named = _named(WEIGHTS, [(variable.path, variable) for variable in model.weights])
    if with_optimizer:
        # The first part of a path is the optimizer's name, which depends on the number of ranks.
        optimizer = [(v.path.partition("/")[2], v) for v in model.optimizer.variables]
        named |= _named(OPTIMIZER, optimizer)
    return named


def _own(model: Any, *, within_epoch: bool) -> dict[str, Any]:
    named = {f"{SEED}{i}": state for i, state in enumerate(seed_states(model))}
    if within_epoch:
        variables = [variable for metric in model.metrics for variable in metric.variables]
        named |= {f"{METRIC}{i}": variable for i, variable in enumerate(variables)}
    return named


def _named(prefix: str, variables: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for path, variable in variables:
        name, number = prefix + path, 2
        while name in named:
            name, number = f"{prefix}{path}-{number}", number + 1
        named[name] = variable
    return named
