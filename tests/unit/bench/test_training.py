import pytest

keras = pytest.importorskip("keras", reason="no Keras backend is installed")

from candle_p1.bench import training  # noqa: E402
from candle_p1.bench.training import optimizer_bytes, state_bytes  # noqa: E402
from candle_p1.models import fast  # noqa: E402
from candle_p1.models.fast.layers import Conv1D, Dense  # noqa: E402
from candle_p1.models.fast.optimizers import FORMS  # noqa: E402

BATCH = 20


@pytest.fixture
def model():
    flatten = keras.layers.Flatten()
    layers = [keras.layers.Input((30, 1)), Conv1D(4, 5), flatten, Dense(3), Dense(2)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    return model


def test_the_bound_is_products_and_memory_traffic(model, monkeypatch):
    positions = 26
    flops = [positions * 5 * 4, positions * 4 * 3, 3 * 2]
    expected = 2 * BATCH * (2 * flops[0] + 3 * flops[1] + 3 * flops[2])
    assert training.matrix_product_flops(model, BATCH) == expected
    monkeypatch.setattr(training, "matmul_flops_per_s", lambda: 1e9)
    monkeypatch.setattr(training, "copy_bytes_per_s", lambda num_threads: 1e6 * num_threads)
    bound = training.bound(model, BATCH, 2)
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
