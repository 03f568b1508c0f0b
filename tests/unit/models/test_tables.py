"""A first dense layer that computes with tables does what one of their rows does."""

import subprocess
import sys

import numpy as np
import pytest

from candle_p1.benchmark import DataSet, Joined, ModelFile, Samples, Selected

keras = pytest.importorskip("keras", reason="no Keras backend is installed")

from candle_p1.models import fast  # noqa: E402
from candle_p1.models.fast.batches import taken_by  # noqa: E402
from candle_p1.models.fast.layers import L2, Dense  # noqa: E402
from candle_p1.models.fast.optimizers import SGD, Adam  # noqa: E402
from candle_p1.models.fast.tables import (  # noqa: E402
    NAME,
    count_whole,
    suits,
    table_layer,
    whole_weights,
    with_tables,
)
from candle_p1.models.saving import describe, plain_copy, save  # noqa: E402

pytestmark = pytest.mark.usefixtures("fast_kernels")
NUM_ROWS, BATCH, UNITS = 240, 20, 16
SHAPES = (7, 40), (50, 10), (5, 20)
"""Of the tables; the second has too many rows."""


@pytest.fixture(scope="module")
def rows():
    random = np.random.default_rng(0)
    tables = tuple(random.normal(size=shape).astype("float32") for shape in SHAPES)
    tables[0][:] -= tables[0].mean(axis=0)  # its rows are not independent, as those of P1B3
    indices = tuple(random.integers(len(table), size=NUM_ROWS) for table in tables)
    return Joined(random.normal(size=(NUM_ROWS, 2)).astype("float32"), indices, tables)


@pytest.fixture(scope="module")
def data(rows):
    y = np.random.default_rng(1).normal(size=(NUM_ROWS, 1)).astype("float32")
    samples = Samples(rows, y)
    return DataSet(samples, samples.first(50), Samples(Selected(rows, np.arange(9, 0, -1)), y[:9]))


def network(data, *, dense=Dense, before=(), dtype="float32", **options):
    """Returns a normalized network, the same for all calls."""
    keras.utils.set_random_seed(3)
    layers = [dense(UNITS, activation="tanh", dtype=dtype, **options)]
    layers += [keras.layers.BatchNormalization(), Dense(1)]
    return keras.Sequential([keras.Input(data.train.x_shape), *before, *layers], name="network")


def by_table(data, **options):
    whole = network(data, **options)
    return with_tables(whole, data.train.x, describe(whole))


def trained(model, data, num_steps, optimizer):
    """Trains a model; returns its losses and its whole weights."""
    model.compile(optimizer, loss="mse", jit_compile=False)
    samples = taken_by(model, data.train)
    steps = (np.arange(i * BATCH, (i + 1) * BATCH) % NUM_ROWS for i in range(num_steps))
    losses = [float(model.train_on_batch(*samples[which])) for which in steps]
    return np.array(losses), [read() for _, read in whole_weights(model)]


@pytest.mark.parametrize(
    ("options", "use_bias"),
    [({}, True), ({"momentum": 0.9}, False), ({"momentum": 0.9, "nesterov": True}, True)],
)
def test_training_is_that_of_the_rows(data, options, use_bias):
    found = [
        trained(made(data, use_bias=use_bias), data, 50, SGD(0.005, **options))
        for made in (by_table, network)
    ]
    assert fast.used().count(NAME) == 1
    (losses, weights), (of_rows, weights_of_rows) = found
    np.testing.assert_allclose(losses, of_rows, rtol=1e-4)
    before = [read() for _, read in whole_weights(network(data, use_bias=use_bias))]
    for one, other, start in zip(weights, weights_of_rows, before, strict=True):
        way = np.linalg.norm(other - start)
        assert np.linalg.norm(one - other) <= 1e-4 * way
        assert way > 1e-3


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"kernels": "plain"},
        {"on_cpu": False},
        {"dense": keras.layers.Dense},
        {"kernel_regularizer": L2(0.01)},
        {"kernel_constraint": "max_norm"},
        {"activity_regularizer": "l2"},
        {"before": [keras.layers.GaussianNoise(0.1)]},
        {"before": [keras.layers.BatchNormalization()]},
        {
            "before": [
                keras.layers.Reshape((72, 1)),
                keras.layers.Conv1D(1, 2),
                keras.layers.Flatten(),
            ]
        },
        {"dtype": "mixed_bfloat16"},
        {"optimizer": Adam()},
        {"optimizer": keras.optimizers.Lion()},
        *(
            {"optimizer": SGD(**{name: 0.5})}
            for name in ("clipnorm", "clipvalue", "global_clipnorm", "weight_decay")
        ),
        {"optimizer": SGD(use_ema=True)},
        {"compression": "fp16"},
        {"callbacks": [keras.callbacks.ModelCheckpoint("best.keras")]},
        {"frozen": True},
        {"functional": True},
        {"part": ("train", lambda each: Samples(each.x, each.x))},
        {"part": ("train", lambda each: Samples(each.x[:], each.y))},
        {"part": ("test", lambda each: Samples(np.zeros((9, 72), "f4"), each.y))},
        {"part": ("validation", lambda each: Samples(Joined(each.x[:][:, :2], *MANY), each.y))},
    ],
    ids=str,
)
def test_rows_are_multiplied_where_tables_would_not_do_the_same(data, change):
    change = dict(change)
    is_suited = not change
    fast.choose(change.pop("kernels", "fast"), on_cpu=change.pop("on_cpu", True))
    learns = (
        change.pop("optimizer", SGD()),
        change.pop("callbacks", ()),
        change.pop("compression", "none"),
    )
    parts = {name: getattr(data, name) for name in ("train", "validation", "test")}
    if "part" in change:
        name, make = change.pop("part")
        parts[name] = make(parts[name])
    frozen, functional = change.pop("frozen", False), change.pop("functional", False)
    model = network(data, **change)
    model.layers[0].trainable = not frozen
    if functional:
        model = keras.Model(model.inputs, model.outputs)
    assert suits(model, DataSet(**parts), *learns) == is_suited


MANY = tuple(np.zeros(50, int) for _ in SHAPES), tuple(np.zeros(shape, "f4") for shape in SHAPES)


def test_tables_with_many_rows_are_no_gain(data, rows):
    many = Joined(rows.own, rows.indices[1:2], rows.tables[1:2])
    samples = Samples(many, data.train.y)
    model = keras.Sequential([keras.Input((12,)), Dense(4)])
    assert not suits(model, DataSet(samples, samples, samples), SGD())


PREDICT = """
import sys, keras, numpy
numpy.save("y.npy", keras.saving.load_model("model.keras").predict_on_batch(numpy.load("x.npy")))
assert "candle_p1" not in sys.modules
"""


def test_a_saved_model_takes_whole_rows_without_this_package(data, tmp_path):
    model = by_table(data)
    trained(model, data, 30, SGD(0.01))
    predicted = model.predict_on_batch(taken_by(model, data.test)[:][0])
    x = data.test[:][0]
    np.testing.assert_allclose(plain_copy(model).predict_on_batch(x), predicted, atol=1e-6)
    first_output = ModelFile("first.keras", part=lambda whole: keras.Sequential(whole.layers[:1]))
    assert first_output.of(model).predict_on_batch(x).shape == (9, UNITS)
    save(model, tmp_path / "model.keras")
    np.save(tmp_path / "x.npy", x)
    subprocess.run([sys.executable, "-c", PREDICT], check=True, cwd=tmp_path)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), predicted, atol=1e-6)


def test_weights_are_counted_and_named_as_those_of_the_rows(data):
    whole, model = network(data), by_table(data)
    assert count_whole(model) == count_whole(whole) == whole.count_params()
    for trainable in (False, True):
        names, wanted = (
            [
                path.partition("dense")[2].lstrip("_0123456789")
                for path, _ in whole_weights(each, trainable=trainable)
            ]
            for each in (model, whole)
        )
        assert names == wanted
    values = [read() for _, read in whole_weights(model)]
    for value, weight in zip(values, whole.weights, strict=True):
        np.testing.assert_allclose(value, weight, rtol=1e-6, atol=1e-7)
    assert table_layer(whole) is None


@pytest.mark.extended
def test_ten_thousand_steps_stay_within_the_rounding_of_the_rows(data, double_precision):
    """Of weights and of outputs, by the distance from training in float64."""
    num_steps, ends = 10_000, {}
    for dtype in ("float64", "float32"):
        keras.config.set_floatx(dtype)
        try:
            for made in (network, by_table):
                model = made(data, dtype=dtype)
                model.compile(SGD(0.01, momentum=0.5), loss="mse", jit_compile=False)
                x, y = taken_by(model, data.train)[np.arange(num_steps * BATCH) % NUM_ROWS]
                model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
                outputs = model.predict(x[:NUM_ROWS], verbose=0)
                ends[dtype, made] = outputs, whole_weights(model)[0][1]()
        finally:
            keras.config.set_floatx("float32")
    exact = ends["float64", network]
    for i in range(2):
        of_rows, of_tables = (
            np.linalg.norm(ends["float32", made][i] - exact[i]) for made in (network, by_table)
        )
        assert of_tables < 2 * of_rows
        assert np.linalg.norm(ends["float64", by_table][i] - exact[i]) < of_rows / 1000
