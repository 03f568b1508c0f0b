"""P1B2: a network that classifies cancer types from somatic mutations.

Model, options and file format are CANDLE's (ECP-CANDLE/Benchmarks, Pilot1/P1B2); epochs, batch
size, learning rate and optimizer are those of the paper's Table 1.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from candle_p1.benchmark import (
    SAMPLE_FILES,
    Benchmark,
    DataSet,
    Importable,
    JobSize,
    PaperRuns,
    Parameter,
    Quality,
    Samples,
    Trained,
    compare_with_naive,
)
from candle_p1.data.cases import LAYOUT, Cases, Part
from candle_p1.data.samples import Selected
from candle_p1.data.transforms import SCALINGS
from candle_p1.files import write_atomically
from candle_p1.models.networks import initial_weights, same_loss
from candle_p1.models.scores import ConfusionScore
from p1b2_keras2 import network as keras2_network
from p1b2_synthetic import SIZES, P1b2Recipe

if TYPE_CHECKING:
    from candle_p1.data.reader import Reader
    from candle_p1.parameters.parameter_set import ParameterSet


@dataclass
class P1b2Data(DataSet):
    """The samples.

    Attributes:
        types: The cancer types, in the order of the outputs.
    """

    types: list[str]


class P1b2(Benchmark):
    """P1B2. The target is the one-hot cancer type."""

    name = "p1b2"
    title = "P1B2: cancer type by somatic mutations"
    files = SAMPLE_FILES
    layouts = dict.fromkeys(("train", "validation", "test"), LAYOUT)
    recipe = P1b2Recipe()
    importable = Importable(needs_labels=True)
    supports = frozenset(
        {"feature_subsample", "fold", "folds", "group_data", "shuffle", "val_data", "val_split"}
    )
    paper = PaperRuns(
        # The most ranks that the paper reports.
        sizes={
            ("summit", "strong"): JobSize(64, 60),
            ("summit", "weak"): JobSize(512, 60),
            ("theta", "strong"): JobSize(384, 60),
            ("theta", "weak"): JobSize(384, 180),
        },
        num_samples=SIZES["full"].num_patients["train"],
        num_inputs=SIZES["full"].num_genes,
    )
    parameters = (
        Parameter("scaling", str, "minmax", "scaling of the features", choices=SCALINGS),
        Parameter("metrics", str, "accuracy", "name of the metric in Keras"),
        Parameter(
            "reg_l2",
            float,
            0.0,
            "weight of the L2 penalty on kernels and activities",
            minimum=0,
            old_names=("penalty",),
        ),
    )

    def load_data(self, reader: Reader, params: ParameterSet) -> Cases:
        """Returns the cases of the files."""
        return Cases.read(reader, params)

    def preprocess(self, raw: Cases, params: ParameterSet) -> P1b2Data:
        """Scales the features in place; uses the first training cases for validation."""
        raw.select_first(params["feature_subsample"])
        train, validation, test = raw.parts(params, validates_on_last=False)
        scaled_by = raw.scale(params, train)

        def samples(part: Part) -> Samples:
            return Samples(Selected(part.x, part.rows), raw.one_hot(part.y[part.rows]))

        tested = samples(test)
        return P1b2Data(
            samples(train),
            tested if validation is test else samples(validation),
            tested,
            raw.types,
            preparation=self.prepared(params, scaled_by, features=raw.features, classes=raw.types),
        )

    def build_model(self, params: ParameterSet, data: DataSet) -> Any:
        """Returns dense layers with an L2 penalty, and a unit for each cancer type."""
        import keras
        from keras import layers

        from candle_p1.models.fast.layers import L2, Dense
        from candle_p1.models.layers import ActivityL2

        assert isinstance(data, P1b2Data)
        weight = params["reg_l2"]
        initializer = initial_weights(params)
        model = keras.Sequential([layers.Input(data.train.x_shape)], name="p1b2")
        for units in params["dense"] or ():
            model.add(
                Dense(
                    units,
                    activation=params["activation"],
                    kernel_initializer=initializer,
                    kernel_regularizer=L2(weight) if weight else None,
                )
            )
            if weight:
                model.add(ActivityL2(weight))
            if params["dropout"]:
                model.add(layers.Dropout(params["dropout"]))
        model.add(
            Dense(
                len(data.types),
                activation=params["out_activation"] or params["activation"],
                kernel_initializer=initializer,
                dtype=keras.config.floatx(),  # the loss stays in float32 under mixed precision
            )
        )
        return model

    def keras2_model(
        self, k: Any, params: ParameterSet, data: DataSet, learning_rate: float
    ) -> Any:
        """Returns the model as CANDLE's script builds it."""
        assert isinstance(data, P1b2Data)
        (num_genes,) = data.train.x_shape
        return keras2_network(k, params, num_genes, len(data.types), learning_rate)

    def loss(self, params: ParameterSet) -> Any:
        """Returns the requested loss; of sigmoids, the one that TensorFlow computes."""
        return same_loss(params["loss"], params["out_activation"] or params["activation"])

    def evaluate(self, trained: Trained) -> Quality:
        """Returns test loss, accuracy and macro F1; writes ``classes.csv``.

        The naive predictor returns the most common type of the training cases.
        """
        data, params = trained.data, trained.params
        assert isinstance(data, P1b2Data)
        values = trained.metrics(data.test, params["test_steps"])
        score = trained.score(data.test, ConfusionScore(len(data.types)), params["test_steps"])
        if trained.writes:
            _write_classes(score, data.types, trained)
        naive = score.of_constant(int(data.train.y[:].sum(axis=0).argmax()))
        return compare_with_naive(values | score.result(), naive.result())


BENCHMARK = P1b2()


def _write_classes(score: ConfusionScore, types: list[str], trained: Trained) -> None:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    columns = score.per_class()
    table.writerow(["cancer_type", *columns, *(f"predicted_{name}" for name in types)])
    for i, name in enumerate(types):
        figures = [f"{column[i]:.6g}" for column in columns.values()]
        table.writerow([name, *figures, *score.sums[i]])
    write_atomically(trained.directory / "classes.csv", text.getvalue())
