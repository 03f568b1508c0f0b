"""MNIST: which digit a handwritten image shows.

The network is that of Servantez, *Exploring Deep Neural Network Applications on Theta at ALCF*,
whose Table 1 compares batch sizes; ``mnist_batch_size.toml`` repeats it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.benchmark import Benchmark, Computed, DataError, DataSet, Parameter, Samples
from mnist_synthetic import MnistRecipe

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from candle_p1.benchmark import ParameterSet, Reader

    Arrays = dict[str, NDArray[np.uint8]]

NUM_CLASSES = 10


class Mnist(Benchmark):
    """MNIST. One file, in the format of Keras, has the images and labels of both sets."""

    name = "mnist"
    title = "MNIST: handwritten digits by a 2D convolutional network"
    files = {"digits": "train_data"}
    recipe = MnistRecipe()
    supports = frozenset({"conv", "pool"})
    parameters = (
        Parameter(
            "conv_dropout", float, 0.25, "fraction to drop after pooling", minimum=0, below=1
        ),
    )

    def load_data(self, reader: Reader, params: ParameterSet) -> Arrays:
        """Returns the four arrays of the file: images and labels, for training and for testing."""
        return reader.load("digits", read_digits)

    def preprocess(self, raw: Arrays, params: ParameterSet) -> DataSet:
        """Scales the pixels batch by batch; the test images are also used for validation."""
        train, test = (
            Samples(Computed(raw[f"x_{part}"], scale), raw[f"y_{part}"].astype(np.int32))
            for part in ("train", "test")
        )
        return DataSet(train, test, test)

    def build_model(self, params: ParameterSet, data: DataSet) -> Any:
        """Returns convolutions, pooling, dense layers with dropout, and a unit for each digit."""
        import keras
        from keras import layers

        model = keras.Sequential([layers.Input(data.train.x_shape)], name="mnist")
        conv = params["conv"]
        for filters, length, stride in zip(conv[::3], conv[1::3], conv[2::3], strict=True):
            model.add(layers.Conv2D(filters, length, stride, activation=params["activation"]))
        model.add(layers.MaxPooling2D(params["pool"][0]))
        model.add(layers.Dropout(params["conv_dropout"]))
        model.add(layers.Flatten())
        for units in params["dense"]:
            model.add(layers.Dense(units, activation=params["activation"]))
            model.add(layers.Dropout(params["dropout"]))
        model.add(layers.Dense(NUM_CLASSES, activation=params["out_activation"]))
        return model

    def naive_quality(self, params: ParameterSet, data: DataSet) -> dict[str, float]:
        """Returns the accuracy of always predicting the most common digit."""
        return {"accuracy": np.bincount(data.test.y[:]).max() / len(data.test)}


BENCHMARK = Mnist()


def read_digits(path: Path) -> Arrays:
    """Returns the arrays of an MNIST file: images, shape (digits, 28, 28), and labels, 0 to 9."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in ("x_train", "y_train", "x_test", "y_test")}
    for part in ("train", "test"):
        images, labels = arrays[f"x_{part}"], arrays[f"y_{part}"]
        if images.ndim != 3 or labels.shape != images.shape[:1]:
            raise DataError(f"x_{part} and y_{part} are not images with one label each", path)
        if not np.isin(labels, range(NUM_CLASSES)).all():
            raise DataError(f"y_{part} has labels that are not digits", path)
    return arrays


def scale(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Returns images of one channel with values from 0 to 1: float32, shape (…, 28, 28, 1)."""
    return images[..., np.newaxis].astype(np.float32) / 255
