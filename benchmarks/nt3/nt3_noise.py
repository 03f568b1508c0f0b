"""NT3's noise on the training samples: wrong labels, or noise on the genes.

The same samples on every rank: what is drawn follows from the run's seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from candle_p1.errors import ParameterError

if TYPE_CHECKING:
    from candle_p1.benchmark import Samples
    from candle_p1.params import ParameterSet

ROWS_PER_BLOCK = 64


def turn_over_labels(samples: Samples, params: ParameterSet) -> int:
    """Turns over labels in place, each with probability label_noise; returns how many.

    What is turned over is the one-hot label, 0 for 1 and 1 for 0. With noise_correlated only
    samples take part whose gene feature_col, after scaling, exceeds feature_threshold.

    Raises:
        ParameterError: There is no such gene.
    """
    x, y = samples.x[:], samples.y[:]
    chosen = _random(params).random(len(y)) < params["label_noise"]
    if params["noise_correlated"]:
        gene, num_genes = params["feature_col"], x.shape[1]
        if gene >= num_genes:
            raise ParameterError(
                f"feature_col {gene} ({params.origin('feature_col')}): there are genes 0 to"
                f" {num_genes - 1}"
            )
        chosen &= x[:, gene, 0] > params["feature_threshold"]
    y[chosen] = 1 - y[chosen]
    return int(chosen.sum())


def add_gaussian_noise(samples: Samples, params: ParameterSet) -> None:
    """Adds noise of standard deviation std_dev to the scaled genes, in place."""
    x, random = samples.x[:], _random(params)
    for start in range(0, len(x), ROWS_PER_BLOCK):
        block = x[start : start + ROWS_PER_BLOCK]
        block += params["std_dev"] * random.standard_normal(block.shape, np.float32)


def _random(params: ParameterSet) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(params["rng_seed"], spawn_key=(1,)))
