"""The four networks train as in Keras 2, on which CANDLE runs.

The reference is tf_keras, Keras 2 for this TensorFlow: the networks are written down in it as
CANDLE's scripts build them, and trained by the optimizers that CANDLE makes. Both start from the
same weights and take the same batches. Dropout and the variational models' noise are off.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from candle_p1.benchmark import find_benchmark
from candle_p1.data.samples import DataSet, Samples, Several
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.distributed.engines.serial import SerialEngine
from candle_p1.models import fast
from candle_p1.models.fast import KERNELS
from candle_p1.models.optimizers import CANDLE_OPTIMIZERS, make_optimizer
from candle_p1.training.setup import build_model, make_plan

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


# CANDLE's networks and optimizers


def candles_optimizer(name, rate):
    """As build_optimizer makes it, with keras_default_config; adamax and nadam as it would."""
    legacy, epsilon, betas = k.optimizers.legacy, 1e-8, {"beta_1": 0.9, "beta_2": 0.999}
    return {
        "sgd": lambda: legacy.SGD(rate, momentum=0.0, nesterov=False, decay=0.0),
        "rmsprop": lambda: legacy.RMSprop(rate, rho=0.9, epsilon=epsilon, decay=0.0),
        "adagrad": lambda: legacy.Adagrad(rate, epsilon=epsilon, decay=0.0),
        "adadelta": lambda: legacy.Adadelta(rate, rho=0.9, epsilon=epsilon, decay=0.0),
        "adam": lambda: legacy.Adam(rate, epsilon=epsilon, decay=0.0, **betas),
        "adamax": lambda: legacy.Adamax(rate, epsilon=epsilon, decay=0.0, **betas),
        "nadam": lambda: legacy.Nadam(rate, epsilon=epsilon, schedule_decay=0.004, **betas),
    }[name]()


def nt3(genes):
    layers = k.layers
    model = k.Sequential(
        [
            layers.Conv1D(128, 20, strides=1, padding="valid", input_shape=(genes, 1)),
            layers.Activation("relu"),
            layers.MaxPooling1D(1),
            layers.Conv1D(128, 10, strides=1, padding="valid"),
            layers.Activation("relu"),
            layers.MaxPooling1D(10),
            layers.Flatten(),
            layers.Dense(200),
            layers.Activation("relu"),
            layers.Dense(20),
            layers.Activation("relu"),
            layers.Dense(2),
            layers.Activation("softmax"),
        ]
    )
    model.compile(candles_optimizer("sgd", 0.001), "categorical_crossentropy")
    return model


def p1b1(genes, kind="ae"):
    layers = k.layers
    profile = layers.Input((genes,))
    types = [layers.Input((NUM_TYPES,))] if kind == "cvae" else []

    def join(tensor):
        return layers.concatenate([tensor, *types]) if types else tensor

    def dense(tensor, units):
        return layers.Dense(units, activation="relu")(tensor)

    hidden = dense(dense(join(profile), 2000), 600)
    if kind == "ae":
        latent = layers.Dense(2, activation="relu")(hidden)
    else:
        latent = layers.Dense(2, name="z_mean")(hidden)
        log_variance = layers.Dense(2, name="z_log_var")(hidden)
    hidden = dense(dense(join(latent), 600), 2000)
    decoded = layers.Dense(genes, activation="sigmoid")(hidden)
    optimizer = k.optimizers.deserialize(
        {"class_name": "adam", "config": {}}, use_legacy_optimizer=True
    )
    if kind == "ae":
        model = k.Model(profile, decoded)
        model.compile(optimizer, "mse")
        return model
    model = Variational([profile, *types], [decoded, latent, log_variance])
    model.compile(optimizer)
    return model


class Variational(k.Model):
    """Trains by CANDLE's loss function, which takes the latent space's tensors from outside."""

    def train_step(self, data):
        inputs, profile = data
        with tf.GradientTape() as tape:
            decoded, mean, log_variance = self(inputs, training=True)
            entropy = k.losses.binary_crossentropy(profile, decoded)
            divergence = -0.5 * tf.reduce_sum(
                1 + log_variance - tf.square(mean) - tf.exp(log_variance), axis=-1
            )
            loss = tf.reduce_mean(entropy + divergence / profile.shape[-1])
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        return {"loss": loss}


def p1b2(genes):
    layers, l2 = k.layers, k.regularizers.l2
    inputs = tensor = layers.Input((genes,))
    for units in (1024, 512, 256):
        tensor = layers.Dense(
            units,
            activation="sigmoid",
            kernel_regularizer=l2(1e-5),
            activity_regularizer=l2(1e-5),
        )(tensor)
    model = k.Model(inputs, layers.Dense(NUM_TYPES, activation="sigmoid")(tensor))
    model.compile(candles_optimizer("rmsprop", 0.001), "categorical_crossentropy")
    return model


def p1b3(inputs, kind="dense"):
    layers = k.layers
    model = k.Sequential()
    if kind in ("conv", "local"):
        model.add(layers.Reshape((inputs, 1), input_shape=(inputs,)))
        layer = layers.LocallyConnected1D if kind == "local" else layers.Conv1D
        sizes = ((10, 10, 25), (10, 5, 2)) if kind == "local" else ((10, 10, 5), (10, 10, 5))
        for filters, length, stride in sizes:
            model.add(layer(filters, length, strides=stride))
            model.add(layers.Activation("relu"))
            model.add(layers.MaxPooling1D(2 if kind == "local" else 10))
        model.add(layers.Flatten())
    else:
        for units in (1000, 500, 100, 50):
            model.add(layers.Dense(units, input_shape=(inputs,)))
            if kind == "normalized":
                model.add(layers.BatchNormalization())
            model.add(layers.Activation("relu"))
    model.add(layers.Dense(1))
    model.compile(candles_optimizer("sgd", 0.001), "mse")
    return model


# Ours


def nt3_samples(num):
    x = np.abs(normal(num, 120, 1))
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


def p1b3_samples(num, kind="dense"):
    part = Samples(normal(num, 2760), normal(num, 1))
    return of_benchmark("p1b3", "P1b3Data")(part, part, part, 100)


def of_benchmark(name, attribute):
    return getattr(sys.modules[type(find_benchmark(name)).__module__], attribute)


def ours(name, flags, data, kernels):
    """Returns the model that a run trains."""
    fast.choose(kernels, on_cpu=True)
    benchmark, comm = find_benchmark(name), SerialCommunicator()
    params = benchmark.read_parameters([*flags.split(), "--dropout", "0"])
    plan = make_plan(benchmark, params, len(data.train), comm)
    engine = SerialEngine(comm, "tensorflow")
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
    shape = data.train.x_shape if name != "p1b1" else data.train.y.shape[1:]
    return data, NETWORKS[name](shape[0], **options), models


def layers_of(model):
    """Returns the layers with weights, those of the latent space first: their order differs."""
    layers = [layer for layer in model.layers if layer.get_weights()]
    return sorted(layers, key=lambda layer: layer.name if layer.name.startswith("z_") else "~")


def weights_of(model):
    return [weight for layer in layers_of(model) for weight in layer.get_weights()]


def assert_trains_alike(reference, models, data, batch_size, weight_tolerance=TOLERANCE):
    """Asserts that models train as the reference does, when they start from the first's weights."""
    initial = [layer.get_weights() for layer in layers_of(models[0])]
    for model in (reference, *models):
        for layer, weights in zip(layers_of(model), initial, strict=True):
            layer.set_weights(weights)
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


CASES = {
    "nt3": ("nt3", "", {}),
    "p1b1": ("p1b1", "", {}),
    "p1b1 f64": ("p1b1", "--data_type f64", {}),
    "p1b1 vae": ("p1b1", "--model vae --epsilon_std 0", {"kind": "vae"}),
    "p1b1 cvae": ("p1b1", "--model cvae --epsilon_std 0", {"kind": "cvae"}),
    "p1b1 vae f64": ("p1b1", "--model vae --epsilon_std 0 --data_type f64", {"kind": "vae"}),
    "p1b1 cvae f64": ("p1b1", "--model cvae --epsilon_std 0 --data_type f64", {"kind": "cvae"}),
    "p1b2": ("p1b2", "", {}),
    "p1b3": ("p1b3", "", {}),
    "p1b3 normalized": ("p1b3", "--batch_normalization True", {"kind": "normalized"}),
    "p1b3 conv": ("p1b3", "--config_file p1b3_conv_model.txt", {"kind": "conv"}),
    "p1b3 local": (
        "p1b3",
        "--config_file p1b3_conv_model.txt --conv 10 10 25 10 5 2 --pool 2"
        " --locally_connected True",
        {"kind": "local"},
    ),
}
SAMPLES = {"nt3": nt3_samples, "p1b1": p1b1_samples, "p1b2": p1b2_samples, "p1b3": p1b3_samples}
NETWORKS = {"nt3": nt3, "p1b1": p1b1, "p1b2": p1b2, "p1b3": p1b3}
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
    data, reference, models = models_of(name, flags, kernels=KERNELS, **options)
    assert_trains_alike(reference, models, data, BATCH_SIZES[name], tolerance)


@pytest.mark.parametrize("kernels", KERNELS)
def test_p1b2_does_not_with_the_rmsprop_of_keras_3(kernels):
    flags = "--optimizer_formula keras3"
    data, reference, models = models_of("p1b2", flags, kernels=[kernels])
    with pytest.raises(AssertionError, match="rtol=1e-05"):
        assert_trains_alike(reference, models, data, BATCH_SIZES["p1b2"])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", CANDLE_OPTIMIZERS)
def test_an_optimizer_moves_a_variable_as_in_candle(name, kernels):
    """The gradients are between 1e-6 and 1."""
    fast.choose(kernels, on_cpu=True)
    gradients = normal(STEPS, 50, 7) * 10.0 ** np.arange(-6, 1, dtype="float32")
    wanted = tf.Variable(np.zeros((50, 7), "float32"))
    found = keras.Variable(np.zeros((50, 7)), dtype="float32")
    reference = candles_optimizer(name, 0.001)
    params = find_benchmark("nt3").read_parameters(["--optimizer", name])
    optimizer = make_optimizer(params, 0.001)
    for gradient in map(tf.constant, gradients):
        reference.apply_gradients([(gradient, wanted)])
        optimizer.apply([gradient], [found])
    differences = np.linalg.norm(found.numpy() - wanted.numpy(), axis=0)
    assert (differences <= TOLERANCE * np.linalg.norm(wanted.numpy(), axis=0)).all()
