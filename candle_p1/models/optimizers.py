"""Optimizers by CANDLE's names, with the settings of a parameter set."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from candle_p1.errors import ParameterError, did_you_mean
from candle_p1.parameters.parameter_set import ParameterSet

CANDLE_OPTIMIZERS = ("sgd", "rmsprop", "adagrad", "adadelta", "adam", "adamax", "nadam")
"""The optimizers for which CANDLE's keras_default_config has constants."""
CANDLE_CONSTANTS = {"epsilon": 1e-8, "rho": 0.9, "momentum": 0.0, "nesterov": False}
CANDLE_CONSTANTS |= {"beta_1": 0.9, "beta_2": 0.999}
"""The arguments that CANDLE's build_optimizer passes to those optimizers that have them, from
keras_default_config. Its learning rate's decay is 0. It knows constants of Adamax and Nadam, but
does not build them."""
DTYPE_POLICIES = {
    "bf16": "mixed_bfloat16",
    "f16": "mixed_float16",
    "f32": "float32",
    "f64": "float64",
}
"""Keras's policy for each ``--data_type``; f16 also scales the loss, which bf16 does not need."""
COMPUTE_TYPES = {name: policy.removeprefix("mixed_") for name, policy in DTYPE_POLICIES.items()}
"""The type in which layers then compute."""


def default_learning_rate(name: str) -> float:
    """Returns an optimizer's default learning rate in Keras, or raises ParameterError."""
    return float(inspect.signature(_optimizer_class(name)).parameters["learning_rate"].default)


def make_optimizer(
    params: ParameterSet,
    learning_rate: float,
    constants: Mapping[str, Any] = MappingProxyType(CANDLE_CONSTANTS),
) -> Any:
    """Returns a ``keras.optimizers.Optimizer``, with loss scaling if data_type is f16.

    Args:
        params: The parameters of the run.
        learning_rate: The learning rate, already scaled.
        constants: Arguments of those of CANDLE_OPTIMIZERS that have them, where Keras 2's formulas
            are used. Keras's default values hold for others.

    Raises:
        ParameterError: There is no such optimizer, momentum is set for one that has none, or
            several passes are combined with mixed precision.
    """
    import keras

    keras2 = params["optimizer_formula"] == "keras2"
    optimizer_class = _optimizer_class(params["optimizer"], keras2=keras2)
    settings: dict[str, Any] = {"learning_rate": learning_rate}
    known = inspect.signature(optimizer_class).parameters
    if keras2 and params["optimizer"].lower() in CANDLE_OPTIMIZERS:
        settings |= {name: value for name, value in constants.items() if name in known}
    if params["momentum"] is not None:
        if "momentum" not in known:
            raise ParameterError(
                f"momentum ({params.origin('momentum')}): the optimizer {params['optimizer']} has"
                " no momentum; omit it"
            )
        settings["momentum"] = params["momentum"]
    if params["backward_passes_per_step"] > 1:
        if params["data_type"] == "f16":
            raise ParameterError(
                f"backward_passes_per_step ({params.origin('backward_passes_per_step')}): gradients"
                " of several passes cannot be accumulated with loss scaling; use data_type f32"
            )
        settings["gradient_accumulation_steps"] = params["backward_passes_per_step"]
    optimizer = optimizer_class(**settings)
    if params["data_type"] == "f16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer


def check_names(params: ParameterSet) -> None:
    """Raises ParameterError if Keras lacks an activation, the loss or the metric.

    A name for which the benchmark lists the choices may be the benchmark's own.
    """
    import keras

    for name, kind in (
        ("activation", keras.activations),
        ("out_activation", keras.activations),
        ("loss", keras.losses),
        ("metrics", keras.metrics),
    ):
        if params.declared[name].choices is not None:
            continue
        try:
            kind.get(params[name])
        except ValueError:
            known = [each for each in vars(kind) if not each.startswith("_")]
            raise ParameterError(
                f"{name} = {params[name]!r} ({params.origin(name)}) does not exist in Keras"
                f"{did_you_mean(params[name], known)}"
            ) from None


def _optimizer_class(name: str, *, keras2: bool = False) -> Any:
    import keras

    known = {
        cls.__name__.lower(): cls
        for cls in vars(keras.optimizers).values()
        if inspect.isclass(cls) and issubclass(cls, keras.optimizers.Optimizer)
    }
    for special in ("optimizer", "lossscaleoptimizer"):
        known.pop(special, None)
    if (found := known.get(name.lower())) is None:
        near = did_you_mean(name.lower(), known)
        raise ParameterError(f"optimizer {name!r} does not exist in Keras{near}")
    from candle_p1.models.fast.optimizers import FORMS, KERAS2_FORMS

    return (FORMS | KERAS2_FORMS if keras2 else FORMS).get(found, found)
