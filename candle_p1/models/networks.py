"""What benchmarks build their networks from as parameters say: convolutions, weights, losses."""

from __future__ import annotations

from typing import Any

from candle_p1.errors import ParameterError
from candle_p1.parameters.parameter_set import ParameterSet

CONV_FIELDS = 3
"""Each convolution is three numbers in --conv: filters, kernel length, stride."""
MAX_KERNEL_SIZE = 2**31
"""The maximum number of weights of a locally connected layer; over 8 GiB must be a mistake."""
CROSS_ENTROPY = "categorical_crossentropy"
LEAST_PROBABILITY = 1e-7
"""How close to 0 and 1 a probability may be, as in Keras."""


def add_convolutions(
    model: Any, params: ParameterSet, length: int, initializer: str = "glorot_uniform"
) -> None:
    """Adds convolutions, each with activation and pooling, and then a layer that flattens.

    Adds nothing if ``conv`` is not set. The model is a ``keras.Sequential`` whose output is (batch,
    length, 1).

    Raises:
        ParameterError: conv and pool do not match, or the input is too short for them.
    """
    from keras import layers

    from candle_p1.models.fast.layers import Conv1D, MaxPooling1D
    from candle_p1.models.layers import LocallyConnected1D

    convolutions = _convolutions(params, length)
    normalize, activation = params["batch_normalization"], params["activation"]
    kind = LocallyConnected1D if params["locally_connected"] else Conv1D
    options = {"activation": None if normalize else activation, "kernel_initializer": initializer}
    for filters, kernel_size, strides, pool_size in convolutions:
        model.add(kind(filters, kernel_size, strides, **options), rebuild=False)
        if normalize:
            model.add(layers.BatchNormalization(), rebuild=False)
            model.add(layers.Activation(activation), rebuild=False)
        if pool_size:
            model.add(MaxPooling1D(pool_size), rebuild=False)
    if convolutions:
        model.add(layers.Flatten())


def _convolutions(params: ParameterSet, length: int) -> list[tuple[int, int, int, int | None]]:
    """Returns filters, kernel length, stride and pooling length of each convolution."""
    conv, pool = params["conv"] or [], params["pool"] or []
    num_layers = len(conv) // CONV_FIELDS
    if len(conv) % CONV_FIELDS:
        raise ParameterError(
            f"conv {conv} ({params.origin('conv')}): give three numbers for each convolution:"
            " filters, kernel length, stride"
        )
    if len(pool) == 1:
        pool = pool * num_layers
    if conv and pool and len(pool) != num_layers:
        raise ParameterError(
            f"pool {pool} ({params.origin('pool')}): give one length, or one for each of the"
            f" {num_layers} convolutions"
        )
    convolutions, channels = [], 1
    for i in range(num_layers):
        filters, kernel_size, stride = conv[CONV_FIELDS * i : CONV_FIELDS * (i + 1)]
        pool_size = pool[i] if pool else None
        positions = (length - kernel_size) // stride + 1
        length = positions // (pool_size or 1)
        if length < 1:
            raise ParameterError(
                f"conv {conv} and pool {pool} need a longer input: none is left after convolution"
                f" {i + 1}; use shorter kernels or pools"
            )
        num_weights = positions * kernel_size * channels * filters
        if params["locally_connected"] and num_weights > MAX_KERNEL_SIZE:
            raise ParameterError(
                f"locally_connected: convolution {i + 1} of conv {conv} would have"
                f" {num_weights:,} weights, one kernel for each of {positions:,} positions; use"
                " larger strides, fewer filters or fewer features"
            )
        convolutions.append((filters, kernel_size, stride, pool_size))
        channels = filters
    return convolutions


def without_empty_layers(params: ParameterSet) -> ParameterSet:
    """Returns the parameters without the layers that CANDLE leaves out.

    They are dense layers of 0 units, and from the first convolution with a 0 all of them, with
    their pooling.
    """
    dense, conv, pool = (params[name] or [] for name in ("dense", "conv", "pool"))
    lists = {"dense": [units for units in dense if units]}
    if 0 in conv:
        num_layers = conv.index(0) // CONV_FIELDS
        lists["conv"] = conv[: CONV_FIELDS * num_layers]
        if len(pool) == len(conv) // CONV_FIELDS:
            lists["pool"] = pool[:num_layers]
    changed = {name: values for name, values in lists.items() if values != (params[name] or [])}
    return params.with_settings(
        {name: (values, params.origin(name)) for name, values in changed.items()}
    )


def initial_weights(params: ParameterSet, default: str = "glorot_uniform") -> str:
    """Returns Keras's name for the initial weights that --initialization requests.

    Keras's own constants are those of CANDLE's keras_default_config, except that in Keras 3 a
    constant has no default: CANDLE's is 0.
    """
    name: str = params["initialization"] or default
    return "zeros" if name == "constant" else name


def same_loss(name: str, activation: str) -> Any:
    """Returns a loss that computes what TensorFlow does, on which CANDLE runs.

    TensorFlow remembers what a sigmoid was computed from, and takes the softmax of that as the
    probabilities of a categorical cross-entropy. Other backends divide the sigmoids by their sum,
    which is another function with other gradients. `activation` is that of the last layer.
    """
    import keras

    is_same = keras.backend.backend() == "tensorflow"
    if is_same or (name, activation) != (CROSS_ENTROPY, "sigmoid"):
        return name
    return categorical_crossentropy


def categorical_crossentropy(targets: Any, sigmoids: Any) -> Any:
    """Returns the cross-entropy of each sample, whose probabilities are the softmax of logits.

    The logits are those of which the sigmoids were computed. Where a sigmoid is within 1e-7 of 0 or
    1, they are limited to 16.1; float32 knows those of 10 to 1e-3. Targets are one-hot; both have
    shape (samples, classes).
    """
    from keras import ops

    sigmoids = ops.clip(sigmoids, LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)
    logits = ops.log(sigmoids) - ops.log1p(-sigmoids)
    return ops.categorical_crossentropy(targets, logits, from_logits=True)
