"""P1B1: an autoencoder that compresses a gene expression profile into a few numbers.

Model, options and file format are CANDLE's (ECP-CANDLE/Benchmarks, Pilot1/P1B1); epochs, batch size
and optimizer are those of the paper's Table 1.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from candle_p1.benchmark import (
    SAMPLE_FILES,
    Benchmark,
    CsvLayout,
    DataSet,
    Importable,
    JobSize,
    ModelFile,
    PaperRuns,
    Parameter,
    ParameterError,
    Quality,
    Role,
    Samples,
    Trained,
    compare_with_naive,
)
from candle_p1.data.cases import LAYOUT, Cases, Part
from candle_p1.data.names import match
from candle_p1.data.samples import Selected, Several
from candle_p1.data.table import TextColumn
from candle_p1.data.transforms import SCALINGS
from candle_p1.errors import DataError
from candle_p1.models.optimizers import default_learning_rate
from candle_p1.models.scores import RegressionScore
from p1b1_keras2 import network as keras2_network
from p1b1_latent import save_latent_space
from p1b1_model import build_autoencoder, decoder_of, encoder_of
from p1b1_synthetic import SIZES, P1b1Recipe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from candle_p1.data.inputs import Inputs
    from candle_p1.data.reader import Reader
    from candle_p1.parameters.parameter_set import ParameterSet

LANDMARK_COLUMN = "gdc"
"""The column of CANDLE's lincs1000.tsv that has the genes' names in the expression tables; it has
others, of text."""
LANDMARKS = CsvLayout(True, (LANDMARK_COLUMN,), "\t", may_have_index=True)
XENT_EPSILON = 1e-7
"""Keras's smallest probability in a cross-entropy."""
WARMUP_EPOCHS = 5
WARMUP_BATCH_SIZE = 100
"""The batch size for which, according to CANDLE, an optimizer's default learning rate is meant."""


@dataclass
class Raw:
    """The contents of the files.

    Attributes:
        cases: The cases of both files.
        landmarks: The names of the features to use; None means all.
    """

    cases: Cases
    landmarks: set[str] | None


@dataclass
class P1b1Data(DataSet):
    """The samples, and the cancer types of the test samples.

    Attributes:
        types: The cancer types.
        test_types: Index into `types`, shape (test cases,).
    """

    types: list[str]
    test_types: np.ndarray[Any, np.dtype[np.int64]]


class P1b1(Benchmark):
    """P1B1. The target of each profile is the profile itself."""

    name = "p1b1"
    title = "P1B1: autoencoder of gene expression profiles"
    files = {**SAMPLE_FILES, "landmarks": "landmark_data"}  # noqa: RUF012
    layouts = {  # noqa: RUF012
        **dict.fromkeys(("train", "validation", "test"), LAYOUT),
        "landmarks": LANDMARKS,
    }
    recipe = P1b1Recipe()
    importable = Importable(needs_labels=False)
    supports = frozenset(
        {"batch_normalization", "feature_subsample", "shuffle", "val_split"}
        | {"fold", "folds", "group_data", "val_data"}
    )
    acts_with = {  # noqa: RUF012
        "loss": {"model": ("ae",)},
        "latent_activation": {"model": ("ae",)},
        "epsilon_std": {"model": ("vae", "cvae")},
        "alpha_dropout": {"dropout": ()},
        "landmark_data": {"use_landmark_genes": ()},
    }
    # CANDLE's script makes the optimizer without arguments, so Keras 2's own constants hold.
    optimizer_constants: ClassVar[Mapping[str, Any]] = {}
    paper = PaperRuns(
        # The most ranks that the paper reports; at least 4 epochs on each under strong scaling.
        sizes={
            ("summit", "strong"): JobSize(16, 60),
            ("summit", "weak"): JobSize(512, 60),
            ("theta", "strong"): JobSize(96, 180),
            ("theta", "weak"): JobSize(384, 180),
        },
        num_samples=SIZES["full"].num_patients["train"],
        num_inputs=SIZES["full"].num_genes,
        notes={
            "elements": "60,483 genes; the paper may count a column that holds no gene",
        },
    )
    parameters = (
        Parameter("scaling", str, "minmax", "scaling of the features", choices=SCALINGS),
        Parameter("out_activation", str, "sigmoid", "activation of the last layer"),
        Parameter(
            "metrics", str, None, "a metric of Keras beside those that CANDLE has: xent, corr, …"
        ),
        Parameter(
            "train_samples",
            int,
            0,
            "cases of each file to use, before they are shuffled, scaled and split; 0: all",
            minimum=0,
        ),
        Parameter(
            "model",
            str,
            "ae",
            "autoencoder, variational autoencoder, or the latter conditioned on the cancer type",
            choices=("ae", "vae", "cvae"),
        ),
        Parameter(
            "latent_activation",
            str,
            None,
            "activation of ae's latent layer; None: that of the other layers, as in CANDLE",
            choices=("linear", "relu", "elu", "sigmoid", "tanh"),
        ),
        Parameter("latent_dim", int, 2, "size of the compressed profile", minimum=1, maximum=2**20),
        Parameter(
            "residual",
            bool,
            False,
            "add each dense layer's input to its output if their sizes are equal",
        ),
        Parameter("alpha_dropout", bool, False, "use AlphaDropout instead of Dropout"),
        Parameter("epsilon_std", float, 1.0, "standard deviation of the latent noise", minimum=0),
        Parameter("warmup_lr", bool, False, f"raise the learning rate over {WARMUP_EPOCHS} epochs"),
        Parameter("reduce_lr", bool, False, "halve the learning rate on a plateau of val_loss"),
        Parameter("use_landmark_genes", bool, False, "use only the landmark genes of LINCS L1000"),
        Parameter(
            "landmark_data",
            str,
            "lincs1000.tsv",
            "file of the names of the landmark genes",
            role=Role.PLACE,
            optional=True,
        ),
        Parameter(
            "cp",
            bool,
            False,
            "save the weights of the best epoch, the network, and encoder and decoder",
            role=Role.SPEED,
        ),
        Parameter("tsne", bool, False, "plot the latent space by t-SNE instead of PCA"),
    )

    def resolve(self, params: ParameterSet) -> ParameterSet:
        """Returns the parameters with the warm-up that warmup_lr requests."""
        sizes = [*(params["dense"] or ()), params["latent_dim"]]
        if params["residual"] and all(size != after for size, after in pairwise(sizes)):
            text = (
                f"residual ({params.origin('residual')}) has no effect between layers of the sizes"
                f" {sizes}, of which no two adjacent ones are equal"
            )
            params = params.with_settings({}, [text])
        if not params["warmup_lr"] or params["warmup_epochs"]:
            return params
        own = params["base_lr"] or default_learning_rate(params["optimizer"])
        rate = params["learning_rate"] or own * params["batch_size"] / WARMUP_BATCH_SIZE
        return params.replace(
            {
                "warmup_epochs": WARMUP_EPOCHS,
                "warmup_by": "epoch",
                "base_lr": own,
                "learning_rate": rate,
            },
            source="warmup_lr",
        )

    def needed_files(self, params: ParameterSet) -> Sequence[str]:
        """Returns the roles of the tables and, if used, of the list of landmark genes."""
        uses = params["use_landmark_genes"]
        return [role for role in super().needed_files(params) if uses or role != "landmarks"]

    def load_data(self, reader: Reader, params: ParameterSet) -> Raw:
        """Returns the cases of both files, and the names of the landmark genes."""
        cases, landmarks = Cases.read(reader, params, uses_types=params["model"] == "cvae"), None
        if params["use_landmark_genes"]:
            landmarks = reader.load("landmarks", _landmark_names)
            genes = TextColumn(sorted(landmarks), np.arange(len(landmarks), dtype=np.int32))
            roles, effect = ("landmarks", "train"), "there are fewer inputs"
            match(reader, "genes", roles, genes, cases.features, effect)
        return Raw(cases, landmarks)

    def preprocess(self, raw: Raw, params: ParameterSet) -> P1b1Data:
        """Scales the features in place; uses the last training cases for validation."""
        cases = raw.cases
        cases.take_first(params["train_samples"])
        if raw.landmarks is not None:
            cases.select([i for i, name in enumerate(cases.features) if name in raw.landmarks])
        cases.select_first(params["feature_subsample"])
        train, validation, test = cases.parts(params, validates_on_last=True)
        scaled_by = cases.scale(params, train)
        conditioned = params["model"] == "cvae"

        def samples(part: Part) -> Samples:
            profiles = Selected(part.x, part.rows)
            if not conditioned:
                return Samples(profiles, profiles)
            return Samples(Several((profiles, cases.one_hot(part.y[part.rows]))), profiles)

        tested = samples(test)
        return P1b1Data(
            samples(train),
            tested if validation is test else samples(validation),
            tested,
            cases.types,
            test.y[test.rows],
            preparation=self.prepared(
                params, scaled_by, features=cases.features, classes=cases.types
            ),
        )

    def new_inputs(
        self,
        rows: NDArray[np.float32],
        labels: Sequence[str] | None,
        params: ParameterSet,
        inputs: Inputs,
    ) -> Any:
        """Returns the profiles and, for cvae, the one-hot cancer types."""
        if params["model"] != "cvae":
            return rows
        types = {name: i for i, name in enumerate(inputs.classes or ())}
        unknown = [name for name in labels or () if name not in types]
        if labels is None or unknown:
            which = f"not {unknown[0]!r}" if unknown else "which its table lacks"
            raise ParameterError(
                f"the model cvae needs the cancer type of each sample, one of {', '.join(types)};"
                f" {which}"
            )
        codes = [types[name] for name in labels]
        return rows, np.eye(len(types), dtype=np.float32)[codes]

    def predictor(
        self, model: Any, params: ParameterSet, inputs: Inputs
    ) -> Callable[[Any], dict[str, Any]]:
        """Returns what gives the latent space, and the mean squared error of the scaled profile."""
        import keras

        both = keras.Model(model.input, [encoder_of(params, model).output, model.output])

        def predict(x: Any) -> dict[str, Any]:
            latent, restored = map(np.asarray, both.predict_on_batch(x))
            profile = x[0] if isinstance(x, tuple) else x
            columns = {f"latent_{i + 1}": latent[:, i] for i in range(latent.shape[1])}
            return columns | {"reconstruction_mse": np.square(restored - profile).mean(axis=1)}

        return predict

    def loss(self, params: ParameterSet) -> Any:
        """Returns the requested loss of an autoencoder, else the cross-entropy.

        A variational model adds the divergence of its latent space itself.
        """
        return params["loss"] if params["model"] == "ae" else "binary_crossentropy"

    def metrics(self, params: ParameterSet) -> list[Any]:
        """Returns CANDLE's metrics by its names, and a further one if it is requested.

        They are the cross-entropy, the correlation of all values and, for the variational models,
        whose loss it is not, the mean squared error.
        """
        from keras.metrics import BinaryCrossentropy, MeanSquaredError

        from candle_p1.models.layers import Correlation

        metrics = [BinaryCrossentropy(name="xent"), Correlation("corr")]
        if params["model"] != "ae":
            metrics.append(MeanSquaredError(name="mse"))
        further = params["metrics"] not in (None, *(metric.name for metric in metrics))
        return metrics + [params["metrics"]] * further

    def callbacks(self, params: ParameterSet) -> list[Any]:
        """Returns the reduction of the learning rate if reduce_lr requests it."""
        import keras

        reduce = keras.callbacks.ReduceLROnPlateau(
            monitor="val_loss", factor=0.5, patience=5, min_lr=1e-5
        )
        return [reduce] if params["reduce_lr"] else []

    def model_files(self, params: ParameterSet) -> list[ModelFile]:
        """Returns CANDLE's files if cp requests them, under names of their own."""
        if not params["cp"]:
            return []
        return [
            ModelFile("model.json", "begin"),
            ModelFile("best.weights.h5", "best"),
            ModelFile("encoder.keras", "end", partial(encoder_of, params)),
            ModelFile("decoder.keras", "end", partial(decoder_of, params)),
        ]

    def build_model(self, params: ParameterSet, data: DataSet) -> Any:
        """Returns the encoder and the decoder as one model."""
        assert isinstance(data, P1b1Data)
        num_features = np.shape(data.train.y[0:0])[1]
        return build_autoencoder(params, num_features, len(data.types))

    def keras2_model(
        self, k: Any, params: ParameterSet, data: DataSet, learning_rate: float
    ) -> Any:
        """Returns the model as CANDLE's script builds it."""
        assert isinstance(data, P1b1Data)
        num_features, num_types = np.shape(data.train.y[0:0])[1], len(data.types)
        return keras2_network(k, params, num_features, num_types, learning_rate)

    def random_parameters(self, params: ParameterSet) -> list[str]:
        """Returns the dropout and, of a variational model, the noise of its latent space."""
        names = ["dropout"] if params["model"] == "ae" else ["dropout", "epsilon_std"]
        return [name for name in names if params[name]]

    def evaluate(self, trained: Trained) -> Quality:
        """Returns test loss, xent, mse, r2 and correlation; saves the test cases' latent space.

        The naive predictor returns the mean training profile for every case.
        """
        data, params = trained.data, trained.params
        assert isinstance(data, P1b1Data)
        test, num_steps = data.test, params["test_steps"]
        num_features = np.shape(test.y[0:0])[1]
        metrics = trained.metrics(test, num_steps)
        values = {name: metrics[name] for name in ("loss", "xent")}
        score = trained.score(test, RegressionScore(num_features), num_steps)
        mean = trained.mean_target(data.train)
        naive = {"xent": _cross_entropy(score, mean)} | score.of_constant(mean).result()
        latent = trained.apply(encoder_of(params, trained.model), test, num_steps)
        if latent is not None:
            save_latent_space(
                trained.directory,
                latent,
                data.test_types[: len(latent)],
                data.types,
                title=trained.title("Latent space of the test cases by cancer type"),
                use_tsne=params["tsne"],
                seed=params["rng_seed"],
                variational=params["model"] != "ae",
            )
        return compare_with_naive(values | score.result(), naive)


BENCHMARK = P1b1()


def _cross_entropy(score: RegressionScore, predicted: np.ndarray[Any, Any]) -> float:
    """Returns the mean cross-entropy of always predicting a profile, over the score's samples."""
    num_samples, true = score.sums[:2]
    p = np.clip(predicted, XENT_EPSILON, 1 - XENT_EPSILON)
    total = true * np.log(p) + (num_samples - true) * np.log1p(-p)
    return float(-total.sum() / num_samples.sum())


def _landmark_names(path: Path) -> set[str]:
    """Returns the names of the landmark genes in a table like CANDLE's lincs1000.tsv."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        table = csv.DictReader(file, delimiter="\t")
        num_columns = list(table.fieldnames or ()).count(LANDMARK_COLUMN)
        if num_columns != 1:
            raise DataError(f"the header has {num_columns} columns {LANDMARK_COLUMN!r}", path, 1)
        names = {row[LANDMARK_COLUMN] for row in table if row[LANDMARK_COLUMN]}
    if not names:
        raise DataError(f"the column {LANDMARK_COLUMN!r} is empty", path)
    return names
