"""Initial weights by CANDLE's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from candle_p1.parameters.parameter_set import ParameterSet


def initial_weights(params: ParameterSet, default: str = "glorot_uniform") -> str:
    """Returns Keras's name for the initial weights that --initialization requests.

    Keras's own constants are those of CANDLE's keras_default_config, except that in Keras 3 a
    constant has no default: CANDLE's is 0.
    """
    name: str = params["initialization"] or default
    return "zeros" if name == "constant" else name
