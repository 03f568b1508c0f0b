"""NT3's network in Keras 2, as CANDLE's script builds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from candle_p1.models.keras2 import add_convolutions, add_dense_layers, candles_optimizer

if TYPE_CHECKING:
    from candle_p1.parameters.parameter_set import ParameterSet


def network(k: Any, params: ParameterSet, num_genes: int, learning_rate: float) -> Any:
    """Returns convolutions with pooling, dense layers with dropout, and an output layer; compiled.

    Args:
        k: The module tf_keras.
        params: The parameters.
        num_genes: The length of the input.
        learning_rate: The learning rate, already scaled.
    """
    model = k.Sequential([k.layers.InputLayer((num_genes, 1))])
    add_convolutions(k, model, params)
    if not params["conv"]:
        model.add(k.layers.Flatten())
    add_dense_layers(k, model, params)
    model.add(k.layers.Dense(params["classes"]))
    model.add(k.layers.Activation(params["out_activation"]))
    optimizer = candles_optimizer(k, params, learning_rate)
    model.compile(optimizer, params["loss"], metrics=[params["metrics"]])
    return model
