"""NT3: a 1D convolutional network that tells normal from tumor tissue by gene expression.

Model, defaults and file format are CANDLE's (ECP-CANDLE/Benchmarks, Pilot1/NT3); epochs, batch
size, learning rate and optimizer those of the paper's Table 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.benchmark import Benchmark, DataSet, Samples
from candle_p1.data.csv import CsvLayout
from candle_p1.data.transforms import SCALINGS, scale_features
from candle_p1.errors import DataError, ParameterError
from candle_p1.params import Parameter
from nt3_synthetic import Nt3Recipe

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from candle_p1.data.reader import Reader
    from candle_p1.params import ParameterSet

CONV_FIELDS = 3
"""A convolution is three numbers of --conv: filters, kernel length, stride."""


class Nt3(Benchmark):
    """NT3. The files hold a row per sample: the label, 0 or 1, then the genes."""

    name = "nt3"
    title = "NT3: normal or tumor tissue by a 1D convolutional network"
    parameters = (
        Parameter("classes", int, 2, "number of classes", minimum=2),
        Parameter("scaling", str, "maxabs", "scaling of the features", choices=SCALINGS),
    )
    recipe = Nt3Recipe()

    def load_data(self, reader: Reader, params: ParameterSet) -> Mapping[str, NDArray[np.float32]]:
        """Returns the rows of both files, label first: float32, shape (samples, 1 + genes)."""
        train = reader.read("train", CsvLayout(label_column=0))
        test = reader.read("test", CsvLayout(label_column=0, num_columns=train.shape[1]))
        for role, matrix in (("train", train), ("test", test)):
            _check_labels(matrix[:, 0], params["classes"], reader.files.paths[role])
        return {"train": train, "test": test}

    def preprocess(self, raw: Mapping[str, NDArray[np.float32]], params: ParameterSet) -> DataSet:
        """Scales the genes over both files, in place; the test samples also validate."""
        train, test = raw["train"], raw["test"]
        scale_features(params["scaling"], train[:, 1:], test[:, 1:])
        num_classes = params["classes"]
        test_samples = _samples(test, num_classes)
        return DataSet(_samples(train, num_classes), test_samples, test_samples)

    def build_model(self, params: ParameterSet, data: DataSet) -> Any:
        """Returns convolutions with pooling, then dense layers with dropout, then the classes."""
        import keras
        from keras import layers

        num_genes = data.train.x.shape[1]
        initializer = params["initialization"] or "glorot_uniform"
        model = keras.Sequential([layers.Input((num_genes, 1))], name="nt3")
        for (filters, kernel_size, stride), pool in _convolutions(params, num_genes):
            model.add(
                layers.Conv1D(filters, kernel_size, strides=stride, kernel_initializer=initializer)
            )
            model.add(layers.Activation(params["activation"]))
            if pool:
                model.add(layers.MaxPooling1D(pool))
        model.add(layers.Flatten())
        for units in params["dense"] or ():
            model.add(layers.Dense(units, kernel_initializer=initializer))
            model.add(layers.Activation(params["activation"]))
            if params["dropout"]:
                model.add(layers.Dropout(params["dropout"]))
        model.add(layers.Dense(params["classes"], kernel_initializer=initializer))
        # The softmax, and the loss after it, stay in float32 under mixed precision.
        model.add(layers.Activation(params["out_activation"], dtype=keras.config.floatx()))
        return model

    def naive_quality(self, params: ParameterSet, data: DataSet) -> dict[str, float]:
        """Returns the accuracy of always answering with the commonest class."""
        return {"accuracy": float(data.test.y.mean(axis=0).max())}


BENCHMARK = Nt3()


def _check_labels(labels: NDArray[np.float32], num_classes: int, path: Path) -> None:
    bad = np.flatnonzero((labels < 0) | (labels >= num_classes) | (labels % 1 != 0))
    if len(bad):
        row = int(bad[0])
        raise DataError(
            f"the label is {labels[row]:g} where 0 to {num_classes - 1} is expected (row {row + 1}"
            " of the data)",
            path,
            column=1,
        )


def _samples(rows: NDArray[np.float32], num_classes: int) -> Samples:
    """Returns views of the genes, shape (samples, genes, 1), and one-hot classes."""
    one_hot = np.eye(num_classes, dtype=np.float32)[rows[:, 0].astype(np.int64)]
    return Samples(rows[:, 1:, np.newaxis], one_hot)


def _convolutions(
    params: ParameterSet, num_genes: int
) -> list[tuple[tuple[int, int, int], int | None]]:
    """Returns ((filters, kernel length, stride), pool length) of each convolution.

    Raises:
        ParameterError: conv and pool do not fit together, or the genes do not suffice.
    """
    conv, pool = params["conv"] or [], params["pool"] or []
    num_layers = len(conv) // CONV_FIELDS
    if len(conv) % CONV_FIELDS:
        raise ParameterError(
            f"conv {conv} ({params.origin('conv')}): give three numbers for each convolution:"
            " filters, kernel length, stride"
        )
    if pool and len(pool) != num_layers:
        raise ParameterError(
            f"pool {pool} ({params.origin('pool')}): give one length for each of the {num_layers}"
            " convolutions"
        )
    convolutions = []
    length = num_genes
    for i in range(num_layers):
        filters, kernel_size, stride = conv[CONV_FIELDS * i : CONV_FIELDS * (i + 1)]
        pool_size = pool[i] if pool else None
        length = ((length - kernel_size) // stride + 1) // (pool_size or 1)
        if length < 1:
            raise ParameterError(
                f"conv {conv} and pool {pool} leave nothing of {num_genes} genes after"
                f" convolution {i + 1}: use shorter kernels or pools"
            )
        convolutions.append(((filters, kernel_size, stride), pool_size))
    return convolutions
