"""NT3's noise on the training samples: wrong labels, or noise on the genes.

The kinds and their order of precedence are those of CANDLE's ``add_noise`` (candle_lib,
``noise_utils.py``). The noise depends only on the seed of the run, so it is the same on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from candle_p1.data.samples import random_stream
from candle_p1.data.transforms import change_rows
from candle_p1.errors import ParameterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from candle_p1.benchmark import Samples
    from candle_p1.parameters.parameter_set import ParameterSet

LABELS_OR_NOISE = 1
"""The key of the random stream; a run's other streams have other keys."""
NOISE_TYPES = {
    "gaussian": lambda random, scale, shape: random.normal(0, scale, shape),
    "uniform": lambda random, scale, shape: random.uniform(-scale, scale, shape),
}
"""Returns noise of a kind, for a generator, its scale (std_dev) and a shape."""


def add_noise(samples: Samples, params: ParameterSet) -> None:
    """Adds the first kind of noise that is requested to the samples, in place.

    Raises:
        ParameterError: There is no such gene or sample.
    """
    random = random_stream(params["rng_seed"], LABELS_OR_NOISE)
    if params["add_noise"] and params["label_noise"]:
        _flip_labels(samples, params, random)
    elif params["noise_gaussian"]:
        _add_to_all(samples, params)
    elif params["noise_cluster"]:  # each of sample_ids with probability label_noise
        listed = np.array(_indices("sample_ids", params, len(samples)), np.int64)
        chosen = listed[random.random(len(listed)) < params["label_noise"]]
        _add_to_genes(samples, params, chosen, random)
    elif params["noise_column"]:
        _add_to_genes(samples, params, np.arange(len(samples)), random)


def _flip_labels(samples: Samples, params: ParameterSet, random: np.random.Generator) -> None:
    """Flips one-hot labels, each with probability label_noise.

    With noise_correlated, only labels of samples whose scaled gene exceeds feature_threshold can be
    flipped; with several genes in feature_col this is done for one after the other, so that a label
    may be flipped back.
    """
    x, y = samples.x[:], samples.y[:]
    flipped = np.zeros(len(y), bool)
    genes: Sequence[int | None] = [None]
    if params["noise_correlated"]:
        genes = _indices("feature_col", params, x.shape[1])
    for gene in genes:
        chosen = random.random(len(y)) < params["label_noise"]
        if gene is not None:
            chosen &= x[:, gene, 0] > params["feature_threshold"]
        flipped ^= chosen
    y[flipped] = 1 - y[flipped]


def _add_to_all(samples: Samples, params: ParameterSet) -> None:
    """Adds Gaussian noise of standard deviation std_dev to all scaled genes."""

    def add(start: int, rows: NDArray[np.float32]) -> None:
        noise = random_stream(params["rng_seed"], LABELS_OR_NOISE, start)
        rows += params["std_dev"] * noise.standard_normal(rows.shape, np.float32)

    change_rows(samples.x[:], add)


def _add_to_genes(
    samples: Samples,
    params: ParameterSet,
    which: NDArray[np.int64],
    random: np.random.Generator,
) -> None:
    """Adds noise of noise_type and std_dev to the scaled genes feature_col of these samples."""
    genes = _indices("feature_col", params, samples.x[0:1].shape[1])
    noise = np.zeros((len(samples), len(genes)), np.float32)
    drawn = NOISE_TYPES[params["noise_type"]](random, params["std_dev"], (len(which), len(genes)))
    np.add.at(noise, which, drawn)

    def add(start: int, rows: NDArray[np.float32]) -> None:
        for column, gene in enumerate(genes):
            rows[:, gene, 0] += noise[start : start + len(rows), column]

    change_rows(samples.x[:], add)


def _indices(name: str, params: ParameterSet, number: int) -> Sequence[int]:
    """Returns the genes or samples that a parameter lists; it must list some that exist."""
    indices: list[int] = params[name] or []
    if not indices or max(indices) >= number:
        wrong = max(indices) if indices else None
        raise ParameterError(
            f"{name} {wrong} ({params.origin(name)}): choose some of 0 to {number - 1}"
        )
    return indices
