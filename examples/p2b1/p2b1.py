"""P2B1: an autoencoder of lipid molecules in frames of a simulated cell membrane.

Files and parameters follow CANDLE's P2B1: each file holds some frames of a molecular-dynamics run,
and a frame the coordinates and properties of the beads that make up its molecules. A data set is a
directory of such files, which may exceed the memory: a batch is read when it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.benchmark import (
    Benchmark,
    Chained,
    Computed,
    DataError,
    DataSet,
    Parameter,
    Quality,
    RegressionScore,
    Samples,
    Trained,
    compare_with_naive,
)
from p2b1_synthetic import LIPIDS, P2b1Recipe

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from candle_p1.benchmark import ParameterSet, Reader

    Frames = NDArray[np.float32]

NUM_BEADS, NUM_FIELDS = 12, 20
"""The fields of a bead: position; lipid, head or tail; distance to each bead of the molecule."""
POSITION, LIPID = slice(0, 3), slice(3, 6)
PENALTY = 0.01


class P2b1(Benchmark):
    """P2B1. A sample is a molecule in a frame."""

    name = "p2b1"
    title = "P2B1: autoencoder of lipid molecules"
    recipe = P2b1Recipe()
    parameters = (
        Parameter(
            "molecular_num_hidden", int, [54, 12], "units down to the code", minimum=2, many=True
        ),
        Parameter(
            "molecular_nonlinearity", str, "elu", "activation", choices=("elu", "relu", "tanh")
        ),
        Parameter("noise_factor", float, 0.0, "standard deviation of the noise", minimum=0),
        Parameter(
            "loss",
            str,
            "custom",
            "mean squared error, or with CANDLE's penalty on what is returned (custom)",
            choices=("mse", "custom"),
        ),
    )

    def load_data(self, reader: Reader, params: ParameterSet) -> dict[str, list[Frames]]:
        """Returns the files of both directories, mapped into memory: nothing is read yet."""
        return {role: reader.load_each(role, map_frames, "*.npy") for role in ("train", "test")}

    def preprocess(self, raw: dict[str, list[Frames]], params: ParameterSet) -> DataSet:
        """Moves each molecule to the origin, batch by batch; validates on the test frames."""
        train, test = (
            Samples(rows, rows)
            for rows in (Computed(Chained(raw[role]), centre) for role in ("train", "test"))
        )
        return DataSet(train, test, test)

    def loss(self, params: ParameterSet) -> None:
        """Returns None: the model computes its loss itself."""

    def metrics(self, params: ParameterSet) -> list[Any]:
        """Returns none: the model has its own."""
        return []

    def build_model(self, params: ParameterSet, data: DataSet) -> Any:
        """Returns the autoencoder, which has its own training step."""
        from p2b1_model import build_autoencoder

        return build_autoencoder(
            data.train.x_shape[0],
            params["molecular_num_hidden"],
            params["molecular_nonlinearity"],
            params["noise_factor"],
            PENALTY if params["loss"] == "custom" else 0.0,
        )

    def evaluate(self, trained: Trained) -> Quality:
        """Returns loss, error, r2 and correlation; saves and plots the codes of the test molecules.

        The naive predictor returns the mean molecule of the training frames.
        """
        import keras

        from candle_p1.figures import scatter_by_class

        data, num_steps = trained.data, trained.params["test_steps"]
        model, test = trained.model, data.test
        values = trained.metrics(test, num_steps)
        score = trained.score(test, RegressionScore(test.x_shape[0]), num_steps)
        naive = score.of_constant(trained.mean_target(data.train))
        encoder = keras.Model(model.inputs, model.get_layer("code").output)
        codes = trained.apply(encoder, test, num_steps)
        if codes is not None:
            np.save(trained.directory / "codes.npy", codes)
            scatter_by_class(
                trained.directory / "codes.png",
                codes[:, :2],
                lipids(test.x[: len(codes)]),
                LIPIDS,
                title=trained.title("The first two numbers of the code, by lipid"),
                axes=("code 1", "code 2"),
            )
        return compare_with_naive(values | score.result(), naive.result())


BENCHMARK = P2b1()


def map_frames(path: Path) -> Frames:
    """Returns a file's molecules: float32, shape (frames x molecules, beads, fields)."""
    frames: Frames = np.load(path, mmap_mode="r")
    if frames.ndim != 4 or frames.shape[2:] != (NUM_BEADS, NUM_FIELDS):
        raise DataError(
            f"an array of shape {frames.shape}, not (frames, molecules, {NUM_BEADS}, {NUM_FIELDS})",
            path,
        )
    return frames.reshape(-1, NUM_BEADS, NUM_FIELDS)


def centre(molecules: Frames) -> Frames:
    """Returns molecules with their centres at the origin: float32, shape (molecules, values)."""
    centred = np.array(molecules)
    centred[..., POSITION] -= centred[..., POSITION].mean(axis=1, keepdims=True)
    return centred.reshape(len(molecules), -1)


def lipids(samples: Frames) -> NDArray[np.int64]:
    """Returns the kind of each molecule: index into LIPIDS, shape (samples,)."""
    one_hot = samples.reshape(-1, NUM_BEADS, NUM_FIELDS)[:, 0, LIPID]
    kinds: NDArray[np.int64] = one_hot.argmax(axis=1)
    return kinds
