"""A first dense layer that takes sparse tensors does what one of dense inputs does."""

import subprocess
import sys

import numpy as np
import pytest

from candle_p1.benchmark import DataSet, ModelFile, Samples, Selected
from candle_p1.data.samples import Sparse
from candle_p1.distributed.comm import SerialCommunicator

keras = pytest.importorskip("keras", reason="no Keras backend is installed")
tf = pytest.importorskip("tensorflow")

from candle_p1 import ops  # noqa: E402
from candle_p1.bench.training import matrix_product_flops, optimizer_bytes  # noqa: E402
from candle_p1.distributed.callbacks import evaluate_shared  # noqa: E402
from candle_p1.distributed.reducers.reducer import Reducer, SerialReducer  # noqa: E402
from candle_p1.models import fast  # noqa: E402
from candle_p1.models.fast import sparse  # noqa: E402
from candle_p1.models.fast.batches import for_fit, stream, taken_by  # noqa: E402
from candle_p1.models.fast.layers import L2, Dense  # noqa: E402
from candle_p1.models.fast.optimizers import SGD, Adam, Keras2RMSprop, RMSprop  # noqa: E402
from candle_p1.models.saving import describe, plain_copy, save  # noqa: E402
from candle_p1.ops.updates import Factors, Update, update  # noqa: E402

pytestmark = pytest.mark.usefixtures("fast_kernels")
NUM_ROWS, WIDTH, UNITS, BATCH = 240, 300, 500, 20
SERIAL = SerialReducer(SerialCommunicator())
LIMITS = {"loss": 1e-4, "way": 1e-3}


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    monkeypatch.setattr(sparse, "MIN_WEIGHTS", 1)
    monkeypatch.setattr(ops, "num_threads", lambda: 3)  # 150,000 weights are enough for two


def matrix(density=0.03, width=WIDTH):
    random = np.random.default_rng(0)
    chosen = random.random((NUM_ROWS, width)) < density
    chosen[7] = chosen[:, 5] = False
    return (chosen * random.normal(size=chosen.shape)).astype("float32")


def samples_of(x):
    y = np.eye(4, dtype="float32")[np.random.default_rng(1).integers(4, size=NUM_ROWS)]
    train = Samples(Selected(x, np.arange(NUM_ROWS)[::-1]), y)
    return DataSet(train, train.first(50), Samples(x, y))


@pytest.fixture
def data():
    return samples_of(matrix())


def network(data, *, dense=Dense, dtype="float32", before=(), **options):
    """Returns a network, the same for all calls."""
    keras.utils.set_random_seed(3)
    options = {"kernel_regularizer": L2(1e-3)} | options
    layers = [dense(UNITS, activation="sigmoid", dtype=dtype, **options), Dense(4, "softmax")]
    return keras.Sequential([keras.Input(data.train.x_shape), *before, *layers], name="network")


def by_values(data, **options):
    return sparse.with_sparse_inputs(network(data, **options), data, BATCH)


def trained(model, data, num_steps, optimizer):
    """Trains a model; returns its losses and its weights."""
    model.compile(optimizer, loss="categorical_crossentropy", jit_compile=False)
    samples = taken_by(model, data.train)
    steps = (np.arange(i * BATCH, (i + 1) * BATCH) % NUM_ROWS for i in range(num_steps))
    losses = [float(model.train_on_batch(*samples[which])) for which in steps]
    return losses, [np.array(each) for each in model.weights]


def in_plain_keras(data, num_steps, optimizer, **options):
    fast.choose("plain", on_cpu=True)
    model = network(data, dense=keras.layers.Dense, **options)
    return model, *trained(model, data, num_steps, optimizer)


@pytest.mark.parametrize(
    ("optimizer", "plain", "num_steps", "penalty"),
    [
        (RMSprop(1e-3), keras.optimizers.RMSprop(1e-3), 200, 1e-3),
        (Keras2RMSprop(1e-3, epsilon=1e-8), None, 40, 1e-3),
        (RMSprop(1e-3), keras.optimizers.RMSprop(1e-3), 40, None),
        (SGD(0.01), keras.optimizers.SGD(0.01), 40, 1e-3),
        (SGD(0.01, momentum=0.9), keras.optimizers.SGD(0.01, momentum=0.9), 40, 1e-3),
        (Adam(1e-3), keras.optimizers.Adam(1e-3), 40, 1e-3),
    ],
    ids=lambda each: getattr(each, "name", str(each)),
)
def test_training_is_that_of_dense_inputs(data, optimizer, plain, num_steps, penalty):
    options = {"kernel_regularizer": L2(penalty) if penalty else None}
    before = [np.array(each) for each in network(data, **options).weights]
    plain = plain or type(optimizer).from_config(optimizer.get_config())
    _, losses, weights = in_plain_keras(data, num_steps, plain, **options)
    fast.choose("fast", on_cpu=True)
    found, found_weights = trained(by_values(data, **options), data, num_steps, optimizer)
    assert "SparseDense" in fast.used()
    np.testing.assert_allclose(found, losses, rtol=LIMITS["loss"])
    for one, other, start in zip(found_weights, weights, before, strict=True):
        way = np.linalg.norm(other - start)
        assert np.linalg.norm(one - other) <= LIMITS["way"] * way
        assert way > 1e-3


@pytest.mark.parametrize(
    ("change", "is_suited"),
    [
        ({}, True),
        *(({"optimizer": each}, True) for each in (Adam(), SGD(momentum=0.5), Keras2RMSprop())),
    ]
    + [
        (each, False)
        for each in (
            {"kernels": "plain"},
            {"on_cpu": False},
            {"dense": keras.layers.Dense},
            {"use_bias": False},
            {"kernel_regularizer": keras.regularizers.L2(0.1)},
            {"kernel_regularizer": keras.regularizers.L1(0.1)},
            {"kernel_constraint": "max_norm"},
            {"activity_regularizer": "l2"},
            {"before": [keras.layers.GaussianNoise(0.1)]},
            {"dtype": "mixed_bfloat16"},
            {"dtype": "float64"},
            {"least": WIDTH * UNITS + 1},
            {"optimizer": keras.optimizers.RMSprop()},
            {"optimizer": RMSprop(centered=True)},
            {"optimizer": RMSprop(momentum=0.5)},
            {"optimizer": Adam(amsgrad=True)},
            {"optimizer": SGD(momentum=0.5, nesterov=True)},
            {"optimizer": RMSprop(gradient_accumulation_steps=2)},
            *(
                {"optimizer": RMSprop(**{name: 0.5})}
                for name in ("clipnorm", "clipvalue", "global_clipnorm", "weight_decay")
            ),
            {"optimizer": RMSprop(use_ema=True)},
            {"reducer": None},
            {"reducer": Reducer},
            {"callbacks": [keras.callbacks.ModelCheckpoint("best.keras")]},
            {"frozen": True},
            {"target": True},
            {"x": matrix().astype("float64")},
            {"x": matrix()[:, :, np.newaxis]},
        )
    ],
    ids=str,
)
def test_inputs_are_dense_where_the_form_would_not_do_the_same(
    data, change, is_suited, monkeypatch
):
    change = dict(change)
    fast.choose(change.pop("kernels", "fast"), on_cpu=change.pop("on_cpu", True))
    monkeypatch.setattr(sparse, "MIN_WEIGHTS", change.pop("least", 1))
    learns = change.pop("optimizer", RMSprop()), change.pop("callbacks", ())
    reducer, frozen = change.pop("reducer", SERIAL), change.pop("frozen", False)
    x, is_own = change.pop("x", None), change.pop("target", False)
    model = network(data, **change)
    model.layers[0].trainable = not frozen
    if x is not None:
        data.test.x = x
    if is_own:
        data.test.y = data.test.x
    assert sparse.suits(model, data, *learns, reducer) == is_suited


def test_samples_are_held_without_zeros_and_give_the_same_batches(data):
    x, whole = matrix(), [part.x[:] for part in (data.train, data.validation, data.test)]
    assert sparse.sparse_layer(by_values(data)) is not None
    assert isinstance(data.test.x, Sparse)
    assert data.train.x.rows is data.validation.x.rows.rows is data.test.x
    for part, rows in zip((data.train, data.validation, data.test), whole, strict=True):
        np.testing.assert_array_equal(part.x[:], rows)
        for which in (slice(3, 9), np.array([5, 0, 5]), np.array([7]), np.array([], int)):
            np.testing.assert_array_equal(part.x[which], rows[which])
            batch = sparse.SparseBatches(part.x)[which]
            np.testing.assert_array_equal(tf.sparse.to_dense(batch), rows[which])
    assert data.test.x.density == pytest.approx(np.count_nonzero(x) / x.size)
    # A model that is built anew takes what is held.
    assert sparse.suits(network(data), data, RMSprop(), (), SERIAL)
    assert sparse.sparse_layer(by_values(data)) is not None


def test_dense_samples_remain_what_they_are():
    data = samples_of(matrix(density=1.1 * sparse.MAX_DENSITY))
    model = network(data)
    assert sparse.with_sparse_inputs(model, data, BATCH) is model
    assert isinstance(data.test.x, np.ndarray)
    assert sparse.sparse_layer(model) is None
    assert taken_by(model, data.train) is data.train


def test_losses_of_evaluations_and_predictions_are_those_of_dense_inputs(data):
    plain, *_ = in_plain_keras(data, 3, keras.optimizers.RMSprop(1e-3))
    x, y = data.test[:]
    wanted = plain.test_on_batch(x, y), plain.predict_on_batch(x)
    fast.choose("fast", on_cpu=True)
    model = by_values(data)
    trained(model, data, 3, RMSprop(1e-3))
    samples = taken_by(model, data.test)
    batches = [samples[first : first + 100] for first in range(0, NUM_ROWS, 100)]
    found = evaluate_shared(model, batches, SERIAL.comm)["loss"]
    assert found == pytest.approx(wanted[0], rel=1e-5)
    assert 1e-3 * float(tf.reduce_sum(tf.square(model.layers[0].kernel))) > wanted[0] / 100
    for rows in (samples.x[:], x):  # dense ones, too
        np.testing.assert_allclose(model.predict_on_batch(rows), wanted[1], atol=1e-6)


class Batches(keras.utils.PyDataset):
    samples = None

    def __len__(self):
        return 3

    def __getitem__(self, step):
        return self.samples[step * 9 : step * 9 + 9 - step]

    def epoch_batches(self, epoch, first_step=0):
        return self


def test_batches_are_streamed_as_sparse_tensors(data):
    model, batches = by_values(data), Batches()
    batches.samples = taken_by(model, data.train)
    dense = data.train.x[:]
    for found in (list(stream(batches, range(1))), list(for_fit(batches))):
        assert [len(y) for _, y in found] == [9, 8, 7]
        for step, (x, _) in enumerate(found):
            assert isinstance(x, tf.SparseTensor)
            rows = dense[step * 9 : step * 9 + 9 - step]
            np.testing.assert_array_equal(tf.sparse.to_dense(x), rows)


PREDICT = """
import sys, keras, numpy
numpy.save("y.npy", keras.saving.load_model("model.keras").predict_on_batch(numpy.load("x.npy")))
assert "candle_p1" not in sys.modules
"""


def test_a_saved_model_takes_dense_inputs_without_this_package(data, tmp_path):
    whole = network(data)
    described = describe(whole)
    model = sparse.with_sparse_inputs(whole, data, BATCH)
    assert describe(model) == described
    trained(model, data, 30, RMSprop(1e-3))
    x = data.test.x[:9]
    predicted = model.predict_on_batch(taken_by(model, data.test).x[:9])
    np.testing.assert_allclose(plain_copy(model).predict_on_batch(x), predicted, atol=1e-6)
    first = ModelFile("first.keras", part=lambda whole: keras.Model(whole.inputs, whole.outputs))
    assert not first.of(model).inputs[0].sparse
    save(model, tmp_path / "model.keras")
    np.save(tmp_path / "x.npy", x)
    subprocess.run([sys.executable, "-c", PREDICT], check=True, cwd=tmp_path)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), predicted, atol=1e-6)


def test_the_bound_counts_the_values_alone(data):
    whole, model = network(data), by_values(data)
    for each in (whole, model):
        each.compile(RMSprop(), loss="mse")
        each.optimizer.build(each.trainable_variables)
    assert optimizer_bytes(model, as_computed=True) == optimizer_bytes(whole)
    assert matrix_product_flops(model, BATCH) == matrix_product_flops(whole, BATCH)
    saved = matrix_product_flops(whole, BATCH) - matrix_product_flops(
        model, BATCH, as_computed=True
    )
    assert saved == pytest.approx(4 * BATCH * WIDTH * UNITS * (1 - data.test.x.density))


def product(x, weights, **options):
    of = tf.sparse.from_dense(x)
    given = {"adds_squares": 1, "threads": 3} | options
    return ops.load().candle_p1_sparse_product(
        weights, of.indices, of.values, of.dense_shape, **given
    )


@pytest.mark.parametrize("width", [7, 4000])
def test_the_product_is_that_of_dense_matrices_by_any_threads(width):
    x = np.concatenate([matrix(width=width)[:5], np.zeros((2, width), "f4")])
    weights = np.random.default_rng(2).normal(size=(width, 37)).astype("float32")
    for threads in (1, 2, 5):
        found, squares = product(x, weights, threads=threads)
        np.testing.assert_allclose(found, x @ weights, rtol=1e-5, atol=1e-5)
        assert float(squares) == pytest.approx(np.square(weights, dtype=float).sum(), rel=1e-6)
        again, none = product(x, weights, threads=threads, adds_squares=0)
        np.testing.assert_array_equal(again, found)
        assert float(none) == 0


def test_what_does_not_fit_is_an_error():
    x, weights = matrix(width=9)[:5], np.ones((8, 3), "float32")
    x[:, 8] = 1
    with pytest.raises(tf.errors.InvalidArgumentError, match="unequal shapes"):
        product(x, weights)
    of, variable = tf.sparse.from_dense(x), tf.Variable(weights)

    def step(places, values, upstream):
        factors = Factors(places, values, upstream, tf.constant(0.0), 0)
        update(Update("descend", (0.1,)), [variable], [factors])

    with pytest.raises(tf.errors.InvalidArgumentError, match="outside of the batch"):
        step(of.indices, of.values, tf.ones((5, 3)))
    below = tf.constant([[5, 0]], tf.int64), tf.ones(1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="outside of the batch"):
        step(*below, tf.ones((5, 3)))
    with pytest.raises(tf.errors.InvalidArgumentError, match="unequal shapes"):
        ops.load().candle_p1_sparse_product(weights, *below, [5, 8], adds_squares=1, threads=1)
    for bad in (
        (of.indices, of.values, tf.ones((5, 4))),
        (of.indices[1:], of.values, tf.ones((5, 3))),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match="unequal shapes"):
            step(*bad)
    np.testing.assert_array_equal(variable, weights)
