"""NT3's noise on the training samples: wrong labels, or noise on the genes.

It depends only on the seed of the run, so it is the same on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from candle_p1.data.sampling import random_stream
from candle_p1.data.transforms import change_rows
from candle_p1.errors import ParameterError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from candle_p1.benchmark import Samples
    from candle_p1.parameters.parameter_set import ParameterSet

LABELS_OR_NOISE = 1
"""The key of the random stream; a run's other streams have other keys."""


def flip_labels(samples: Samples, params: ParameterSet) -> int:
    """Flips one-hot labels in place, each with probability label_noise; returns how many.

    With noise_correlated, only the labels of samples whose scaled gene feature_col exceeds
    feature_threshold can be flipped.

    Raises:
        ParameterError: There is no such gene.
    """
    x, y = samples.x[:], samples.y[:]
    random = random_stream(params["rng_seed"], LABELS_OR_NOISE)
    chosen = random.random(len(y)) < params["label_noise"]
    if params["noise_correlated"]:
        gene, num_genes = params["feature_col"], x.shape[1]
        if gene >= num_genes:
            raise ParameterError(
                f"feature_col {gene} ({params.origin('feature_col')}): the genes are 0 to"
                f" {num_genes - 1}"
            )
        chosen &= x[:, gene, 0] > params["feature_threshold"]
    y[chosen] = 1 - y[chosen]
    return int(chosen.sum())


def add_gaussian_noise(samples: Samples, params: ParameterSet) -> None:
    """Adds Gaussian noise of standard deviation std_dev to the scaled genes, in place."""

    def add(start: int, rows: NDArray[np.float32]) -> None:
        noise = random_stream(params["rng_seed"], LABELS_OR_NOISE, start)
        rows += params["std_dev"] * noise.standard_normal(rows.shape, np.float32)

    change_rows(samples.x[:], add)
