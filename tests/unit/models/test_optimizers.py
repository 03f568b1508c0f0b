"""Optimizers by CANDLE's names against the published formulas, written in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

keras = pytest.importorskip("keras", reason="no Keras backend is installed")

from candle_p1.benchmark import find_benchmark  # noqa: E402
from candle_p1.distributed.optimizer import distribute_optimizer  # noqa: E402
from candle_p1.distributed.reducers.reducer import SerialReducer  # noqa: E402
from candle_p1.errors import ParameterError  # noqa: E402
from candle_p1.models.optimizers import CANDLE_OPTIMIZERS, make_optimizer  # noqa: E402

RATE, RHO, B1, B2 = 0.001, 0.9, 0.9, 0.999
STEPS = 20
SCALES = 10.0 ** np.arange(-6, 1)
GRADIENTS = np.random.default_rng(8).normal(size=(STEPS, 50, 1)) * SCALES


def params(*flags):
    return find_benchmark("p1b2").read_parameters(flags)


def sgd(gradients, epsilon):
    yield from RATE * gradients


def rmsprop(gradients, epsilon):
    square = 0
    for g in gradients:
        square = RHO * square + (1 - RHO) * g**2
        yield RATE * g / (np.sqrt(square) + epsilon)


def rmsprop_of_keras_3(gradients, epsilon):
    square = 0
    for g in gradients:
        square = RHO * square + (1 - RHO) * g**2
        yield RATE * g / np.sqrt(square + epsilon)


def adagrad(gradients, epsilon):
    total = 0.1
    for g in gradients:
        total = total + g**2
        yield RATE * g / (np.sqrt(total) + epsilon)


def adadelta(gradients, epsilon):
    square = moved = 0
    for g in gradients:
        square = RHO * square + (1 - RHO) * g**2
        step = np.sqrt(moved + epsilon) / np.sqrt(square + epsilon) * g
        moved = RHO * moved + (1 - RHO) * step**2
        yield RATE * step


def adam(gradients, epsilon):
    m = v = 0
    for t, g in enumerate(gradients, start=1):
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
        rate = RATE * np.sqrt(1 - B2**t) / (1 - B1**t)
        yield rate * m / (np.sqrt(v) + epsilon)


def adamax(gradients, epsilon):
    m = u = 0
    for t, g in enumerate(gradients, start=1):
        m, u = B1 * m + (1 - B1) * g, np.maximum(B2 * u, np.abs(g))
        yield RATE / (1 - B1**t) * m / (u + epsilon)


def nadam(gradients, epsilon, decay=0.004):
    m = v = 0
    product = 1
    for t, g in enumerate(gradients, start=1):
        now, then = (B1 * (1 - 0.96 ** (decay * i) / 2) for i in (t, t + 1))
        product *= now
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
        mean = (1 - now) * g / (1 - product) + then * m / (1 - product * then)
        yield RATE * mean / (np.sqrt(v / (1 - B2**t)) + epsilon)


def nadam_of_keras_3(gradients, epsilon):
    return nadam(gradients, epsilon, decay=1)


FORMULAS = dict(
    zip(CANDLE_OPTIMIZERS, (sgd, rmsprop, adagrad, adadelta, adam, adamax, nadam), strict=True)
)


def moved_by(optimizer, dtype="float32"):
    """Returns how far an optimizer has moved a variable after each step."""
    variable = keras.Variable(np.zeros(GRADIENTS.shape[1:]), dtype=dtype)
    places = []
    for gradient in GRADIENTS:
        optimizer.apply([keras.ops.convert_to_tensor(gradient, dtype)], [variable])
        places.append(-keras.ops.convert_to_numpy(variable))
    return np.array(places)


def assert_moves(optimizer, formula, epsilon, dtype="float32"):
    expected = np.cumsum(list(formula(GRADIENTS, epsilon)), axis=0)
    tolerance = 1e-5 * np.abs(expected).max(axis=(0, 1))  # of each scale of gradients
    assert (np.abs(moved_by(optimizer, dtype) - expected) <= tolerance).all()


@pytest.mark.parametrize("name", CANDLE_OPTIMIZERS)
@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("float64", marks=pytest.mark.extended), "fast float32"]
)
def test_an_optimizer_has_keras_2s_formula_and_candles_constants(request, name, dtype):
    if dtype != "float32":
        request.getfixturevalue("double_precision" if dtype == "float64" else "fast_kernels")
    optimizer = make_optimizer(params("--optimizer", name), RATE)
    assert_moves(optimizer, FORMULAS[name], 1e-8, dtype.removeprefix("fast "))


def test_without_constants_of_candle_those_of_keras_hold():
    """P1B1's script in CANDLE makes its optimizer without arguments."""
    p1b1 = find_benchmark("p1b1")
    optimizer = make_optimizer(p1b1.read_parameters([]), RATE, p1b1.optimizer_constants)
    assert_moves(optimizer, adam, 1e-7)


@pytest.mark.parametrize(
    ("name", "formula"), [("rmsprop", rmsprop_of_keras_3), ("nadam", nadam_of_keras_3)]
)
def test_the_other_formula_is_keras_3s(name, formula):
    flags = ["--optimizer", name, "--optimizer_formula", "keras3"]
    assert_moves(make_optimizer(params(*flags), RATE), formula, 1e-7)


def test_momentum_of_a_parameter_set_replaces_candles():
    optimizer = make_optimizer(params("--optimizer", "sgd", "--momentum", "0.5"), RATE)
    assert (optimizer.momentum, optimizer.nesterov) == (0.5, False)
    with pytest.raises(ParameterError, match="momentum"):
        make_optimizer(params("--optimizer", "adam", "--momentum", "0.5"), RATE)


def test_optimizers_that_candle_does_not_have_are_keras_3s():
    optimizer = make_optimizer(params("--optimizer", "adamw"), RATE)
    assert type(optimizer) is keras.optimizers.AdamW
    assert optimizer.epsilon == 1e-7


class TwoRanks:
    size = 2


@pytest.mark.parametrize("name", CANDLE_OPTIMIZERS)
def test_an_optimizer_can_be_made_again_from_its_settings(name):
    optimizer = make_optimizer(params("--optimizer", name), RATE)
    distributed = distribute_optimizer(optimizer, SerialReducer(TwoRanks()))
    assert type(optimizer) in type(distributed).__mro__
    assert distributed.get_config() == optimizer.get_config()
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is type(optimizer)
    assert again.get_config() == optimizer.get_config()
