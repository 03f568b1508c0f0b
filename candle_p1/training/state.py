"""The arrays that training depends on: reading them from a live model and putting them back.

Weights and optimizer are the same on every rank. The states of random layers and, in the middle of
an epoch, of metrics and of layers such as batch normalization are each rank's own. A gradient that
is being accumulated over several passes is no part of the state, because checkpoints are only
written between two updates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from candle_p1.distributed.callbacks import evaluate_shared, restore_state
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.distributed.seeds import seed_states
from candle_p1.errors import CandleError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from numpy.typing import DTypeLike, NDArray

WEIGHTS, OPTIMIZER, SEED, METRIC = "weights/", "optimizer/", "seed/", "metric/"
"""What the names of arrays begin with."""


class LiveArray:
    """A variable of a model, of which rows can be copied without a temporary copy of the whole.

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
    value = variable.value
    if keras.backend.backend() == "tensorflow":
        value = value.read_value()  # NumPy copies a variable, but not a tensor
    return np.asarray(value)


def replicated_arrays(model: Any, *, with_optimizer: bool = True) -> dict[str, LiveArray]:
    """Returns the arrays that are the same on every rank, by name.

    Names do not depend on the number of ranks. A later variable with the name of an earlier one has
    a number.

    Args:
        model: A compiled ``keras.Model`` whose optimizer is built.
        with_optimizer: Whether the optimizer's state, with its iterations, learning rate and loss
            scale, belongs to it.
    """
    return {
        name: LiveArray(variable)
        for name, variable in _replicated(model, with_optimizer=with_optimizer).items()
    }


def restore_replicated(
    model: Any, read: Callable[[str], NDArray[Any]], names: Iterable[str]
) -> None:
    """Puts saved arrays into a model; the optimizer keeps its state if none is among them.

    Args:
        model: As for `replicated_arrays`.
        read: Returns a saved array, which need not outlive the next call.
        names: Those that `read` knows; see `differences`.
    """
    variables = _replicated(model, with_optimizer=any(name.startswith(OPTIMIZER) for name in names))
    for name, variable in variables.items():
        variable.assign(read(name))


def differences(model: Any, saved: Mapping[str, tuple[tuple[int, ...], DTypeLike]]) -> list[str]:
    """Returns how a model's arrays differ from saved ones, as clauses; none if they do not.

    Args:
        model: As for `replicated_arrays`.
        saved: Shape and dtype of each saved array.
    """
    with_optimizer = any(name.startswith(OPTIMIZER) for name in saved)
    here = replicated_arrays(model, with_optimizer=with_optimizer)
    found = [f"it has no {name}" for name in here if name not in saved]
    found += [f"the model has no {name}" for name in saved if name not in here]
    for name, array in here.items():
        if name not in saved:
            continue
        shape, dtype = saved[name]
        if tuple(shape) != array.shape:
            found.append(f"{name} has the shape {tuple(shape)} there and {array.shape} here")
        elif np.dtype(dtype) != array.dtype:
            found.append(f"{name} is {np.dtype(dtype)} there and {array.dtype} here")
    return found


def own_arrays(model: Any, *, within_epoch: bool) -> dict[str, NDArray[Any]]:
    """Returns copies of what is this rank's own: small arrays, by name.

    Args:
        model: A compiled ``keras.Model``.
        within_epoch: Whether the states of metrics belong to it; each epoch resets them.
    """
    return {
        name: np.array(keras.ops.convert_to_numpy(variable))
        for name, variable in _own(model, within_epoch=within_epoch).items()
    }


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
    """Makes the variables of the model's metrics, so that their state can be restored.

    With JAX, ``fit`` does that before it calls any callback; with TensorFlow, in the first step.

    Args:
        model: A compiled ``keras.Model``.
        batch: Any batch, as the model takes it.
    """
    if keras.backend.backend() == "tensorflow":
        evaluate_shared(model, [batch], SerialCommunicator())


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
