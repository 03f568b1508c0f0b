"""P3B1: what a pathology report says about a tumor, in several respects at once.

Tasks and parameters follow CANDLE's P3B1: shared layers read the report, and each task has layers
of its own. Here a report is a sequence of words, each given by its number in a vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.benchmark import (
    Benchmark,
    Computed,
    ConfusionScore,
    CsvLayout,
    DataError,
    DataSet,
    Parameter,
    Quality,
    Samples,
    Several,
    Trained,
    compare_with_naive,
)
from p3b1_synthetic import TASKS, P3b1Recipe

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from candle_p1.benchmark import ParameterSet, Reader

    Matrix = NDArray[np.float32]

LAYOUT = CsvLayout(header=True)
"""The names of the tasks and ``word0``, ``word1``, …; below it, a report per row."""


class P3b1(Benchmark):
    """P3B1. Each row of the files has the labels of all tasks, then the words."""

    name = "p3b1"
    title = "P3B1: several properties of a tumor from a pathology report"
    recipe = P3b1Recipe()
    parameters = (
        Parameter("vocabulary", int, 500, "number of different words", minimum=2),
        Parameter("embedding", int, 32, "length of the vector that represents a word", minimum=1),
        Parameter(
            "shared_nnet_spec", int, [64], "units of the shared layers", minimum=1, many=True
        ),
        Parameter("ind_nnet_spec", int, [32], "units of each task's layers", minimum=1, many=True),
    )

    def load_data(self, reader: Reader, params: ParameterSet) -> dict[str, Matrix]:
        """Returns the rows of both files: float32, shape (reports, tasks and words)."""
        return {role: _rows(reader, role, params) for role in ("train", "test")}

    def preprocess(self, raw: dict[str, Matrix], params: ParameterSet) -> DataSet:
        """Separates words from labels; the test reports are also used for validation."""
        train, test = (_samples(raw[role]) for role in ("train", "test"))
        return DataSet(train, test, test)

    def build_model(self, params: ParameterSet, data: DataSet) -> Any:
        """Returns a network with one output for each task, by its name."""
        import keras
        from keras import layers

        def dense(x: Any, sizes: list[int], name: str) -> Any:
            for i, units in enumerate(sizes):
                x = layers.Dense(units, params["activation"], name=f"{name}_{i}")(x)
                x = layers.Dropout(params["dropout"])(x)
            return x

        words = keras.Input(data.train.x_shape, dtype="int32", name="words")
        x = layers.Embedding(params["vocabulary"], params["embedding"])(words)
        x = layers.GlobalAveragePooling1D()(x)
        x = dense(x, params["shared_nnet_spec"], "shared")
        outputs = {}
        for task, num_classes in TASKS.items():
            own = dense(x, params["ind_nnet_spec"], f"{task}_layer")
            outputs[task] = layers.Dense(num_classes, params["out_activation"], name=task)(own)
        return keras.Model(words, outputs, name="p3b1")

    def evaluate(self, trained: Trained) -> Quality:
        """Returns the loss, and accuracy and macro F1 of each task.

        The naive predictor returns the most common class of the training reports.
        """
        data, num_steps = trained.data, trained.params["test_steps"]
        values = {"loss": trained.metrics(data.test, num_steps)["loss"]}
        naive = {}
        scores = {task: ConfusionScore(num_classes) for task, num_classes in TASKS.items()}
        for task, score in trained.scores(data.test, scores, num_steps).items():
            commonest = int(np.bincount(data.train.y[:][task]).argmax())
            for name, value in score.result().items():
                values[f"{task}_{name}"] = value
                naive[f"{task}_{name}"] = score.of_constant(commonest).result()[name]
        return compare_with_naive(values, naive)


BENCHMARK = P3b1()


def _rows(reader: Reader, role: str, params: ParameterSet) -> Matrix:
    """Returns the rows of a file, after checking that labels and words are in their ranges."""
    table, path = reader.read(role, LAYOUT), reader.files.paths[role]
    if table.columns[: len(TASKS)] != list(TASKS):
        raise DataError(f"the first columns are not {', '.join(TASKS)}", path, 1)
    words = [params["vocabulary"]] * (len(table.columns) - len(TASKS))
    for name, values, limit in zip(
        table.columns, table.values.T, [*TASKS.values(), *words], strict=True
    ):
        if not np.isin(values, range(limit)).all():
            raise DataError(f"{name} is not an integer from 0 to {limit - 1} in every row", path)
    return table.values


def _samples(rows: Matrix) -> Samples:
    """Returns words and labels as integers; the words are converted batch by batch."""
    words = Computed(rows[:, len(TASKS) :], lambda numbers: numbers.astype(np.int32))
    labels = {task: rows[:, i].astype(np.int32) for i, task in enumerate(TASKS)}
    return Samples(words, Several(labels))
