"""A first dense layer whose inputs are rows of tables: it computes with their coordinates.

Columns of a batch may be rows of a table E of fewer rows than columns (`Joined`). All of them lie
in the space that the rows of E span. Let the columns of Q be an orthonormal basis of it: E = F
transpose(Q), where F has as many columns as rows. The part K of the kernel that multiplies these
inputs is K = D + Q B, where B = transpose(Q) K and D is orthogonal to the inputs. So the network
needs E K = F B alone, and the gradient of K is Q times that of B, which is transpose(F) times the
gradient of the outputs. Gradient descent, with or without momentum, changes K by a multiple of its
gradient; so it leaves D as it is, and changes B as it would change the kernel of a layer whose
inputs are rows of F. That is what is trained: a dense layer, of which K is computed where it is
asked for. Neither the rows of E nor K nor its gradient are touched in a step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import numpy as np
from keras import ops
from numpy.typing import NDArray

from candle_p1.data.samples import DataSet, Joined, Rows, Selected
from candle_p1.models import fast
from candle_p1.models.fast.layers import Dense

NAME = "TableDense"
"""As the record names the form."""
SAVING = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.TensorBoard,
)
"""Keras's callbacks that save a model, or describe it."""
BLOCK = 1 << 11
"""The columns of a table that are multiplied at once in float64."""

Read = Callable[[], Any]


class TableDense(Dense):
    """A dense layer that takes coordinates of rows of tables in place of these rows.

    Attributes:
        num_whole: The number of weights of the layer of the whole rows.
        num_products: The number of weights of its kernel.
    """

    num_whole: int
    num_products: int
    _described: str
    _given: Callable[[], tuple[Any, Joined]]

    @classmethod
    def of(cls, dense: Any, rows: Joined, described: Mapping[str, Any]) -> TableDense:
        """Returns what computes a layer of whole rows, which is built; it has the same weights.

        `described` is a description of the model of the whole rows.
        """
        layer: TableDense = cls.from_config(dense.get_config())
        layer.activation = dense.activation
        layer._described = json.dumps(described)
        layer.num_whole, layer.num_products = dense.count_params(), math.prod(dense.kernel.shape)
        layer._given = lambda: (dense, rows)  # hidden from Keras, which would track its weights
        return layer

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Creates the weights, from those of the layer of the whole rows."""
        super().build(input_shape)
        dense, rows = self._given()
        del self._given
        kernel, first = ops.convert_to_numpy(dense.kernel), rows.own.shape[1]
        parts = [kernel[:first]]
        self._coordinates: list[Any] = []
        for table in rows.tables:
            part = kernel[first : first + table.shape[1]]
            if _is_wide(table):
                basis, coordinates = np.linalg.qr(table.T.astype(np.float64))
                whole, part = part, product(basis.T, part).astype(part.dtype)
                basis = basis.astype(part.dtype)
                self._constant(f"basis_{first}", basis)
                self._constant(f"rest_{first}", whole - basis @ part)
                self._coordinates.append(self._constant(f"coordinates_{first}", coordinates.T))
            else:
                self._coordinates.append(None)
            parts.append(part)
            first += table.shape[1]
        self._kernel.assign(np.concatenate(parts))
        if self.use_bias:
            self.bias.assign(dense.bias)

    def _constant(self, name: str, value: NDArray[Any]) -> Any:
        weight = self.add_weight(
            value.shape,
            lambda shape, dtype: ops.convert_to_tensor(value, dtype),
            name=name,
            trainable=False,
        )
        weight.is_constant = True  # so that ranks need not average it
        return weight

    @property
    def described(self) -> dict[str, Any]:
        """The description of the model of the whole rows."""
        description: dict[str, Any] = json.loads(self._described)
        return description

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Returns the outputs, shape (batch, units)."""
        fast.note(NAME)
        return super().call(inputs, training)

    def taken(self, rows: Rows) -> Rows:
        """Returns rows in the form of which the layer takes batches."""
        if isinstance(rows, Selected):
            return replace(rows, rows=self.taken(rows.rows))
        assert isinstance(rows, Joined)
        pairs = zip(rows.tables, self._coordinates, strict=True)
        tables = [t if own is None else np.array(ops.convert_to_numpy(own)) for t, own in pairs]
        return replace(rows, tables=tuple(tables))


def product(one: NDArray[Any], other: NDArray[Any]) -> NDArray[np.float64]:
    """Returns a product of matrices in float64, without a copy of either in float64."""
    total = np.zeros((one.shape[0], other.shape[1]))
    for start in range(0, len(other), BLOCK):
        block = slice(start, start + BLOCK)
        total += one[:, block].astype(np.float64) @ other[block].astype(np.float64)
    return total


def may_replace_first(
    model: Any, data: DataSet, optimizer: Any, callbacks: Sequence[Any] = ()
) -> bool:
    """Returns whether the first layer of a model may take its inputs in another form.

    The model is a stack whose first layer is `candle_p1.models.fast.layers.Dense`, and an update
    depends on nothing but the gradients, each by itself. No callback of the benchmark saves the
    model by itself.
    """
    layers = model.layers if type(model) is keras.Sequential else ()
    return bool(
        layers
        and type(layers[0]) is Dense
        and layers[0].trainable
        and layers[0].compute_dtype == layers[0].variable_dtype
        and not (layers[0].kernel_constraint or layers[0].activity_regularizer)
        and data.train.y is not data.train.x
        and not (optimizer.clipnorm or optimizer.clipvalue or optimizer.global_clipnorm)
        and not (optimizer.weight_decay or optimizer.use_ema)
        and not any(isinstance(each, SAVING) for each in callbacks)
    )


def suits(
    model: Any,
    data: DataSet,
    optimizer: Any,
    callbacks: Sequence[Any] = (),
    compression: str = "none",
) -> bool:
    """Returns whether the form computes what a model does, and is less work.

    All samples are joined from the same tables, and an update is a multiple of the gradients; see
    `may_replace_first`, too.
    """
    found = [_joined(part.x) for part in (data.train, data.validation, data.test)]
    tables = [each.tables for each in found if each]
    same = [[id(table) for table in each] for each in tables]
    return bool(
        fast.has_tables()
        and may_replace_first(model, data, optimizer, callbacks)
        and not model.layers[0].kernel_regularizer
        and len(tables) == len(found)
        and same.count(same[0]) == len(same)
        and any(map(_is_wide, tables[0]))
        and fast.keras_name(optimizer) == "SGD"
        and compression == "none"
    )


def with_tables(model: Any, rows: Rows, described: Mapping[str, Any]) -> Any:
    """Returns a model that takes coordinates in place of rows of tables, where that `suits`.

    Its other layers are those of `model`, which is then of no use. `described` describes this.
    """
    joined = _joined(rows)
    assert joined is not None
    dense, *others = model.layers
    for layer in others:
        layer._inbound_nodes.clear()  # or Keras would not know which output is the layer's
    # A table that is not wide has fewer columns than rows.
    width = joined.own.shape[1] + sum(min(table.shape) for table in joined.tables)
    first = TableDense.of(dense, joined, described)
    return keras.Sequential([keras.Input((width,)), first, *others], name=model.name)


def table_layer(model: Any) -> TableDense | None:
    """Returns the layer of a model that takes coordinates of rows of tables, if it has one."""
    first = next(iter(getattr(model, "layers", ())), None)
    return first if isinstance(first, TableDense) else None


def count_whole(model: Any) -> int:
    """Returns the number of weights of a model of the whole rows."""
    layer, num = table_layer(model), int(model.count_params())
    return num - layer.count_params() + layer.num_whole if layer else num


def whole_weights(model: Any, *, trainable: bool = False) -> list[tuple[str, Read]]:
    """Returns the weights of a model of the whole rows, or its trainable ones, in Keras's order.

    Each has its path, and a function that returns its values: an array.
    """
    layer = table_layer(model)
    of_layer = layer.weights if layer else ()
    own = {each.path: partial(ops.convert_to_numpy, each) for each in of_layer}
    named = [
        (each.path, partial(ops.convert_to_numpy, each))
        for each in (model.trainable_weights if trainable else model.weights)
        if each.path not in own
    ]
    return [*whole_arrays(own).items(), *named]


def whole_arrays(arrays: Mapping[str, Read]) -> dict[str, Read]:
    """Returns weights by name, with whole kernels and without the constants.

    The functions return arrays, and are called when the functions that are returned are.
    """
    found = dict(arrays)
    bases = [match for match in map(fast.BASIS.fullmatch, arrays) if match]
    for match in sorted(bases, key=lambda match: int(match[2])):
        prefix, first = match[1], match[2]
        basis, rest = found.pop(match[0]), found.pop(f"{prefix}rest_{first}")
        del found[f"{prefix}coordinates_{first}"]
        kernel = f"{prefix}kernel"
        found[kernel] = partial(_widened, found[kernel], int(first), basis, rest)
    return found


def _widened(kernel: Read, first: int, basis: Read, rest: Read) -> Any:
    before, axes = kernel(), basis()
    end = first + axes.shape[1]
    part = rest() + axes @ before[first:end]
    return np.concatenate([before[:first], part, before[end:]])


def _joined(rows: Rows) -> Joined | None:
    while isinstance(rows, Selected):
        rows = rows.rows
    return rows if isinstance(rows, Joined) else None


def _is_wide(table: NDArray[Any]) -> bool:
    return table.shape[0] < table.shape[1]
