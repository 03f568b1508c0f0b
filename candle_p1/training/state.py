"""What training depends on: reading it from a live model and its callbacks, and putting it back.

Weights and optimizer are the same on every rank. The states of random layers and, in the middle of
an epoch, of metrics and of layers such as batch normalization are each rank's own. A gradient that
is being accumulated over several passes is no part of the state, because checkpoints are only
written between two updates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf, isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from candle_p1.distributed.callbacks import evaluate_shared
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.distributed.replicas import restore_state, seed_states
from candle_p1.errors import CandleError
from candle_p1.files import write_atomically

if TYPE_CHECKING:
    from numpy.typing import NDArray

WEIGHTS, OPTIMIZER, SEED, METRIC = "weights/", "optimizer/", "seed/", "metric/"
BEST = "best/"
"""What the names of arrays begin with."""

KERAS_STATES = {
    keras.callbacks.EarlyStopping: "best best_epoch stopped_epoch wait",
    keras.callbacks.History: "epoch history",
    keras.callbacks.ModelCheckpoint: "best _batches_seen_since_last_saving _last_batch_seen",
    keras.callbacks.ReduceLROnPlateau: "best cooldown_counter wait",
}
"""The attributes in which callbacks of Keras keep their state; of its others nothing is saved."""


class LiveArray:
    """A variable or an array, of which rows can be copied without a temporary copy of the whole."""

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
    a number. The optimizer, whose state has its iterations, learning rate and loss scale, must be
    built; `best` are the weights of the best epoch, in the order of the model's.
    """
    variables = _replicated(model, with_optimizer=with_optimizer)
    named = {f"{BEST}{name}": array for name, array in zip(variables, best, strict=False)}
    return {name: LiveArray(each) for name, each in (variables | named).items()}


def restore_replicated(
    model: Any, read: Callable[[str], NDArray[Any]], names: Iterable[str]
) -> None:
    """Puts saved arrays into a model; the optimizer keeps its state if none is among them.

    `read` returns the array with one of the `names`; it need not outlive the next call.
    """
    variables = _replicated(model, with_optimizer=any(name.startswith(OPTIMIZER) for name in names))
    for name, variable in variables.items():
        variable.assign(read(name))


def own_arrays(model: Any, *, within_epoch: bool) -> dict[str, NDArray[Any]]:
    """Returns copies of what is this rank's own, small arrays by name.

    The states of metrics belong to it within an epoch, which begins by resetting them.
    """
    variables = _own(model, within_epoch=within_epoch)
    return {name: np.array(keras.ops.convert_to_numpy(each)) for name, each in variables.items()}


def attach_state(model: Any) -> None:
    """Puts the state of the steps into the variables of the model, which JAX keeps outside."""
    if keras.backend.backend() == "jax":
        model.jax_state_sync()


def loss_so_far(model: Any) -> float:
    """Returns the mean loss of this rank's steps in the current epoch; 0 if it is not kept."""
    tracker = next((metric for metric in model.metrics if metric.name == "loss"), None)
    return 0.0 if tracker is None else float(keras.ops.convert_to_numpy(tracker.result()))


def restore_own(model: Any, saved: Mapping[str, NDArray[Any]], *, within_epoch: bool) -> None:
    """Puts a rank's own arrays back; others among the saved ones are ignored.

    Within an epoch this must happen after Keras has reset the metrics, when it begins. Raises
    CandleError if an array is missing or has another shape.
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
    Other objects may have these methods, too. Every rank may have additional callbacks after those
    that all ranks have.
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
        """Returns the states of those callbacks that have one, as JSON values, by name."""
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
    names = [known for kind, known in KERAS_STATES.items() if isinstance(callback, kind)]
    return [name for name in " ".join(names).split() if hasattr(callback, name)]


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


class BestEpoch(keras.callbacks.EarlyStopping):  # type: ignore[misc]
    """Ends training when the validation loss no longer falls; the best epoch's weights return.

    Every rank has a copy of these, `weights`, in the order of the model's, which is a part of
    checkpoints. The validation loss is the same on all ranks, and so is what they do.
    """

    def __init__(self, model: Any, patience: int, weights: list[Any] | None = None) -> None:
        super().__init__("val_loss", patience=patience)
        self.weights = weights or model.get_weights()

    @property
    def number(self) -> int | None:
        """The number of the best epoch, from 1; None before the first epoch has ended."""
        return None if self.best is None else self.best_epoch + 1

    @property
    def has_ended(self) -> bool:
        """Whether it has ended training."""
        return bool(self.stopped_epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Keeps the weights if the epoch is the best so far, else maybe ends training."""
        value = (logs or {}).get("val_loss", nan)
        super().on_epoch_end(epoch, {"val_loss": inf if isnan(value) else value})
        if self.number == epoch + 1:
            self.weights = self.model.get_weights()

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Gives the model the weights of the best epoch."""
        if self.number:
            self.model.set_weights(self.weights)


class EpochTable(keras.callbacks.CSVLogger):  # type: ignore[misc]
    """Writes the metrics of every epoch into a CSV file, as Keras does.

    A continued run begins with the file as it was at the checkpoint.
    """

    csv_file: Any

    def checkpoint_state(self) -> dict[str, str]:
        """Returns the text of the file."""
        return {"text": Path(self.filename).read_bytes().decode()}

    def restore_state(self, state: dict[str, str]) -> None:
        """Writes the text, after which later epochs follow."""
        self.csv_file.close()
        path = Path(self.filename)
        write_atomically(path, state["text"])
        self.csv_file = path.open("a", encoding="utf-8", newline="")
        self.append_header = not state["text"]
