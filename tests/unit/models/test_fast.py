from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import NEEDS_HOROVOD

keras = pytest.importorskip("keras", reason="no Keras backend is installed")

from candle_p1.models import fast  # noqa: E402
from candle_p1.models.fast.keras2 import KERAS2_FORMS, Keras2RMSprop  # noqa: E402
from candle_p1.models.fast.layers import Conv1D, Dense, MaxPooling1D  # noqa: E402
from candle_p1.models.fast.optimizers import FORMS  # noqa: E402
from candle_p1.models.fast.regularizers import L2  # noqa: E402

if keras.backend.backend() != "tensorflow":
    pytest.skip(NEEDS_HOROVOD, allow_module_level=True)

import tensorflow as tf  # noqa: E402

from candle_p1.models.fast import convolutions, operations  # noqa: E402

rng = np.random.default_rng(1)
CLOSE = {"rtol": 2e-4, "atol": 2e-4}
pytestmark = pytest.mark.usefixtures("fast_kernels")


def values_and_gradients(layer, x, weights):
    """Returns the outputs, and the gradients of a function of them to inputs and weights."""

    @tf.function
    def compute(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
            loss = tf.reduce_sum(tf.sin(y))
        return y, *tape.gradient(loss, [x, *(w.value for w in layer.trainable_weights)])

    layer.build(x.shape)
    for variable, value in zip(layer.trainable_weights, weights, strict=True):
        variable.assign(value)
    return [result.numpy() for result in compute(tf.constant(x))]


def assert_as_plain(make, x, *shapes):
    """Asserts that the fast implementation of a layer computes the same as Keras."""
    weights = [rng.normal(size=shape).astype("float32") for shape in shapes]
    found = values_and_gradients(make(), x, weights)
    fast.choose("plain", on_cpu=True)
    expected = values_and_gradients(make(), x, weights)
    fast.choose("fast", on_cpu=True)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)


def operations_of(layer, shape):
    graph = tf.function(layer).get_concrete_function(tf.TensorSpec(shape)).graph
    return {operation.type for operation in graph.get_operations()}


@pytest.mark.extended
@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 200),
    size=st.integers(1, 20),
    channels=st.integers(1, 3),
    activation=st.sampled_from([None, "relu", "tanh"]),
)
def test_a_convolution_gives_the_values_and_gradients_of_keras(
    batch, length, size, channels, activation
):
    x = rng.normal(size=(batch, length + size - 1, channels)).astype("float32")
    make = lambda: Conv1D(4, size, activation=activation)  # noqa: E731
    assert_as_plain(make, x, (size, channels, 4), (4,))


def test_other_convolutions_are_left_to_keras():
    x = rng.normal(size=(2, 40, 3)).astype("float32")
    for options in ({"strides": 2}, {"padding": "same"}, {"dilation_rate": 2}):
        assert_as_plain(lambda options=options: Conv1D(4, 5, **options), x, (5, 3, 4), (4,))
    assert_as_plain(lambda: Conv1D(4, 5, use_bias=False), x, (5, 3, 4))


@pytest.mark.parametrize(("positions", "is_fast"), [(64, False), (65, True)])
def test_a_short_convolution_is_left_to_keras(monkeypatch, positions, is_fast):
    calls = []
    fast_form = convolutions.convolve
    monkeypatch.setattr(
        convolutions,
        "convolve",
        lambda *args, **named: calls.append(1) or fast_form(*args, **named),
    )
    layer = Conv1D(4, 5)
    layer.build((None, positions + 4, 3))
    tf.function(layer)(tf.zeros((2, positions + 4, 3)))
    assert bool(calls) == is_fast


def test_a_convolution_takes_inputs_of_any_length():
    model = keras.Sequential([keras.layers.Input((None, 3)), Conv1D(4, 5)])
    for length in (9, 300):
        x = rng.normal(size=(2, length, 3)).astype("float32")
        kernel, bias = (weight.numpy() for weight in model.weights)
        windows = np.lib.stride_tricks.sliding_window_view(x, 5, axis=1)
        expected = np.einsum("bpck,kcf->bpf", windows, kernel) + bias
        np.testing.assert_allclose(model.predict_on_batch(x), expected, **CLOSE)


@pytest.mark.parametrize("activation", [None, "sigmoid"])
def test_a_dense_layer_gives_the_values_and_gradients_of_keras(activation):
    x = rng.normal(size=(7, 11)).astype("float32")
    assert_as_plain(lambda: Dense(5, activation), x, (11, 5), (5,))
    assert_as_plain(lambda: Dense(5, activation, use_bias=False), x, (11, 5))
    assert_as_plain(lambda: Dense(5, activation), x[:, None], (11, 5), (5,))


def test_large_weights_are_drawn_by_one_function():
    inside = []

    def initializer(shape, dtype):
        inside.append(tf.inside_function())
        return tf.ones(shape, dtype)

    for kind in ("fast", "plain"):
        fast.choose(kind, on_cpu=True)
        layer = Dense(5, kernel_initializer=initializer)
        layer.build((None, 11))
        assert layer.kernel_initializer is initializer
        np.testing.assert_array_equal(layer.kernel, np.ones((11, 5)))
    assert inside == [True, False]


@pytest.mark.parametrize("inputs_depend_on_weights", [True, False])
def test_a_kernel_is_updated_only_when_nothing_reads_it(inputs_depend_on_weights):
    kernel, scale = tf.Variable(tf.ones((11, 5))), tf.Variable(2.0)

    @tf.function
    def gradient(x):
        with tf.GradientTape() as tape:
            inputs = x * scale if inputs_depend_on_weights else x
            loss = tf.reduce_sum(operations.multiply(inputs, kernel, tf.zeros(5)))
        return tape.gradient(loss, kernel)

    of_kernel = gradient.get_concrete_function(tf.TensorSpec((7, 11))).outputs[0].op
    while of_kernel.type == "Identity":
        of_kernel = of_kernel.inputs[0].op
    assert of_kernel.type == "MatMul"
    waits_for = [operation.type for operation in of_kernel.control_inputs]
    assert waits_for == (["Transpose"] if inputs_depend_on_weights else [])


def test_a_pool_of_one_returns_its_input():
    x = rng.normal(size=(2, 9, 3)).astype("float32")
    for size in (1, 2):
        assert_as_plain(lambda size=size: MaxPooling1D(size), x)
    assert "MaxPool" not in operations_of(MaxPooling1D(1), x.shape)
    assert "MaxPool" in operations_of(MaxPooling1D(2), x.shape)


def test_a_penalty_has_the_expected_value_and_gradient():
    values = rng.normal(size=(30, 4)).astype("float32")
    expected = 0.01 * np.sum(values.astype(float) ** 2)
    for kind in ("fast", "plain"):
        fast.choose(kind, on_cpu=True)
        variable = tf.Variable(values)
        with tf.GradientTape() as tape:
            penalty = L2(0.01)(variable)
        assert float(penalty) == pytest.approx(expected)
        np.testing.assert_allclose(tape.gradient(penalty, variable), 0.02 * values, rtol=1e-5)


def penalised(calls=1, trainable=True, **options):
    """Returns (loss, sum of penalties, gradients) of a model with a penalised layer; operations."""
    layer = Dense(5, "tanh", kernel_regularizer=L2(0.3), **options)
    inputs = keras.Input((5,))
    outputs = inputs
    for _ in range(calls):
        outputs = layer(outputs)
    model = keras.Model(inputs, outputs)
    layer.trainable = trainable
    for weight, seed in zip(layer.weights, (1, 2), strict=False):
        weight.assign(np.random.default_rng(seed).normal(size=weight.shape))

    @tf.function
    def compute(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x)
            penalty = tf.add_n(model.losses) if model.losses else tf.constant(0.0)
            loss = 3 * (tf.reduce_sum(tf.sin(tf.cast(y, tf.float32))) + penalty)
        return loss, penalty, *tape.gradient(loss, [x, *(w.value for w in layer.trainable_weights)])

    x = tf.constant(np.random.default_rng(3).normal(size=(4, 5)).astype("float32"))
    compute(x)
    types = {one.type for one in compute.get_concrete_function(x).graph.get_operations()}
    return [result.numpy() for result in compute(x)], types


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"calls": 2},
        {"use_bias": False},
        {"activity_regularizer": "l1"},
        {"trainable": False},
        {"dtype": "mixed_bfloat16"},
    ],
    ids=str,
)
def test_a_dense_layer_adds_its_penalty_in_place(options):
    found, types = penalised(**options)
    fast.choose("plain", on_cpu=True)
    expected, plain_types = penalised(**options)
    fast.choose("fast", on_cpu=True)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)
    penalised_in_place = "CandleP1AddScaled" in types
    assert penalised_in_place is (options.get("trainable", True) and "dtype" not in options)
    assert "CandleP1AddScaled" not in plain_types


OPTIMIZERS = {
    "sgd": (keras.optimizers.SGD, {}, "CandleP1Update"),
    "momentum": (keras.optimizers.SGD, {"momentum": 0.9}, "CandleP1Update"),
    "nesterov": (keras.optimizers.SGD, {"momentum": 0.9, "nesterov": True}, None),
    "adam": (keras.optimizers.Adam, {}, "CandleP1Update"),
    "amsgrad": (keras.optimizers.Adam, {"amsgrad": True}, None),
    "rmsprop": (keras.optimizers.RMSprop, {}, "CandleP1Update"),
    "rmsprop momentum": (keras.optimizers.RMSprop, {"momentum": 0.5}, None),
    "keras2": (Keras2RMSprop, {}, "CandleP1Update"),
    "keras2 centered": (Keras2RMSprop, {"centered": True}, None),
    "keras2 momentum": (Keras2RMSprop, {"momentum": 0.5}, None),
    "centered": (keras.optimizers.RMSprop, {"centered": True}, None),
    "clipped": (keras.optimizers.Adam, {"clipnorm": 0.1}, "CandleP1Update"),
    "accumulating": (keras.optimizers.SGD, {"gradient_accumulation_steps": 2}, None),
}


def apply_to(optimizer, variables, *gradients):
    optimizer.apply(list(gradients), variables)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_optimizer_moves_variables_as_keras_does(name, dtype):
    plain, options, operation = OPTIMIZERS[name]
    start = [rng.normal(size=shape).astype(dtype) for shape in [(5, 3), (4,)]]
    gradients = [[rng.normal(size=v.shape).astype(dtype) for v in start] for _ in range(6)]
    gradients[2][0][:] = 0
    ends, types = [], set()
    for kind, form in (("fast", FORMS.get(plain, plain)), ("plain", plain)):
        fast.choose(kind, on_cpu=True)
        optimizer = form(0.02, **options)
        variables = [keras.Variable(value, dtype=dtype) for value in start]
        optimizer.build(variables)

        step = tf.function(partial(apply_to, optimizer, variables))
        for each in gradients:
            step(*map(tf.constant, each))
        ends.append([v.numpy() for v in variables])
        if kind == "fast":
            graph = step.get_concrete_function(*map(tf.constant, gradients[0])).graph
            types = {one.type for one in graph.get_operations()}
    for one, other, value in zip(*ends, start, strict=True):
        # In float64 too: Keras rounds some of an optimizer's settings to float32.
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=5e-6)
        assert (one != value).any()
    assert (operation in types) is (operation is not None and dtype == "float32")


@pytest.mark.parametrize("form", [keras.optimizers.Adam, *KERAS2_FORMS.values()])
def test_sparse_gradients_are_taken(form):
    """Those of the fast forms are left to Keras."""
    ends = []
    rows, shape = tf.constant([1, 3]), tf.constant([5, 2])
    sparse = tf.IndexedSlices(tf.ones((2, 2)), rows, shape)
    for optimizer, gradient in (
        (FORMS.get(form, form)(0.1), sparse),
        (form(0.1), tf.convert_to_tensor(sparse)),
    ):
        variable = keras.Variable(np.ones((5, 2), "float32"))
        optimizer.apply([gradient], [variable])
        ends.append(variable.numpy())
    np.testing.assert_allclose(*ends, rtol=1e-6)


@pytest.mark.parametrize(("kind", "on_cpu"), [("plain", True), ("fast", False)])
def test_plain_keras_is_used_if_chosen_and_on_gpus(kind, on_cpu):
    fast.choose(kind, on_cpu=on_cpu)
    assert not fast.are_fast()
    assert "MaxPool" in operations_of(MaxPooling1D(1), (2, 9, 3))


def test_a_model_of_fast_layers_can_be_saved_and_loaded(tmp_path):
    model = keras.Sequential(
        [
            keras.layers.Input((30, 1)),
            Conv1D(4, 5, activation="relu"),
            MaxPooling1D(2),
            keras.layers.Flatten(),
            Dense(3, kernel_regularizer=L2(0.1)),
        ]
    )
    model.compile(FORMS[keras.optimizers.RMSprop](0.01), "mse")
    x = rng.normal(size=(6, 30, 1)).astype("float32")
    model.fit(x, np.zeros((6, 3)), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict_on_batch(x), model.predict_on_batch(x), rtol=1e-6)
