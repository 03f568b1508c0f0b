"""P1B3: predicts the growth of a cell line under a drug at a concentration.

Model, options and files are CANDLE's (ECP-CANDLE/Benchmarks, Pilot1/P1B3); epochs, batch size,
learning rate and optimizer are those of the paper's Table 1, and the batch size is scaled by the
strategy that the paper found best.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.benchmark import (
    Benchmark,
    DataSet,
    Importable,
    JobSize,
    Joined,
    ModelFile,
    PaperRuns,
    Parameter,
    Quality,
    Quantity,
    Role,
    Samples,
    Trained,
    compare_with_naive,
)
from candle_p1.data.inputs import Target
from candle_p1.data.transforms import SCALINGS
from candle_p1.figures import error_histogram, measured_against_predicted
from candle_p1.models.networks import add_convolutions, initial_weights
from candle_p1.models.scores import RegressionScore
from p1b3_inputs import (
    DRUG_KINDS,
    LINE_KINDS,
    draw_features,
    prepared_by,
    scale_and_join,
    tables_of,
)
from p1b3_keras2 import network as keras2_network
from p1b3_merge import MergedRows
from p1b3_new import check_responses, new_responses
from p1b3_split import Responses, choose, split
from p1b3_synthetic import NUM_COLUMNS, NUM_SELECTED, P1b3Recipe
from p1b3_tables import LAYOUTS, LINE_TABLE, LISTS, RESPONSE, Features, read_reserved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from candle_p1.benchmark import NewRows
    from candle_p1.data.inputs import Inputs
    from candle_p1.data.reader import Reader
    from candle_p1.parameters.parameter_set import ParameterSet

PERCENT = 100.0
"""The files give growth in percent; the model predicts it as a fraction."""
GROWTH = Target(name="growth", unit="percent", factor=PERCENT)


@dataclass
class Raw:
    """The contents of the files.

    Attributes:
        responses: The dose responses.
        tables: The features of cell lines and drugs, by role.
        test_lines: The cell lines that CANDLE reserves for testing.
        test_drugs: The drugs that CANDLE reserves for testing.
    """

    responses: Responses
    tables: dict[str, Features]
    test_lines: list[str]
    test_drugs: list[str]


@dataclass
class P1b3Data(DataSet):
    """The samples.

    Attributes:
        num_line_features: The number of inputs that describe the cell line.
    """

    num_line_features: int


class P1b3(Benchmark):
    """P1B3. The target is the growth, relative to that of an untreated culture."""

    name = "p1b3"
    title = "P1B3: growth of a cell line under a drug"
    files = {  # noqa: RUF012
        "expression": "expression_data",
        "mirna": "mirna_data",
        "proteome": "proteome_data",
        "kinome": "kinome_data",
        "descriptors": "descriptor_data",
        "latent": "latent_data",
        "response": "response_data",
        "test_cells": "test_cell_data",
        "test_drugs": "test_drug_data",
    }
    layouts = {**LAYOUTS, **LISTS, "response": RESPONSE}  # noqa: RUF012
    recipe = P1b3Recipe()
    importable = Importable(
        features={
            role: "CELLNAME" if layout is LINE_TABLE else "NSC" for role, layout in LAYOUTS.items()
        },
        reserved={"test_cells": "CELLNAME", "test_drugs": "NSC"},
        quantities={
            "LOG_CONCENTRATION": Quantity(
                "the log10 of the molar concentration", lambda values: values.max() <= 0
            ),
            "GROWTH": Quantity(
                "growth in percent of an untreated culture", lambda values: abs(values).max() > 2
            ),
        },
        flags={
            "CELLNAME": ("cell_features", "categorical"),
            "NSC": ("drug_features", "noise"),
        },
        pairs=[("proteome", "kinome")],
        levels=["CELLNAME"],
    )
    other_sample_names = ("merged",)
    supports = frozenset(
        {
            *("batch_normalization", "conv", "feature_subsample", "locally_connected", "pool"),
            "val_split",
        }
    )
    drop_remainder = True
    paper = PaperRuns(
        # The 48 ranks that were best in the paper, which has no weak scaling of P1B3.
        sizes={
            ("summit", "strong"): JobSize(8, 120),
            ("summit", "weak"): JobSize(8, 120),
            ("theta", "strong"): JobSize(48, 180),
            ("theta", "weak"): JobSize(48, 180),
        },
        modes=("strong",),
        weak_epochs=1,
        num_samples=NUM_SELECTED,
        num_inputs=1 + sum(NUM_COLUMNS[role]["full"] for role in ("expression", "descriptors")),
        testing_role="response",
        notes={
            "training_mb": "the other eight files together; CANDLE reads no training file",
            "testing_mb": "the dose responses; CANDLE reads no testing file",
            "batch_size": "times the cube root of the number of ranks (--batch_scaling cbrt)",
            "samples": "about as many synthetic responses are selected as of CANDLE's files",
            "elements": (
                "the concentration, 25,722 genes and 3,809 descriptors, as CANDLE's README has it;"
                " the paper may mean the first layer, or --feature_subsample 500"
            ),
        },
    )
    parameters = (
        *(
            Parameter(name, str, f"P1B3_{file}", f"file of {what}", role=Role.PLACE, optional=True)
            for name, file, what in (
                ("expression_data", "cellline_expressions.tsv", "gene expression of cell lines"),
                ("mirna_data", "cellline_mirna.tsv", "microRNA expression of cell lines"),
                ("proteome_data", "cellline_proteome.tsv", "protein levels of cell lines"),
                ("kinome_data", "cellline_kinome.tsv", "kinase levels of cell lines"),
                ("descriptor_data", "drug_descriptors.tsv", "chemical descriptors of drugs"),
                ("latent_data", "drug_latent.csv", "learned representations of drugs"),
                ("response_data", "dose_response.csv", "dose responses"),
                ("test_cell_data", "test_celllines.txt", "cell lines reserved for testing"),
                ("test_drug_data", "test_drugs.txt", "drugs reserved for testing"),
            )
        ),
        Parameter(
            "data_url",
            str,
            "http://ftp.mcs.anl.gov/pub/candle/public/benchmarks/P1B3/",
            "address from which candle-p1 data fetch downloads the files",
            role=Role.PLACE,
        ),
        Parameter("metrics", str, "mae", "name of the metric in Keras"),
        Parameter("out_activation", str, None, "the last layer is linear", needs_support=True),
        Parameter("scaling", str, "std", "scaling of the features", choices=SCALINGS),
        Parameter(
            "cell_features",
            str,
            ["expression"],
            "features of cell lines; categorical is a one-hot encoding",
            choices=(*LINE_KINDS, "all"),
            many=True,
        ),
        Parameter(
            "drug_features",
            str,
            ["descriptors"],
            "features of drugs; noise is a control",
            choices=(*DRUG_KINDS, "all"),
            many=True,
        ),
        Parameter("min_logconc", float, -5.0, "lowest log10 concentration used"),
        Parameter("max_logconc", float, -4.0, "highest log10 concentration used"),
        Parameter(
            "subsample",
            str,
            "naive_balancing",
            "how to subsample the responses by their growth",
            choices=("naive_balancing", "none"),
        ),
        Parameter(
            "category_cutoffs", float, [0.0], "growth fractions that separate classes", many=True
        ),
        Parameter(
            "test_cell_split",
            float,
            0.15,
            "fraction of the training lines used for testing; None or 0: test on other lines",
            minimum=0,
            maximum=1,
            optional=True,
        ),
        Parameter("scramble", bool, False, "shuffle the growth among responses, as a control"),
        Parameter(
            "cell_noise_sigma",
            float,
            0.0,
            "standard deviation of noise on cell line features in training",
            minimum=0,
        ),
        Parameter(
            "save_best_model",
            bool,
            False,
            "save the model of the epoch with the lowest validation loss into best.keras",
            role=Role.SPEED,
        ),
    )

    def resolve(self, params: ParameterSet) -> ParameterSet:
        """Returns the parameters without dense layers if a config file sets only convolutions.

        CANDLE's files have one or the other.
        """
        kinds = [params.origin(name).kind for name in ("conv", "dense")]
        if params["conv"] and kinds == ["config file", "model file"]:
            return params.replace({"dense": None}, source="conv")
        return params

    def needed_files(self, params: ParameterSet) -> Sequence[str]:
        """Returns the roles of the tables that are used, of the responses and of the lists."""
        tables = tables_of(params)
        return [role for role in self.files if role in tables] + [
            "response",
            "test_cells",
            "test_drugs",
        ]

    def load_data(self, reader: Reader, params: ParameterSet) -> Raw:
        """Returns the responses, the tables that are used, and the lists."""
        tables = {role: Features.read(reader, role) for role in tables_of(params)}
        responses = Responses.of(reader.read("response", RESPONSE))
        return Raw(
            responses,
            tables,
            read_reserved(reader, "test_cells", "cell lines", responses.line, tables),
            read_reserved(reader, "test_drugs", "drugs", responses.drug, tables),
        )

    def preprocess(self, raw: Raw, params: ParameterSet) -> P1b3Data:
        """Selects and splits the responses; scales the features of cell lines and drugs."""
        responses = raw.responses
        random = np.random.RandomState(params["rng_seed"])
        rows = choose(responses, params)
        rows, of_lines, of_drugs = draw_features(responses, rows, raw.tables, params, random)
        parts = split(responses, rows, raw.test_lines, raw.test_drugs, params)
        used = np.concatenate([parts.train, parts.validation, parts.test])
        growth = responses.growth[used] / np.float32(PERCENT)
        if params["scramble"]:
            growth = random.permutation(growth)
        trained_on = parts.train if params["scaling_fit"] == "train" else None
        lines = scale_and_join(of_lines, responses.line, trained_on, params["scaling"])
        drugs = scale_and_join(of_drugs, responses.drug, trained_on, params["scaling"])
        names, offset, scale = prepared_by([*of_lines, *of_drugs])

        def samples(first: int, chosen: NDArray[np.int64]) -> Samples:
            x = Joined(
                responses.log_concentration[chosen, np.newaxis],
                (responses.line.codes[chosen], responses.drug.codes[chosen]),
                (lines, drugs),
            )
            return Samples(x, growth[first : first + len(chosen), np.newaxis])

        num_train, num_seen = len(parts.train), len(parts.train) + len(parts.validation)
        return P1b3Data(
            samples(0, parts.train),
            samples(num_train, parts.validation),
            samples(num_seen, parts.test),
            lines.shape[1],
            preparation=self.prepared(params, (offset, scale), features=names, target=GROWTH),
        )

    def read_new(
        self,
        path: Path,
        reader: Callable[[], Reader],
        params: ParameterSet,
        inputs: Inputs,
        note: Callable[[str], None],
    ) -> Callable[[], Iterator[NewRows]]:
        """Returns what reads responses: NSC, CELLNAME, LOG_CONCENTRATION and maybe GROWTH."""
        check_responses(path, self.importable.quantities, params, note)
        return partial(new_responses, path, reader, params, inputs, PERCENT)

    def other_samples(self, data: DataSet) -> dict[str, Samples]:
        """Returns the samples as CANDLE builds them."""
        rows = data.train.x
        assert isinstance(rows, Joined)
        return {"merged": Samples(MergedRows(rows), data.train.y)}

    def metrics(self, params: ParameterSet) -> list[Any]:
        """Returns the accuracy at the cutoffs and the requested metric."""
        from candle_p1.models.layers import CutoffAccuracy

        return [CutoffAccuracy(params["category_cutoffs"]), params["metrics"]]

    def build_model(self, params: ParameterSet, data: DataSet) -> Any:
        """Returns convolutions, if any, dense layers with dropout, and a linear unit."""
        import keras
        from keras import layers

        from candle_p1.models.fast.layers import Dense
        from candle_p1.models.layers import NoiseOnColumns

        assert isinstance(data, P1b3Data)
        (num_inputs,) = data.train.x_shape
        initializer = initial_weights(params, "normal")
        model = keras.Sequential([layers.Input((num_inputs,))], name="p1b3")
        if params["cell_noise_sigma"]:
            stop = 1 + data.num_line_features
            model.add(NoiseOnColumns(params["cell_noise_sigma"], 1, stop))
        if params["conv"]:
            model.add(layers.Reshape((num_inputs, 1)))
            add_convolutions(model, params, num_inputs)
        for units in params["dense"] or ():
            model.add(Dense(units, kernel_initializer=initializer))
            if params["batch_normalization"]:
                model.add(layers.BatchNormalization())
            model.add(layers.Activation(params["activation"]))
            if params["dropout"]:
                model.add(layers.Dropout(params["dropout"]))
        # The loss stays in float32 under mixed precision. CANDLE initializes only the dense layers.
        model.add(Dense(1, kernel_initializer="glorot_uniform", dtype=keras.config.floatx()))
        return model

    def keras2_model(
        self, k: Any, params: ParameterSet, data: DataSet, learning_rate: float
    ) -> Any:
        """Returns the model as CANDLE's script builds it."""
        return keras2_network(k, params, data.train.x_shape[0], learning_rate)

    def random_parameters(self, params: ParameterSet) -> list[str]:
        """Returns the dropout, and the noise on the inputs."""
        return [name for name in ("dropout", "cell_noise_sigma") if params[name]]

    def model_files(self, params: ParameterSet) -> list[ModelFile]:
        """Returns the file of the best model, which CANDLE saves too."""
        return [ModelFile("best.keras", "best")] if params["save_best_model"] else []

    def evaluate(self, trained: Trained) -> Quality:
        """Returns test loss, accuracy at the cutoffs, r2 and correlation; plots the predictions.

        The naive predictor returns the mean growth of the training samples; its accuracy is that of
        the most common class.
        """
        data, params = trained.data, trained.params
        values = trained.metrics(data.test, params["test_steps"])
        predictions = trained.predict(data.test, params["test_steps"])
        further: dict[str, float] = {}
        if predictions is not None:
            measured, predicted = (np.ravel(each).astype(np.float64) for each in predictions)
            score = RegressionScore(1)
            score.update(measured, predicted)
            further = {name: score.result()[name] for name in ("r2", "correlation")}
            _draw(trained, measured, predicted)
        values |= trained.comm.broadcast(further)
        return compare_with_naive(values, _naive(data, params))


BENCHMARK = P1b3()


def _naive(data: DataSet, params: ParameterSet) -> dict[str, float]:
    trained_on, tested_on = (np.ravel(part.y[:]) for part in (data.train, data.test))
    mean = np.full(tested_on.shape, trained_on.mean())
    regression = RegressionScore(1)
    regression.update(tested_on, mean)
    cutoffs = params["category_cutoffs"]
    commonest = np.bincount(np.digitize(trained_on, cutoffs)).argmax()
    hits = np.digitize(tested_on, cutoffs) == commonest
    naive = {"accuracy": float(hits.mean()), "r2": regression.result()["r2"]}
    if params["loss"] == "mse":
        naive["loss"] = regression.result()["mse"]
    return naive


def _draw(trained: Trained, measured: NDArray[Any], predicted: NDArray[Any]) -> None:
    unit = "percent growth"
    error_histogram(
        trained.directory / "errors.png",
        measured * PERCENT,
        predicted * PERCENT,
        title=trained.title("Errors of the growth of test samples"),
        unit=unit,
    )
    measured_against_predicted(
        trained.directory / "predictions.png",
        measured * PERCENT,
        predicted * PERCENT,
        title=trained.title("Growth of test samples"),
        unit=unit,
    )
