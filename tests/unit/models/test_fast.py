"""The fast forms of layers, penalties and optimizers compute what Keras's own do."""

from functools import partial

import numpy as np
import pytest

from tests.conftest import NEEDS_HOROVOD

keras = pytest.importorskip("keras", reason="no Keras backend is installed")

from candle_p1.models import fast  # noqa: E402
from candle_p1.models.fast.layers import L2, Conv1D, Dense, MaxPooling1D  # noqa: E402
from candle_p1.models.fast.optimizers import FORMS, KERAS2_FORMS, Keras2RMSprop  # noqa: E402

if keras.backend.backend() != "tensorflow":
    pytest.skip(NEEDS_HOROVOD, allow_module_level=True)

import tensorflow as tf  # noqa: E402

from candle_p1.models.fast import operations  # noqa: E402
from tests.unit.models.conftest import values_and_gradients  # noqa: E402

rng = np.random.default_rng(1)
CLOSE = {"rtol": 2e-4, "atol": 2e-4}
pytestmark = pytest.mark.usefixtures("fast_kernels")


def types_in(traced, *arguments):
    graph = traced.get_concrete_function(*arguments).graph
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
    results = []
    for kind in ("fast", "plain"):
        fast.choose(kind, on_cpu=True)
        layer = make()
        layer.build(x.shape)
        layer.set_weights(weights)
        results.append(values_and_gradients(layer, x))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)


def test_a_convolution_takes_inputs_of_any_length():
    model = keras.Sequential([keras.layers.Input((None, 3)), Conv1D(4, 5)])
    x = rng.normal(size=(2, 300, 3)).astype("float32")
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
    types = types_in(tf.function(MaxPooling1D(size)), tf.TensorSpec((2, 9, 3)))
    assert ("MaxPool" in types) == has_operation


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


def penalised(calls=1, trainable=True, **options):
    """Returns (loss, sum of penalties, gradients) of a model with a penalised layer; operations."""
    layer = Dense(5, "tanh", kernel_regularizer=L2(0.3), **options)
    outputs = inputs = keras.Input((5,))
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
    return [result.numpy() for result in compute(x)], types_in(compute, x)


@pytest.mark.parametrize(
    ("options", "in_place"),
    [
        ({}, True),
        ({"calls": 2}, True),
        ({"use_bias": False}, True),
        ({"activity_regularizer": "l1"}, True),
        ({"trainable": False}, False),
        ({"dtype": "mixed_bfloat16"}, False),
    ],
)
def test_a_dense_layer_adds_its_penalty_in_place(options, in_place):
    found, types = penalised(**options)
    fast.choose("plain", on_cpu=True)
    expected, plain_types = penalised(**options)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)
    assert ("CandleP1AddScaled" in types) is in_place
    assert "CandleP1AddScaled" not in plain_types


def apply_to(optimizer, variables, *gradients):
    optimizer.apply(list(gradients), variables)


@pytest.mark.parametrize(
    ("plain", "options", "is_fused", "dtype"),
    [
        (keras.optimizers.SGD, {}, True, "float32"),
        (keras.optimizers.SGD, {"momentum": 0.9}, True, "float32"),
        (keras.optimizers.SGD, {"momentum": 0.9, "nesterov": True}, False, "float32"),
        (keras.optimizers.SGD, {"gradient_accumulation_steps": 2}, False, "float32"),
        (keras.optimizers.Adam, {}, True, "float32"),
        (keras.optimizers.Adam, {}, False, "float64"),
        (keras.optimizers.Adam, {"amsgrad": True}, False, "float32"),
        (keras.optimizers.Adam, {"clipnorm": 0.1}, True, "float32"),
        (keras.optimizers.RMSprop, {}, True, "float32"),
        (keras.optimizers.RMSprop, {"momentum": 0.5}, False, "float32"),
        (keras.optimizers.RMSprop, {"centered": True}, False, "float32"),
        (Keras2RMSprop, {}, True, "float32"),
        (Keras2RMSprop, {}, False, "float64"),
        (Keras2RMSprop, {"centered": True}, False, "float32"),
        (Keras2RMSprop, {"momentum": 0.5}, False, "float32"),
    ],
)
def test_an_optimizer_moves_variables_as_keras_does(plain, options, is_fused, dtype):
    start = [rng.normal(size=shape).astype(dtype) for shape in [(5, 3), (4,)]]
    gradients = [[rng.normal(size=v.shape).astype(dtype) for v in start] for _ in range(6)]
    gradients[2][0][:] = 0
    ends, types = [], []
    for kind, form in (("fast", FORMS.get(plain, plain)), ("plain", plain)):
        fast.choose(kind, on_cpu=True)
        optimizer = form(0.02, **options)
        variables = [keras.Variable(value, dtype=dtype) for value in start]
        optimizer.build(variables)
        step = tf.function(partial(apply_to, optimizer, variables))
        for each in gradients:
            step(*map(tf.constant, each))
        ends.append([v.numpy() for v in variables])
        types.append(types_in(step, *map(tf.constant, gradients[0])))
    for one, other, value in zip(*ends, start, strict=True):
        # In float64 too: Keras rounds some of an optimizer's settings to float32.
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=5e-6)
        assert (one != value).any()
    assert ("CandleP1Update" in types[0]) is is_fused


@pytest.mark.parametrize("form", [keras.optimizers.Adam, *KERAS2_FORMS.values()])
def test_sparse_gradients_are_taken(form):
    """Those of the fast forms are left to Keras."""
    ends = []
    sparse = tf.IndexedSlices(tf.ones((2, 2)), tf.constant([1, 3]), tf.constant([5, 2]))
    for optimizer, gradient in (
        (FORMS.get(form, form)(0.1), sparse),
        (form(0.1), tf.convert_to_tensor(sparse)),
    ):
        variable = keras.Variable(np.ones((5, 2), "float32"))
        optimizer.apply([gradient], [variable])
        ends.append(variable.numpy())
    np.testing.assert_allclose(*ends, rtol=1e-6)


def test_initial_weights_are_those_of_keras():
    draw = operations.drawn_once(keras.initializers.GlorotUniform(3))
    np.testing.assert_array_equal(draw((7, 5)), keras.initializers.GlorotUniform(3)((7, 5)))


def test_dense_layers_draw_once_and_leave_tensorflows_settings_as_they_were():
    before = tf.config.optimizer.get_experimental_options()
    seen = []

    class Initializer(keras.initializers.Constant):
        def __call__(self, shape, dtype=None):
            seen.append(tf.config.optimizer.get_experimental_options()["constant_folding"])
            return super().__call__(shape, dtype)

    Dense(3, kernel_initializer=Initializer(0.5)).build((None, 2))
    assert seen == [False]
    assert tf.config.optimizer.get_experimental_options() == before
