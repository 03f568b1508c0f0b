"""Fast and plain kernels train the same network over many epochs."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest

from candle_p1.benchmark import find_benchmark
from candle_p1.models.fast import KERNELS
from candle_p1.models.fast.convolution_algorithms import Convolution
from tests.records import read_record

pytestmark = [pytest.mark.extended, pytest.mark.horovod]

NUM_GENES = 640
"""Small synthetic profiles have 60 genes, which is too few for convolutions by tiles."""
EPOCHS = 20
SEED = 2019
CLOSE = {"kernel": 1e-4, "bias": 5e-3}
"""The largest difference of an element, relative to the norm of the array, after 280 steps, each of
which rounds differently. Biases begin at 0 and remain small, so rounding counts for more."""


@pytest.fixture(scope="module")
def of_kernels(train_all, tmp_path_factory):
    """Trains NT3's published network with both kernels; returns the directory of a run."""
    benchmark = find_benchmark("nt3")
    sizes = sys.modules["nt3_synthetic"].SIZES
    directory = tmp_path_factory.mktemp("profiles")
    larger = replace(sizes["small"], num_genes=NUM_GENES, num_pathways=24, num_in_signature=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sizes, "small", larger)
        for file in benchmark.recipe.files("small", SEED):
            (directory / file.name).write_bytes(b"".join(file.blocks))
    flags = f"nt3 --data_dir {directory} --epochs {EPOCHS} --save_model True --power none"
    return train_all(1, {kind: f"{flags} --kernels {kind}" for kind in KERNELS}).joinpath


def test_fast_kernels_learn_what_plain_ones_learn(of_kernels):
    keras = pytest.importorskip("keras")
    assert Convolution(NUM_GENES - 19, 10, 128, 128, 10).choose() == "tiled"
    fast, plain = (read_record(of_kernels(kind) / "run.json") for kind in KERNELS)
    assert len(fast["training"]["epochs"]) == len(plain["training"]["epochs"]) == EPOCHS
    accuracy = fast["quality"]["accuracy"]["value"]
    assert accuracy == plain["quality"]["accuracy"]["value"] >= 0.9
    weights = [
        {weight.path: weight.numpy() for weight in model.trainable_weights}
        for model in (keras.models.load_model(of_kernels(kind) / "model.keras") for kind in KERNELS)
    ]
    apart = {
        name: float(np.abs(found - weights[1][name]).max() / np.linalg.norm(weights[1][name]))
        for name, found in weights[0].items()
    }
    print("\n".join(f"{name}: {difference:.1e}" for name, difference in apart.items()))
    assert all(difference < CLOSE[name.split("/")[-1]] for name, difference in apart.items())
    assert max(apart.values()) > 0  # they do compute in another way
