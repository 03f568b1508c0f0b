"""The four networks train as in Keras 2, on which CANDLE runs: as tf_keras, for this TensorFlow.

Both start from the same weights and take the same batches, without dropout and without the
variational models' noise. `Benchmark.keras2_model` has the networks as CANDLE's scripts build them.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from candle_p1.benchmark import find_benchmark
from candle_p1.data.samples import DataSet, Samples, Several
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.distributed.engine import Engine
from candle_p1.models import fast, keras2
from candle_p1.models.fast import KERNELS
from candle_p1.models.fast.convolution_algorithms import Convolution
from candle_p1.models.optimizers import CANDLE_OPTIMIZERS, make_optimizer
from candle_p1.training.setup import build_model, make_plan
from tests.conftest import CANDLE_P1

k = pytest.importorskip("tf_keras", reason="needs tf_keras: `make test-keras2`")

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

pytestmark = pytest.mark.extended

STEPS = 20
TOLERANCE = 1e-5
NUM_TYPES = 10
random = np.random.default_rng(2018)


def normal(num, *shape):
    return random.normal(size=(num, *shape)).astype("float32")


def one_hot(num, num_classes):
    return np.eye(num_classes, dtype="float32")[random.integers(num_classes, size=num)]


def nt3_samples(num, num_genes=120):
    x = np.abs(normal(num, num_genes, 1))
    return DataSet(*[Samples(x / x.max(), one_hot(num, 2))] * 3)


def p1b1_samples(num, kind="ae"):
    x = random.random((num, 400), dtype="float32")
    inputs = Several((x, one_hot(num, NUM_TYPES))) if kind == "cvae" else x
    part = Samples(inputs, x)
    return of_benchmark("p1b1", "P1b1Data")(part, part, part, ["?"] * NUM_TYPES, np.zeros(1))


def p1b2_samples(num):
    x = (random.random((num, 3000)) < 0.02).astype("float32")  # as rare as mutations are
    part = Samples(x, one_hot(num, NUM_TYPES))
    return of_benchmark("p1b2", "P1b2Data")(part, part, part, ["?"] * NUM_TYPES)


def p1b3_samples(num):
    part = Samples(normal(num, 2760), normal(num, 1))
    return of_benchmark("p1b3", "P1b3Data")(part, part, part, 100)


def of_benchmark(name, attribute):
    return getattr(sys.modules[type(find_benchmark(name)).__module__], attribute)


def planned(name, flags, data):
    """Returns a benchmark, its parameters without dropout, and the plan of a run."""
    benchmark = find_benchmark(name)
    params = benchmark.read_parameters([*flags.split(), "--dropout", "0"])
    return benchmark, params, make_plan(benchmark, params, len(data.train), SerialCommunicator())


def ours(name, flags, data, kernels):
    """Returns the model that a run trains."""
    fast.choose(kernels, on_cpu=True)
    benchmark, params, plan = planned(name, flags, data)
    comm = SerialCommunicator()
    engine = Engine("serial", comm, "tensorflow")
    model = build_model(benchmark, params, data, plan, SimpleNamespace(is_gpu=False), engine)
    if keras.config.floatx() == "float64":
        # Keras 2 keeps the settings of an optimizer in float32.
        for setting in ("learning_rate", "beta_1", "beta_2"):
            value = float(getattr(model.optimizer, setting))
            setattr(model.optimizer, setting, float(np.float32(value)))
    return model


@pytest.fixture(autouse=True)
def nothing_stays_chosen():
    yield
    fast.choose("plain", on_cpu=True)
    for each in (keras.config, k.backend):
        each.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def models_of(name, *flags, kernels, **options):
    """Returns data for all steps, CANDLE's network for it, and the models that runs train."""
    data = SAMPLES[name](STEPS * BATCH_SIZES[name], **options)
    # First those of Keras 3, which then clears what it knows of other models.
    models = [ours(name, " ".join(flags), data, kind) for kind in kernels]
    benchmark, params, plan = planned(name, " ".join(flags), data)
    reference = benchmark.keras2_model(keras2.load(), params, data, plan.learning_rate)
    return data, reference, models


def weights_of(model):
    return [weight for layer in keras2.weights_of(model) for weight in layer]


def assert_trains_alike(reference, models, data, batch_size, weight_tolerance=TOLERANCE):
    """Asserts that models train as the reference does, when they start from the first's weights."""
    initial = keras2.weights_of(models[0])
    for model in (reference, *models):
        keras2.set_weights(model, initial)
    starts = weights_of(models[0])
    batches = [
        (data.train.x[i : i + batch_size], data.train.y[i : i + batch_size])
        for i in range(0, STEPS * batch_size, batch_size)
    ]
    expected = [reference.train_on_batch(*batch, return_dict=True)["loss"] for batch in batches]
    ends = weights_of(reference)
    assert any((end != start).any() for end, start in zip(ends, starts, strict=True))
    for model in models:
        losses = []
        for batch in batches:
            model.reset_metrics()
            losses.append(model.train_on_batch(*batch, return_dict=True)["loss"])
        np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)
        found, wanted = (
            np.concatenate([weight.ravel() for weight in weights])
            for weights in (weights_of(model), ends)
        )
        assert np.linalg.norm(found - wanted) <= weight_tolerance * np.linalg.norm(wanted)


CONVOLUTIONS, LOCALLY = "--config_file p1b3_conv_model.txt", "--pool 2 --locally_connected True"
CASES = {
    "nt3": ("nt3", "", {}),
    "nt3 by tiles": ("nt3", "--conv 32 20 1 32 10 1", {"num_genes": 320}),
    "p1b1": ("p1b1", "", {}),
    "p1b1 f64": ("p1b1", "--data_type f64", {}),
    "p1b1 vae f64": ("p1b1", "--model vae --epsilon_std 0 --data_type f64", {"kind": "vae"}),
    "p1b1 cvae f64": ("p1b1", "--model cvae --epsilon_std 0 --data_type f64", {"kind": "cvae"}),
    "p1b2": ("p1b2", "", {}),
    "p1b3": ("p1b3", "", {}),
    "p1b3 normalized": ("p1b3", "--batch_normalization True", {}),
    "p1b3 conv": ("p1b3", CONVOLUTIONS, {}),
    "p1b3 local": ("p1b3", f"{CONVOLUTIONS} --conv 10 10 25 10 5 2 {LOCALLY}", {}),
}
SAMPLES = {"nt3": nt3_samples, "p1b1": p1b1_samples, "p1b2": p1b2_samples, "p1b3": p1b3_samples}
BATCH_SIZES = {"nt3": 20, "p1b1": 100, "p1b2": 60, "p1b3": 100}


@pytest.mark.parametrize("case", CASES)
def test_a_network_trains_as_in_candle(case):
    name, flags, options = CASES[case]
    keras.config.set_floatx("float64" if "f64" in flags else "float32")
    keras.config.set_dtype_policy(keras.config.floatx())
    k.backend.set_floatx(keras.config.floatx())
    # In float32, many gradients of autoencoders are rounding errors, and Adam's steps have the same
    # size for those: only losses are compared.
    tolerance = np.inf if name == "p1b1" and "f64" not in flags else TOLERANCE
    kernels = ["fast"] if flags else KERNELS  # unit tests compare them with each other
    data, reference, models = models_of(name, flags, kernels=kernels, **options)
    if case == "nt3 by tiles":
        assert Convolution(320 - 19, 10, 32, 32, 10).choose() == "tiled"
    assert_trains_alike(reference, models, data, BATCH_SIZES[name], tolerance)


def test_p1b2_does_not_with_the_rmsprop_of_keras_3():
    data, *models = models_of("p1b2", "--optimizer_formula keras3", kernels=["fast"])
    with pytest.raises(AssertionError, match="rtol=1e-05"):
        assert_trains_alike(*models, data, BATCH_SIZES["p1b2"])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", CANDLE_OPTIMIZERS)
def test_an_optimizer_moves_a_variable_as_in_candle(name, kernels):
    """The gradients are between 1e-6 and 1."""
    fast.choose(kernels, on_cpu=True)
    gradients = normal(STEPS, 50, 7) * 10.0 ** np.arange(-6, 1, dtype="float32")
    wanted = tf.Variable(np.zeros((50, 7), "float32"))
    found = keras.Variable(np.zeros((50, 7)), dtype="float32")
    params = find_benchmark("nt3").read_parameters(["--optimizer", name])
    reference = keras2.candles_optimizer(k, params, 0.001)
    optimizer = make_optimizer(params, 0.001)
    for gradient in map(tf.constant, gradients):
        reference.apply_gradients([(gradient, wanted)])
        optimizer.apply([gradient], [found])
    differences = np.linalg.norm(found.numpy() - wanted.numpy(), axis=0)
    assert (differences <= TOLERANCE * np.linalg.norm(wanted.numpy(), axis=0)).all()


def test_keras_2_is_a_peer_in_the_comparison_of_steps(succeed, tmp_path):
    """NT3 has dropout, so its losses are compared by further jobs."""
    directory = str(Path(k.__file__).parents[1])
    argv = ["bench", "step", "nt3", "--keras2", directory, "--steps", "2", "--rounds", "1"]
    argv += ["--by_weight", "--json", "step.json", "--", "--conv", "8", "20", "1", "8", "10", "1"]
    output = succeed([*CANDLE_P1, *argv])
    report = json.loads((tmp_path / "step.json").read_text())
    result = report["results"][-1]
    assert result["variant"] == "Keras 2"
    assert result["backend"].startswith(f"tf_keras {k.__version__}, tensorflow ")
    assert result["peak_bytes"] > result["state_bytes"]
    # Counters differ, and so do the states of metrics.
    assert result["state_bytes"] == pytest.approx(report["results"][0]["state_bytes"], rel=1e-3)
    found = report["differences"]["Keras 2"]
    assert found["loss"] < 1e-5
    assert all(each["value"] < 1e-4 for each in found["weights"])
    assert len(found["weights"]) == len(report["differences"]["plain Keras"]["weights"])
    assert "without --dropout 0.1" in output
