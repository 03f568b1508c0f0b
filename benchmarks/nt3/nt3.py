"""NT3: a 1D convolutional network that classifies tissue as normal or tumor from gene expression.

Model, defaults and file format are CANDLE's (ECP-CANDLE/Benchmarks, Pilot1/NT3); epochs, batch
size, learning rate and optimizer are those of the paper's Table 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.benchmark import (
    SAMPLE_FILES,
    Benchmark,
    DataSet,
    Importable,
    JobSize,
    PaperRuns,
    Parameter,
    Samples,
)
from candle_p1.data.folds import hold_out
from candle_p1.data.table import CsvLayout
from candle_p1.data.transforms import SCALINGS, scale_features
from candle_p1.errors import DataError
from candle_p1.models.networks import add_convolutions, initial_weights, same_loss
from nt3_keras2 import network as keras2_network
from nt3_noise import NOISE_TYPES, add_noise
from nt3_synthetic import SIZES, Nt3Recipe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from candle_p1.data.inputs import Inputs
    from candle_p1.data.reader import Reader
    from candle_p1.parameters.parameter_set import ParameterSet


LAYOUT = CsvLayout(label_column=0)


class Nt3(Benchmark):
    """NT3. Each row of the files is a sample: its label, 0 or 1, then the genes."""

    name = "nt3"
    title = "NT3: normal or tumor tissue by a 1D convolutional network"
    paper = PaperRuns(
        # The most ranks that the paper reports.
        sizes={
            ("summit", "strong"): JobSize(64, 60),
            ("summit", "weak"): JobSize(512, 60),
            ("theta", "strong"): JobSize(384, 60),
            ("theta", "weak"): JobSize(384, 240),
        },
        num_samples=2 * SIZES["full"].num_patients["train"],
        num_inputs=SIZES["full"].num_genes,
    )
    parameters = (
        Parameter("classes", int, 2, "number of classes", minimum=2, maximum=10_000),
        Parameter("scaling", str, "maxabs", "scaling of the features", choices=SCALINGS),
        Parameter(
            "reduce_lr", bool, True, "divide the learning rate by 10 on a plateau of val_loss"
        ),
        Parameter("add_noise", bool, False, "flip the labels of some training samples"),
        Parameter(
            "label_noise",
            float,
            0.3,
            "fraction of the labels to flip, or of the samples of noise_cluster",
            minimum=0,
            maximum=1,
        ),
        Parameter(
            "noise_correlated",
            bool,
            False,
            "flip labels only if feature_col exceeds feature_threshold",
        ),
        Parameter(
            "feature_col",
            int,
            [50],
            "indices of the genes for noise_correlated, noise_cluster and noise_column",
            minimum=0,
            many=True,
        ),
        Parameter(
            "feature_threshold", float, 0.01, "threshold of a gene for noise_correlated, scaled"
        ),
        Parameter("noise_gaussian", bool, False, "add noise to the genes of the training samples"),
        Parameter(
            "noise_cluster",
            bool,
            False,
            "add noise to the genes feature_col of some of the training samples sample_ids",
        ),
        Parameter(
            "sample_ids",
            int,
            None,
            "indices of the training samples for noise_cluster",
            minimum=0,
            many=True,
        ),
        Parameter(
            "noise_column",
            bool,
            False,
            "add noise to the genes feature_col of all training samples",
        ),
        Parameter(
            "noise_type",
            str,
            "gaussian",
            "distribution of the noise of noise_cluster and noise_column",
            choices=tuple(NOISE_TYPES),
        ),
        Parameter(
            "std_dev",
            float,
            0.5,
            "standard deviation of noise on genes, after scaling; of uniform noise, its limit",
            minimum=0,
        ),
    )
    files = SAMPLE_FILES
    layouts = dict.fromkeys(("train", "validation", "test"), LAYOUT)
    recipe = Nt3Recipe()
    importable = Importable(needs_labels=True, class_parameter="classes")
    supports = frozenset(
        {"conv", "fold", "folds", "group_data", "locally_connected", "pool", "val_data"}
    )
    acts_with = {  # noqa: RUF012
        "label_noise": {"add_noise": (), "noise_cluster": ()},
        "noise_correlated": {"add_noise": ()},
        "feature_threshold": {"noise_correlated": ()},
        "feature_col": {"noise_correlated": (), "noise_cluster": (), "noise_column": ()},
        "sample_ids": {"noise_cluster": ()},
        "noise_type": {"noise_cluster": (), "noise_column": ()},
        "std_dev": {"noise_gaussian": (), "noise_cluster": (), "noise_column": ()},
    }

    def resolve(self, params: ParameterSet) -> ParameterSet:
        """Returns the parameters, with a warning if several kinds of noise are requested."""
        kinds = ("add_noise", "noise_gaussian", "noise_cluster", "noise_column")
        first, *others = [name for name in kinds if params[name]] or [""]
        warning = (
            f"{', '.join(others)}: without effect, as only one kind of noise is added: {first}"
        )
        return params.with_settings({}, [warning] * bool(others))

    def load_data(self, reader: Reader, params: ParameterSet) -> Mapping[str, NDArray[np.float32]]:
        """Returns the rows of the files: float32, shape (samples, label and genes), by role."""
        table = reader.read("train", LAYOUT)
        tables = {"train": table}
        layout = replace(LAYOUT, num_columns=table.values.shape[1])
        for role in ("validation", "test"):  # the same order on all ranks
            if role in reader.files.paths:
                tables[role] = reader.read(role, layout)
        for role, each in tables.items():
            _check_labels(each.values[:, 0], params["classes"], reader.files.paths[role])
        if params["folds"]:
            labels = table.values[:, 0].astype(int).tolist()
            tables["train"], tables["test"] = hold_out(reader, params, table, labels)
        return {role: each.values for role, each in tables.items()}

    def preprocess(self, raw: Mapping[str, NDArray[np.float32]], params: ParameterSet) -> DataSet:
        """Scales the genes in place and adds noise to those for training, if requested.

        Without a file of validation samples, they are the test samples.
        """
        genes = {role: rows[:, 1:] for role, rows in raw.items()}
        fit_to = [genes["train"]] if params["scaling_fit"] == "train" else None
        scaled_by = scale_features(params["scaling"], *genes.values(), fit_to=fit_to)
        samples = {role: _samples(rows, params["classes"]) for role, rows in raw.items()}
        train, test = samples["train"], samples["test"]
        add_noise(train, params)
        names = self.imported_names(params, genes["train"].shape[1])
        preparation = self.prepared(params, scaled_by, **names)
        return DataSet(train, samples.get("validation", test), test, preparation=preparation)

    def new_inputs(
        self,
        rows: NDArray[np.float32],
        labels: Sequence[str] | None,
        params: ParameterSet,
        inputs: Inputs,
    ) -> NDArray[np.float32]:
        """Returns the genes as one channel."""
        return rows[:, :, np.newaxis]

    def callbacks(self, params: ParameterSet) -> list[Any]:
        """Returns CANDLE's reduction of the learning rate, unless reduce_lr is False."""
        import keras

        reduce = keras.callbacks.ReduceLROnPlateau(
            monitor="val_loss", factor=0.1, patience=10, min_delta=1e-4
        )
        return [reduce] if params["reduce_lr"] else []

    def build_model(self, params: ParameterSet, data: DataSet) -> Any:
        """Returns convolutions with pooling, dense layers with dropout, and an output layer."""
        import keras
        from keras import layers

        from candle_p1.models.fast.layers import Dense

        num_genes = data.train.x_shape[0]
        initializer = initial_weights(params)
        model = keras.Sequential([layers.Input((num_genes, 1))], name="nt3")
        add_convolutions(model, params, num_genes, initializer)
        if not params["conv"]:
            model.add(layers.Flatten())
        for units in params["dense"] or ():
            model.add(Dense(units, kernel_initializer=initializer), rebuild=False)
            model.add(layers.Activation(params["activation"]), rebuild=False)
            if params["dropout"]:
                model.add(layers.Dropout(params["dropout"]), rebuild=False)
        model.add(Dense(params["classes"], kernel_initializer=initializer), rebuild=False)
        # The softmax and the loss stay in float32 under mixed precision.
        model.add(layers.Activation(params["out_activation"], dtype=keras.config.floatx()))
        return model

    def keras2_model(
        self, k: Any, params: ParameterSet, data: DataSet, learning_rate: float
    ) -> Any:
        """Returns the model as CANDLE's script builds it."""
        return keras2_network(k, params, data.train.x_shape[0], learning_rate)

    def loss(self, params: ParameterSet) -> Any:
        """Returns the requested loss; of sigmoids, the one that TensorFlow computes."""
        return same_loss(params["loss"], params["out_activation"])

    def naive_quality(self, params: ParameterSet, data: DataSet) -> dict[str, float]:
        """Returns the accuracy of always predicting the most common class."""
        return {"accuracy": float(data.test.y[:].mean(axis=0).max())}


BENCHMARK = Nt3()


def _check_labels(labels: NDArray[np.float32], num_classes: int, path: Path) -> None:
    bad = np.flatnonzero((labels < 0) | (labels >= num_classes) | (labels % 1 != 0))
    if len(bad):
        row = int(bad[0])
        raise DataError(
            f"the label of row {row + 1} of the data is {labels[row]:g}, not one of 0 to"
            f" {num_classes - 1}",
            path,
            column=1,
        )


def _samples(rows: NDArray[np.float32], num_classes: int) -> Samples:
    """Returns views of the genes, shape (samples, genes, 1), and one-hot classes."""
    one_hot = (rows[:, :1] == np.arange(num_classes)).astype(np.float32)
    return Samples(rows[:, 1:, np.newaxis], one_hot)
