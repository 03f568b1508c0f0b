"""CANDLE's own generation of Keras, which is Keras 2, beside Keras 3.

tf_keras is Keras 2 for the TensorFlow that is installed here. Nothing but comparisons needs it, so
it is not installed with the rest: ``make keras2`` puts it into a directory of its own. The networks
are written down with it as CANDLE's scripts build them, in the folders of the benchmarks
(`candle_p1.benchmark.Benchmark.keras2_model`); here is what they share.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from candle_p1.errors import ParameterError, SetupError
from candle_p1.models.networks import CONV_FIELDS
from candle_p1.models.optimizers import CANDLE_OPTIMIZERS
from candle_p1.parameters.parameter_set import ParameterSet

PACKAGE = "tf_keras"


def check_directory(directory: str) -> str:
    """Returns the absolute path of a directory, or raises ParameterError if it lacks tf_keras."""
    path = Path(directory).absolute()
    if not (path / PACKAGE / "__init__.py").is_file():
        raise ParameterError(
            f"--keras2 {directory}: there is no {PACKAGE} in this directory; `make keras2` installs"
            " it into .venv-keras2"
        )
    return str(path)


def load() -> Any:
    """Returns the module tf_keras, configured as Keras 3 is, or raises SetupError."""
    import keras

    try:
        k = importlib.import_module(PACKAGE)
    except Exception as error:  # whatever a version that does not fit this TensorFlow raises
        raise SetupError(f"{PACKAGE} cannot be imported: {error}; see `make keras2`") from error
    for name in ("floatx", "epsilon", "image_data_format"):
        getattr(k.backend, f"set_{name}")(getattr(keras.config, name)())
    return k


def candles_optimizer(k: Any, params: ParameterSet, learning_rate: float) -> Any:
    """Returns the optimizer that CANDLE's build_optimizer makes, with keras_default_config.

    It would make Adamax and Nadam in the same way, but does not know them.

    Raises:
        ParameterError: There is none of this name.
    """
    epsilon, momentum = {"epsilon": 1e-8}, {"momentum": params["momentum"] or 0.0}
    betas = {"beta_1": 0.9, "beta_2": 0.999} | epsilon
    settings: dict[str, dict[str, Any]] = {
        "SGD": {"nesterov": False} | momentum,
        "RMSprop": {"rho": 0.9} | momentum | epsilon,
        "Adagrad": epsilon,
        "Adadelta": {"rho": 0.9} | epsilon,
        **dict.fromkeys(("Adam", "Adamax", "Nadam"), betas),
    }
    for name, arguments in settings.items():
        if name.lower() == params["optimizer"].lower():
            return getattr(k.optimizers.legacy, name)(learning_rate, **arguments)
    raise ParameterError(
        f"optimizer {params['optimizer']!r} ({params.origin('optimizer')}): CANDLE has none of"
        f" this name in Keras 2, only {', '.join(CANDLE_OPTIMIZERS)}"
    )


def add_convolutions(k: Any, model: Any, params: ParameterSet) -> None:
    """Adds the convolutions of ``--conv`` to a ``Sequential``, each with activation and pooling."""
    layers = k.layers
    conv, pool = params["conv"] or [], params["pool"] or []
    num = len(conv) // CONV_FIELDS
    kind = layers.LocallyConnected1D if params["locally_connected"] else layers.Conv1D
    for i in range(num):
        filters, length, stride = conv[CONV_FIELDS * i : CONV_FIELDS * (i + 1)]
        model.add(kind(filters, length, strides=stride))
        if params["batch_normalization"]:
            model.add(layers.BatchNormalization())
        model.add(layers.Activation(params["activation"]))
        if pool:
            model.add(layers.MaxPooling1D(pool[i if len(pool) > 1 else 0]))
    if num:
        model.add(layers.Flatten())


def add_dense_layers(k: Any, model: Any, params: ParameterSet) -> None:
    """Adds the layers of ``--dense`` to a ``Sequential``, each with activation and dropout."""
    layers = k.layers
    for units in params["dense"] or ():
        model.add(layers.Dense(units))
        if params["batch_normalization"]:
            model.add(layers.BatchNormalization())
        model.add(layers.Activation(params["activation"]))
        if params["dropout"]:
            model.add(layers.Dropout(params["dropout"]))


def layers_with_weights(model: Any) -> list[Any]:
    """Returns the layers that have weights, in the same order of models of both generations.

    That of the layers that describe a latent space differs, so these come first.
    """
    layers = [layer for layer in model.layers if layer.get_weights()]
    return sorted(layers, key=lambda layer: layer.name if layer.name.startswith("z_") else "~")


def weights_of(model: Any) -> list[list[Any]]:
    """Returns the values of the weights of each layer that has some."""
    return [layer.get_weights() for layer in layers_with_weights(model)]


def set_weights(model: Any, weights: list[list[Any]]) -> None:
    """Sets the `weights_of` another model; raises ValueError if the networks differ."""
    for layer, values in zip(layers_with_weights(model), weights, strict=True):
        layer.set_weights(values)
