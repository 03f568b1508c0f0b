"""The models, built at full width, compared with what CANDLE's code builds."""

import sys

import numpy as np
import pytest

from candle_p1.benchmark import DataSet, Samples, find_benchmark
from candle_p1.errors import ParameterError

keras = pytest.importorskip("keras", reason="no Keras backend is installed")

NUM_TYPES = 33
"""Cancer types of P1B1; only the conditional model depends on their number."""


def rows(*shape):
    """Samples with a shape, which take no memory."""
    return np.broadcast_to(np.float32(0), (2, *shape))


def full_width(benchmark):
    module = sys.modules[type(benchmark).__module__]
    types = {"types": ["x"] * NUM_TYPES, "test_types": np.zeros(2, np.int64)}
    x, y, extra = {
        "nt3": (rows(60_483, 1), rows(2), {}),
        "p1b1": (rows(60_483), rows(60_483), types),
        "p1b2": (rows(28_204), rows(10), {"types": ["x"] * 10}),
        "p1b3": (rows(29_532), rows(1), {"num_line_features": 25_722}),
    }[benchmark.name]
    samples = Samples(x, y)
    kind = getattr(module, f"P{benchmark.name[1:]}Data", DataSet)
    return kind(samples, samples, samples, **extra)


def build(name, *flags):
    benchmark = find_benchmark(name)
    return benchmark.build_model(benchmark.read_parameters(flags), full_width(benchmark))


@pytest.fixture(autouse=True)
def without_weights(monkeypatch):
    """Makes all weights zero, because drawing hundreds of millions of random numbers is slow."""
    for initializer in (keras.initializers.GlorotUniform, keras.initializers.RandomNormal):
        monkeypatch.setattr(initializer, "__call__", keras.initializers.Zeros.__call__)
    yield
    keras.backend.clear_session()


def autoencoder(condition):
    """Parameters of P1B1's variational autoencoder, which has two latent layers."""
    encoder = (60_483 + condition + 1) * 4 + 5 * 3 + 2 * (4 * 2)
    return encoder + (2 + condition + 1) * 3 + 4 * 4 + 5 * 60_483


VARIATIONAL = "--dense 4 3 --latent_dim 2 --model"
POOLED = ((29_532 - 10) // 5 + 1) // 10
CONVOLUTIONAL = (10 * 10 + 10) + (10 * 10 * 10 + 10) + ((POOLED - 10) // 5 + 1) // 10 * 10 + 1
"""Those of P1B3's two convolutions and linear unit."""
LOCAL = "--locally_connected True --conv 4 20 1000 --pool 10 --dense 2"
POSITIONS = (60_483 - 20) // 1000 + 1


@pytest.mark.parametrize(
    ("name", "flags", "num_parameters"),
    [
        ("nt3", "", 154_922_918),
        ("p1b1", "", 244_400_085),
        ("p1b2", "", 29_540_618),
        ("p1b3", "", 30_088_701),
        ("p1b1", f"{VARIATIONAL} vae", autoencoder(0)),
        ("p1b1", f"{VARIATIONAL} cvae", autoencoder(NUM_TYPES)),
        ("p1b3", "--config_file p1b3_conv_model.txt", CONVOLUTIONAL),
        ("nt3", LOCAL, POSITIONS * (20 * 4 + 4) + (POSITIONS // 10 * 4 + 1) * 2 + 3 * 2),
    ],
)
def test_networks_have_their_numbers_of_parameters(name, flags, num_parameters):
    assert build(name, *flags.split()).count_params() == num_parameters


@pytest.mark.parametrize(("model", "names"), [("ae", []), ("vae", ["mse"]), ("cvae", ["mse"])])
@pytest.mark.parametrize("further", ["mae", "mse"])
def test_p1b1_has_candles_metrics_and_a_further_one_once(model, names, further):
    p1b1 = find_benchmark("p1b1")
    params = p1b1.read_parameters(["--model", model])
    found = [metric.name for metric in p1b1.metrics(params)]
    assert found == ["xent", "corr", *names]
    more = p1b1.metrics(params.replace({"metrics": further}))
    with_further = dict.fromkeys([*found, further])
    assert [getattr(metric, "name", metric) for metric in more] == list(with_further)


@pytest.mark.parametrize(
    ("name", "flags", "settings"),
    [
        ("nt3", [], {"factor": 0.1, "patience": 10, "min_lr": 0, "monitor": "val_loss"}),
        ("p1b1", ["--reduce_lr", "True"], {"factor": 0.5, "patience": 5, "min_lr": 1e-5}),
    ],
)
def test_the_learning_rate_is_reduced_as_in_candle(name, flags, settings):
    benchmark = find_benchmark(name)
    (reduce,) = benchmark.callbacks(benchmark.read_parameters(flags))
    assert {key: getattr(reduce, key) for key in settings} == settings
    off = benchmark.read_parameters(["--reduce_lr", "False"])
    assert benchmark.callbacks(off) == []


def test_p1b3_initializes_its_hidden_dense_layers_as_requested():
    for flags, first, hidden in (
        ("", [], "RandomNormal"),
        ("--conv 10 10 5 --pool 100", ["GlorotUniform"], "RandomNormal"),
        ("--conv 2 10 100 --initialization he_normal", ["GlorotUniform"], "HeNormal"),
        ("--initialization constant", [], "Zeros"),
        ("--conv 2 10 100 --locally_connected True", ["GlorotUniform"], "RandomNormal"),
    ):
        model = build("p1b3", "--dense", "4", "3", *flags.split())
        made = [layer.kernel_initializer for layer in model.layers if hasattr(layer, "kernel")]
        expected = [*first, hidden, hidden, "GlorotUniform"]
        assert [type(each).__name__ for each in made] == expected
        assert {each.stddev for each in made if hasattr(each, "stddev")} <= {0.05}


@pytest.mark.parametrize(
    ("flags", "values"),
    [
        (["--locally_connected", "True"], r"convolution 2 .* would have 9,904,947,200"),
        (["--conv", "4", "20"], r"conv \[4, 20\] .*flag"),
        (["--pool", "1", "2", "3"], r"pool \[1, 2, 3\] .*flag"),
        (["--conv", "4", "60484", "1", "--pool", "1"], r"conv \[4, 60484, 1\] and pool \[1\]"),
    ],
)
def test_convolutions_that_do_not_match_are_an_error(flags, values):
    with pytest.raises(ParameterError, match=values):
        build("nt3", *flags)
