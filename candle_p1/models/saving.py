"""Models as files of Keras, which load without this package.

The fast kernels are classes of their own, so Keras would name them in the files and then look for
this package. A file gets a copy of the model instead, made of Keras's own classes with the same
weights. It is not compiled: the optimizer's state is what checkpoints are for.
"""

from __future__ import annotations

import errno
import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np

from candle_p1.data.inputs import Inputs
from candle_p1.errors import CandleError, DataError, ParameterError
from candle_p1.files import new_file, read_json, write_atomically
from candle_p1.models.scores import SIGMOID_RANGE, last_activation

FINAL_NAME, LAYERS_NAME = "model.keras", "model.json"
SMALLEST_SCALE, LARGEST_SCALE = 1e-6, 1e18
"""By what Keras's normalization divides as this package does, whose square float32 can hold."""
SUFFIXES = (".keras", ".weights.h5", ".json")
OVERHEAD_BYTES = 1 << 14
"""More than HDF5 needs for a file, and for each of its arrays."""
_KERAS_FORMS: dict[str, tuple[str, str, dict[str, str]]] = {
    "Conv1D": ("keras.layers", "Conv1D", {}),
    "Dense": ("keras.layers", "Dense", {}),
    "MaxPooling1D": ("keras.layers", "MaxPooling1D", {}),
    "L2": ("keras.regularizers", "L2", {}),
    # It adds the same where the layer divides by the batch size, as in the tested release.
    "ActivityL2": ("keras.layers", "ActivityRegularization", {"weight": "l2"}),
}
"""What stands in a file for a class of this package, by its name: the module and the name of
Keras's class, and its names of arguments that have others here."""


class SavingError(CandleError):
    """A model that Keras cannot describe in a file."""


@dataclass(frozen=True)
class ModelFile:
    """A file to which a run saves its model or a part of it.

    Attributes:
        name: Its name. The suffix says what it holds: the model (``.keras``), its weights
            (``.weights.h5``) or its layers without weights (``.json``).
        when: Before training, after every epoch whose validation loss is the lowest so far, or
            after training.
        part: Returns what to save of the model; None: all of it.
    """

    name: str
    when: Literal["begin", "best", "end"] = "end"
    part: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if not self.name.endswith(SUFFIXES):
            raise ValueError(f"{self.name!r} does not end in one of {', '.join(SUFFIXES)}")

    def of(self, model: Any) -> Any:
        """Returns the part of the model that the file holds."""
        from candle_p1.models.fast.sparse import sparse_layer
        from candle_p1.models.fast.tables import table_layer

        if not self.part:
            return model
        whole = plain_copy(model) if table_layer(model) or sparse_layer(model) else model
        with _undisturbed():
            return self.part(whole)


def describe(model: Any) -> dict[str, Any]:
    """Returns what ``keras.saving.deserialize_keras_object`` takes, with Keras's own classes.

    A model in the form of `candle_p1.models.fast.tables` is described as that of whole rows; one in
    that of `candle_p1.models.fast.sparse` as that of dense inputs.

    Raises:
        SavingError: The model, a layer or a function in it has no description.
    """
    import keras

    from candle_p1.models.fast.sparse import sparse_layer
    from candle_p1.models.fast.tables import table_layer

    if layer := table_layer(model):
        return layer.described
    try:
        config = _translated(keras.saving.serialize_keras_object(model))
        if sparse_layer(model):
            config["config"]["layers"][0]["config"]["sparse"] = False
        json.dumps(config)
        return config  # type: ignore[no-any-return]
    except (NotImplementedError, TypeError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SavingError(f"Keras cannot describe this model in a file: {reason}") from error


def foreign_classes(config: Any) -> list[str]:
    """Returns the classes of a description that Keras does not have, as "module.Class"."""
    found = {
        f"{each['module']}.{each['class_name']}"
        for each in _objects(config)
        if each.get("registered_name") is not None
        and str(each["module"]).partition(".")[0] not in ("keras", "builtins")
    }
    return sorted(found)


def plain_copy(model: Any) -> Any:
    """Returns an uncompiled copy, in the processor's memory, made of Keras's own classes.

    Layers that only this package or the benchmark has remain what they are. See `describe`.
    """
    import keras

    from candle_p1.models.fast.tables import whole_weights

    config = describe(model)
    with _undisturbed(), keras.device("cpu:0"):
        copy = keras.saving.deserialize_keras_object(config)
    for new, (_, read) in zip(copy.weights, whole_weights(model), strict=True):
        new.assign(read())
    return copy


def with_inputs(model: Any, inputs: Inputs) -> Any:
    """Returns a model of Keras's own layers that takes features as they are in files.

    The model itself is a layer of it, after one that scales. With classes, it returns a dictionary:
    the probability of each class by name, shape (samples, 1); with a target, this in its unit.

    Raises:
        ParameterError: Keras's layer cannot divide by a feature's scale.
        SavingError: See `describe`.
    """
    import keras

    if not ((inputs.scale > SMALLEST_SCALE) & (inputs.scale < LARGEST_SCALE)).all():
        raise ParameterError(
            f"--save_model inference: the scale of a feature is {min(inputs.scale):g} to"
            f" {max(inputs.scale):g}, too small or large for Keras's layer: use --save_model True"
        )
    copy, dtype = plain_copy(model), keras.config.floatx()
    raw = [keras.Input(each.shape[1:], name=each.name) for each in copy.inputs]
    scaled = keras.layers.Normalization(
        axis=1,
        mean=inputs.offset.tolist(),
        variance=np.square(inputs.scale, dtype=np.float64).tolist(),
        dtype=dtype,
    )(raw[0])
    output = copy([scaled, *raw[1:]] if raw[1:] else scaled)
    if inputs.target is not None:
        output = keras.layers.Rescaling(inputs.target.factor, dtype=dtype)(output)
    elif inputs.classes is not None and output.shape[1:] == (len(inputs.classes),):
        if last_activation(copy) == "sigmoid":  # as `as_probabilities` does
            output = keras.ops.clip(output, *SIGMOID_RANGE)
            output = output / (1 - output)
            output = output / keras.ops.sum(output, axis=-1, keepdims=True)
        parts = keras.ops.split(output, len(inputs.classes), axis=-1)
        output = dict(zip(inputs.classes, parts, strict=True))
    return keras.Model(raw if raw[1:] else raw[0], output, name=f"{copy.name}_inference")


def network_of(model: Any) -> Any:
    """Returns the model around which `with_inputs` has put layers."""
    import keras

    return next(layer for layer in model.layers if isinstance(layer, keras.Model))


def save(model: Any, path: Path) -> None:
    """Writes a model, its weights or its layers, by the suffix of the path; see `ModelFile`.

    At any time, `path` holds either the old or the new content, complete.

    Raises:
        SavingError: See `describe`.
        OSError: The directory is missing, full or read-only; `path` is unchanged.
    """
    if path.name.endswith(".json"):
        write_atomically(path, json.dumps(describe(model), indent=2) + "\n")
        return
    copy = plain_copy(model)
    weights_only = path.name.endswith(".weights.h5")
    sizes = [math.prod(each.shape) * np.dtype(each.dtype).itemsize for each in copy.weights]
    with new_file(path, sum(sizes) + OVERHEAD_BYTES * (1 + len(sizes))) as temporary:
        try:
            copy.save_weights(temporary) if weights_only else copy.save(temporary)
        except RuntimeError as error:  # h5py's, if it cannot close a file after all
            raise OSError(errno.EIO, str(error).splitlines()[0], str(path)) from error


def load(path: Path) -> Any:
    """Returns the model in a file, not compiled; of a ``.json`` file, with random weights.

    Raises:
        DataError: It cannot be read, or Keras does not understand it.
    """
    import keras

    import candle_p1.models.layers  # noqa: F401  # which Keras lacks

    try:
        if path.suffix == ".json":
            return keras.saving.deserialize_keras_object(read_json(path))
        return keras.saving.load_model(path, compile=False)
    except OSError as error:
        reason = error.strerror or str(error).splitlines()[0]
        raise DataError(f"the model cannot be read: {reason}", path) from error
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, BadZipFile) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"Keras cannot load the model: {reason}", path) from error


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Draws what Keras takes seeds from as if no layers were made here: training goes on."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def _translated(config: Any) -> Any:
    """Returns a description with Keras's own classes, and without how the model was compiled."""
    if isinstance(config, list | tuple):
        return type(config)(map(_translated, config))
    if not isinstance(config, dict):
        return config
    result = {key: _translated(each) for key, each in config.items() if key != "compile_config"}
    package, _, name = str(config.get("registered_name") or "").partition(">")
    if package == "candle_p1" and name in _KERAS_FORMS:  # as its classes are registered
        module, class_name, arguments = _KERAS_FORMS[name]
        settings = {arguments.get(key, key): each for key, each in result["config"].items()}
        result |= {"module": module, "class_name": class_name, "registered_name": None}
        result["config"] = settings
    return result


def _objects(config: Any) -> Iterator[dict[str, Any]]:
    """Yields the description of every object in a description, itself included."""
    if isinstance(config, dict):
        if "class_name" in config and "module" in config:
            yield config
        config = list(config.values())
    if isinstance(config, list | tuple):
        for each in config:
            yield from _objects(each)
