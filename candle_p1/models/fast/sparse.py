"""A first dense layer whose inputs are mostly zeros: it takes sparse tensors.

The product goes through the rows of the kernel once, each multiplied by the values of its column.
The gradient is kept as its factors, these values and the gradient of the outputs. It is formed row
by row where the optimizer updates the kernel, together with that of a penalty, and never written.
What the ranks of a node exchange of it are the factors of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

from candle_p1.data.samples import DataSet, Rows, Selected, Sparse
from candle_p1.distributed.reducers.reducer import Reducer, SerialReducer
from candle_p1.distributed.reducers.shared_memory import SharedMemoryReducer
from candle_p1.models import fast
from candle_p1.models.fast.layers import L2
from candle_p1.models.fast.optimizers import Fused
from candle_p1.models.fast.tables import may_replace_first

MAX_DENSITY = 0.2
"""The largest share of values that are not zero: with more, a sparse batch has more bytes than an
array. At this share, P1B2's first layer, update included, still takes less than half the time."""
MIN_WEIGHTS = 1 << 20
"""A smaller kernel stays in the caches, and is multiplied in less time than a batch is made."""
ENTRY_BYTES, FLOAT_BYTES = 20, 4
"""Of a value that is not zero, with its place; and of others."""


@dataclass(frozen=True)
class SparseInputs:
    """What a layer knows of its sparse inputs.

    Attributes:
        density: The share of the training samples' values that are not zero.
        num_bytes: The bytes of the factors of a batch on average, with the gradient of the outputs.
    """

    density: float
    num_bytes: int


@dataclass(frozen=True)
class SparseBatches:
    """Rows of which batches are taken as sparse tensors of TensorFlow."""

    rows: Rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, which: Any) -> Any:
        import tensorflow as tf

        rows = self.rows
        while isinstance(rows, Selected):
            which, rows = rows.indices[which], rows.rows
        assert isinstance(rows, Sparse)
        num_rows, places, values = rows.take(which)
        return tf.SparseTensor(places, values, (num_rows, rows.width))


def suits(
    model: Any,
    data: DataSet,
    optimizer: Any,
    callbacks: Sequence[Any] = (),
    reducer: Reducer | None = None,
) -> bool:
    """Returns whether the form computes what a model does, if the inputs are mostly zeros.

    The model is a stack whose first layer is a large `candle_p1.models.fast.layers.Dense`, and the
    optimizer updates in one pass, alone or with all other ranks on the same node.
    """
    parts = (data.train, data.validation, data.test)
    if not (fast.on_cpu() and may_replace_first(model, data, optimizer, callbacks)):
        return False
    layer = model.layers[0]
    return bool(
        layer.use_bias
        and layer.kernel is layer._kernel
        and layer.compute_dtype == "float32"
        and (layer.kernel_regularizer is None or type(layer.kernel_regularizer) is L2)
        and np.prod(layer.kernel.shape) >= MIN_WEIGHTS
        and not any(part.y is part.x for part in parts)
        and all(map(_is_matrix, (_matrix(part.x) for part in parts)))
        and isinstance(reducer, SerialReducer | SharedMemoryReducer)
        and _updates_in_one_pass(optimizer)
    )


def with_sparse_inputs(model: Any, data: DataSet, batch_size: int) -> Any:
    """Returns a model that takes sparse tensors, where that `suits`, if its inputs are sparse.

    Its layers are those of `model`, which is then of no use, and the samples are held without
    zeros. Otherwise `model` is returned.
    """
    parts = {id(part): part for part in (data.train, data.validation, data.test)}.values()
    held: dict[int, Sparse | None] = {}
    for matrix in (_matrix(part.x) for part in parts):
        if id(matrix) not in held:
            is_held = isinstance(matrix, Sparse)
            held[id(matrix)] = matrix if is_held else Sparse.of(matrix, MAX_DENSITY)
        if held[id(matrix)] is None:
            return model
    density = held[id(_matrix(data.train.x))].density  # type: ignore[union-attr]
    for part in parts:
        part.x = _held(part.x, held)
    layer, *others = model.layers
    for each in model.layers:
        each._inbound_nodes.clear()  # or Keras would not know which output is the layer's
    width, units = layer.kernel.shape
    size = batch_size * (width * density * ENTRY_BYTES + units * FLOAT_BYTES)
    layer.sparse = SparseInputs(density, round(size))
    inputs = keras.Input((width,), sparse=True, name=model._layers[0].name)
    return keras.Sequential([inputs, layer, *others], name=model.name)


def sparse_layer(model: Any) -> Any:
    """Returns the layer of a model that takes sparse tensors, if it has one."""
    first = next(iter(getattr(model, "layers", ())), None)
    takes = getattr(first, "sparse", None) is not None and model.inputs[0].sparse
    return first if takes else None


def _updates_in_one_pass(optimizer: Any) -> bool:
    if not isinstance(optimizer, Fused):
        return False
    copy = type(optimizer).from_config(optimizer.get_config())
    copy.build([])
    return bool(copy.is_fused())


def _matrix(rows: Rows) -> Any:
    while isinstance(rows, Selected):
        rows = rows.rows
    return rows


def _is_matrix(rows: Any) -> bool:
    is_array = isinstance(rows, np.ndarray) and rows.dtype == np.float32 and rows.ndim == 2
    return is_array or isinstance(rows, Sparse)


def _held(rows: Rows, held: dict[int, Any]) -> Rows:
    if isinstance(rows, Selected):
        return replace(rows, rows=_held(rows.rows, held))
    found: Rows = held[id(rows)]
    return found
