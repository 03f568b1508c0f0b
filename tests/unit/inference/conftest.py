"""A run whose network was trained, as far as predictions and evaluations need it."""

from types import SimpleNamespace

import numpy as np

from candle_p1.benchmark import find_benchmark
from candle_p1.data.inputs import Inputs

GENES = ["G0", "G1", "G2"]


def run_of(name, classes, log2=False, mean_target=None, **more):
    """Returns a run on three genes, whose values are not scaled."""
    inputs = Inputs(
        **{"benchmark": name, "features": GENES, "classes": classes, "log2": log2},
        **{"offset": np.zeros(3, np.float32), "scale": np.ones(3, np.float32)},
        **{"scaling": "none", "fitted_to": "all", "mean_target": mean_target},
    )
    params = {"batch_size": 7, "model": "ae"}
    return SimpleNamespace(benchmark=find_benchmark(name), params=params, inputs=inputs, **more)
