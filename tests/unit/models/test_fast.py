from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.conftest import NEEDS_HOROVOD

keras = pytest.importorskip("keras", reason="no Keras backend is installed")

from candle_p1.models import fast  # noqa: E402
from candle_p1.models.fast.layers import L2, Conv1D, Dense, MaxPooling1D  # noqa: E402
from candle_p1.models.fast.optimizers import (  # noqa: E402
    FORMS,
    KERAS2_FORMS,
    Keras2RMSprop,
)

if keras.backend.backend() != "tensorflow":
    pytest.skip(NEEDS_HOROVOD, allow_module_level=True)

import tensorflow as tf  # noqa: E402

from candle_p1.models.fast import operations  # noqa: E402

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


def operations_of(layer, shape):
    graph = tf.function(layer).get_concrete_function(tf.TensorSpec(shape)).graph
    return {operation.type for operation in graph.get_operations()}


@pytest.mark.parametrize(
    ("make", "x_shape", "shapes"),
    [
        *(
            (partial(Conv1D, 4, 5, **options), (2, 40, 3), [(5, 3, 4), (4,)])
            for options in ({"strides": 2}, {"padding": "same"}, {"dilation_rate": 2})
        ),
        *((partial(Conv1D, 4, 5), (2, length, 3), [(5, 3, 4), (4,)]) for length in (68, 69, 99)),
        (partial(Conv1D, 4, 5, use_bias=False), (2, 99, 3), [(5, 3, 4)]),
        (partial(Dense, 5), (7, 11), [(11, 5), (5,)]),
        (partial(Dense, 5, "sigmoid", use_bias=False), (7, 11), [(11, 5)]),
        (partial(Dense, 5, "sigmoid"), (7, 1, 11), [(11, 5), (5,)]),
        *((partial(MaxPooling1D, size), (2, 9, 3), []) for size in (1, 2)),
    ],
)
def test_a_layer_gives_the_values_and_gradients_of_keras(make, x_shape, shapes):
    x = rng.normal(size=x_shape).astype("float32")
    weights = [rng.normal(size=shape).astype("float32") for shape in shapes]
    found = values_and_gradients(make(), x, weights)
    fast.choose("plain", on_cpu=True)
    for one, other in zip(found, values_and_gradients(make(), x, weights), strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)


def test_a_convolution_takes_inputs_of_any_length():
    model = keras.Sequential([keras.layers.Input((None, 3)), Conv1D(4, 5)])
    for length in (9, 300):
        x = rng.normal(size=(2, length, 3)).astype("float32")
        kernel, bias = (weight.numpy() for weight in model.weights)
        windows = np.lib.stride_tricks.sliding_window_view(x, 5, axis=1)
        expected = np.einsum("bpck,kcf->bpf", windows, kernel) + bias
        np.testing.assert_allclose(model.predict_on_batch(x), expected, **CLOSE)


@pytest.mark.parametrize(
    ("kind", "on_cpu", "size", "has_operation"),
    [
        ("fast", True, 1, False),  # which returns its input
        ("fast", True, 2, True),
        ("plain", True, 1, True),
        ("fast", False, 1, True),  # plain Keras is used on GPUs
    ],
)
def test_a_fast_form_is_used_where_it_is_chosen_on_cpus(kind, on_cpu, size, has_operation):
    fast.choose(kind, on_cpu=on_cpu)
    assert ("MaxPool" in operations_of(MaxPooling1D(size), (2, 9, 3))) == has_operation


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
