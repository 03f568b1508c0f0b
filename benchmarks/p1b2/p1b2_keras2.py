"""P1B2's network in Keras 2, as CANDLE's script builds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from candle_p1.models.keras2 import candles_optimizer

if TYPE_CHECKING:
    from candle_p1.parameters.parameter_set import ParameterSet


def network(
    k: Any, params: ParameterSet, num_genes: int, num_types: int, learning_rate: float
) -> Any:
    """Returns dense layers with L2 penalties, and a unit for each cancer type; compiled.

    Args:
        k: The module tf_keras.
        params: The parameters.
        num_genes: The length of the input.
        num_types: The number of cancer types.
        learning_rate: The learning rate, already scaled.
    """
    layers, weight = k.layers, params["reg_l2"]
    inputs = tensor = layers.Input((num_genes,))
    for units in params["dense"] or ():
        penalties = ("kernel_regularizer", "activity_regularizer") if weight else ()
        tensor = layers.Dense(
            units,
            activation=params["activation"],
            **{penalty: k.regularizers.l2(weight) for penalty in penalties},
        )(tensor)
        if params["dropout"]:
            tensor = layers.Dropout(params["dropout"])(tensor)
    activation = params["out_activation"] or params["activation"]
    model = k.Model(inputs, layers.Dense(num_types, activation=activation)(tensor))
    optimizer = candles_optimizer(k, params, learning_rate)
    model.compile(optimizer, params["loss"], metrics=[params["metrics"]])
    return model
