from __future__ import annotations

import pytest

keras = pytest.importorskip("keras", reason="no Keras backend is installed")

from candle_p1.bench import roofline  # noqa: E402
from candle_p1.bench.roofline import matrix_product_flops, optimizer_bytes, state_bytes  # noqa: E402
from candle_p1.models import fast  # noqa: E402
from candle_p1.models.fast.layers import Conv1D, Dense  # noqa: E402
from candle_p1.models.fast.optimizers import FORMS  # noqa: E402


@pytest.fixture
def model():
    layers = [keras.layers.Input((30, 1)), Conv1D(4, 5), keras.layers.Flatten(), Dense(3), Dense(2)]
    return keras.Sequential(layers)


def test_the_flops_of_a_step(model):
    positions, batch = 26, 10
    convolution = 2 * batch * positions * 5 * 4
    dense = 2 * batch * positions * 4 * 3
    last = 2 * batch * 3 * 2
    assert matrix_product_flops(model, batch) == 2 * convolution + 3 * dense + 3 * last


def test_the_bound_is_products_and_memory_traffic(model, monkeypatch):
    monkeypatch.setattr(roofline, "matmul_flops_per_s", lambda: 1e9)
    monkeypatch.setattr(roofline, "copy_bytes_per_s", lambda num_threads: 1e6 * num_threads)
    model.compile("sgd", "mse")
    bound = roofline.bound(model, 10, 2)
    assert bound["gemm_s"] == matrix_product_flops(model, 10) / 1e9
    assert bound["optimizer_s"] == optimizer_bytes(model) / 2e6
    assert bound["total_s"] == bound["gemm_s"] + bound["optimizer_s"]


@pytest.mark.parametrize(
    ("name", "options", "passes"),
    [("SGD", {}, 3), ("SGD", {"momentum": 0.9}, 5), ("RMSprop", {}, 5), ("Adam", {}, 7)],
)
def test_an_update_reads_and_writes(model, name, options, passes):
    num_bytes = 4 * model.count_params()
    for kind in ("plain", "fast"):
        fast.choose(kind, on_cpu=True)
        model.compile(FORMS[getattr(keras.optimizers, name)](**options), "mse")
        model.optimizer.build(model.trainable_variables)
        assert optimizer_bytes(model) == passes * num_bytes
        assert state_bytes(model) >= 2 * num_bytes + (passes - 3) / 2 * num_bytes
    fast.choose("plain", on_cpu=True)
