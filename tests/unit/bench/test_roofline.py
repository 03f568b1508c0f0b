from __future__ import annotations

import pytest

keras = pytest.importorskip("keras", reason="no Keras backend is installed")

from candle_p1.bench import roofline  # noqa: E402
from candle_p1.bench.roofline import (  # noqa: E402
    batch_s,
    compare_prediction,
    dense_products_s,
    matrix_product_flops,
    optimizer_bytes,
    predict,
    state_bytes,
)
from candle_p1.models import fast  # noqa: E402
from candle_p1.models.fast.convolution_costs import (  # noqa: E402
    FACTORS,
    Convolution,
    Rates,
    seconds,
)
from candle_p1.models.fast.layers import Conv1D, Dense, MaxPooling1D  # noqa: E402
from candle_p1.models.fast.optimizers import FORMS  # noqa: E402

RATES = Rates(100e9, 10e9)
BATCH = 20


def model_of(*layers, shape=(600, 1)):
    model = keras.Sequential([keras.layers.Input(shape), *layers, keras.layers.Flatten(), Dense(2)])
    model.compile("sgd", "mse")
    return model


def predicted(model, *, is_fast=True):
    return predict(model, BATCH, RATES, is_fast=is_fast, dense_s=0.125)


@pytest.fixture
def model():
    return model_of(Conv1D(4, 5), keras.layers.Flatten(), Dense(3), shape=(30, 1))


def test_the_bound_is_products_and_memory_traffic(model, monkeypatch):
    positions = 26
    flops = [positions * 5 * 4, positions * 4 * 3, 3 * 2]
    expected = 2 * BATCH * (2 * flops[0] + 3 * flops[1] + 3 * flops[2])
    assert matrix_product_flops(model, BATCH) == expected
    monkeypatch.setattr(roofline, "matmul_flops_per_s", lambda: 1e9)
    monkeypatch.setattr(roofline, "copy_bytes_per_s", lambda num_threads: 1e6 * num_threads)
    bound = roofline.bound(model, BATCH, 2)
    assert bound["gemm_s"] == expected / 1e9
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


PAIR = [Conv1D(128, 20, activation="relu"), MaxPooling1D(1)]
TILED = Convolution(6000, 10, 128, 128, 10, BATCH, first_taps=20)


@pytest.mark.parametrize(
    ("filters", "before", "length", "of", "algorithm"),
    [
        (10, [], 600, Convolution(600, 10, 1, 10, 10, BATCH), "direct"),
        (128, PAIR, 6000, TILED, "tiled"),  # which take the convolution before them over
    ],
)
def test_a_convolution_is_predicted_with_its_pooling(filters, before, length, of, algorithm):
    layers = [*before, Conv1D(filters, 10, activation="relu", name="c"), MaxPooling1D(10)]
    model = model_of(*layers, shape=(length, 1))
    for is_fast, name in ((True, algorithm), (False, "plain")):
        found = predicted(model, is_fast=is_fast)
        assert found["algorithms"] == {"c": name}
        assert found["convolutions_s"] == pytest.approx(seconds(name, of, RATES, FACTORS))


def test_the_rest_is_counted():
    model = model_of(Dense(50), keras.layers.Activation("relu"), shape=(400,))
    found = predicted(model)
    assert found["dense_s"] == 0.125
    num_weights = 400 * 50 + 50 + 50 * 2 + 2
    assert found["optimizer_s"] == pytest.approx(3 * 4 * num_weights / 10e9)
    plain = predicted(model, is_fast=False)
    assert plain["optimizer_s"] == pytest.approx(5 * 4 * num_weights / 10e9)
    assert found["other_layers_s"] == pytest.approx(4 * 4 * BATCH * 50 / 10e9)
    assert found["batches_s"] == pytest.approx(4 * 4 * BATCH * 400 / 10e9)
    made = predict(model, BATCH, RATES, is_fast=True, dense_s=0.125, batches_s=0.25)
    assert made["batches_s"] == 0.25
    assert made["total_s"] - found["total_s"] == pytest.approx(0.25 - found["batches_s"])
    parts = [value for name, value in found.items() if name not in ("total_s", "algorithms")]
    assert found["total_s"] == pytest.approx(sum(parts))


def test_the_products_of_dense_layers_are_timed_alone(monkeypatch):
    model = model_of(Dense(50), keras.layers.Activation("relu"), shape=(400,))
    of_first = [(BATCH, 400, 50), (400, BATCH, 50)]
    of_last = [(BATCH, 50, 2), (50, BATCH, 2), (BATCH, 2, 50)]
    calls = []
    matmul = keras.ops.matmul
    monkeypatch.setattr(
        keras.ops, "matmul", lambda a, b: calls.append((*a.shape, b.shape[1])) or matmul(a, b)
    )
    assert dense_products_s(model, BATCH) > 0
    assert list(dict.fromkeys(calls)) == of_first + of_last


def test_making_batches_is_timed_from_the_first_one_on(monkeypatch):
    now = iter([10.0, 12.0])
    monkeypatch.setattr(roofline.time, "perf_counter", lambda: next(now))
    assert batch_s(range(5)) == pytest.approx(0.5)
    monkeypatch.undo()
    assert batch_s([1]) == 0


def test_what_is_not_counted_is_not_predicted():
    inputs = keras.layers.Input((600, 1))
    branches = keras.Model(inputs, Dense(1)(inputs))
    assert predicted(branches) is None
    assert predicted(model_of(Conv1D(4, 5, strides=2))) is None
    assert predicted(model_of(keras.layers.DepthwiseConv1D(5))) is None
    model = model_of(Dense(3), shape=(9,))
    model.compile("adagrad", "mse")
    assert predicted(model, is_fast=False) is None


def test_a_prediction_stands_beside_the_measurement():
    rounds = [
        {"candle_p1": {"total_s": 1.2}, "plain Keras": {"total_s": 4.0}},
        {"candle_p1": {"total_s": 1.5}, "plain Keras": {"total_s": 3.0}},
    ]
    found = compare_prediction({"candle_p1": 1.0, "plain Keras": 2.0, "Keras 2": 9.0}, rounds)
    assert found["steps"]["candle_p1"]["deviation"] == pytest.approx(0.2)
    assert found["steps"]["plain Keras"]["deviation"] == pytest.approx(0.5)
    assert found["speedup"] == {
        "predicted": pytest.approx(2.5),
        "measured": pytest.approx(2.0),
        "deviation": pytest.approx(0.25),
    }
    assert compare_prediction({"candle_p1": 1.0}, rounds) is None
    assert compare_prediction({"candle_p1": 1.0, "plain Keras": 2.0}, [{}, {}]) is None
