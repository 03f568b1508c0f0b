"""P1B3's network in Keras 2, as CANDLE's script builds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from candle_p1.errors import ParameterError
from candle_p1.models.keras2 import add_convolutions, add_dense_layers, candles_optimizer

if TYPE_CHECKING:
    from candle_p1.parameters.parameter_set import ParameterSet


def network(k: Any, params: ParameterSet, num_inputs: int, learning_rate: float) -> Any:
    """Returns convolutions, if any, dense layers with dropout, and a linear unit; compiled.

    Args:
        k: The module tf_keras.
        params: The parameters.
        num_inputs: The length of the input.
        learning_rate: The learning rate, already scaled.

    Raises:
        ParameterError: There is noise on the inputs, which CANDLE adds while it makes batches.
    """
    if params["cell_noise_sigma"]:
        raise ParameterError(
            f"cell_noise_sigma ({params.origin('cell_noise_sigma')}): the network in Keras 2 has no"
            " layer for it; leave it out"
        )
    model = k.Sequential([k.layers.InputLayer((num_inputs,))])
    if params["conv"]:
        model.add(k.layers.Reshape((num_inputs, 1)))
        add_convolutions(k, model, params)
    add_dense_layers(k, model, params)
    model.add(k.layers.Dense(1))
    # CANDLE's script computes its metrics after an epoch, from predictions.
    model.compile(candles_optimizer(k, params, learning_rate), params["loss"])
    return model
