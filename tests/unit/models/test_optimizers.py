"""Optimizers by CANDLE's names, against published formulas where this package has its own."""

from functools import partial

import numpy as np
import pytest

keras = pytest.importorskip("keras", reason="no Keras backend is installed")

from candle_p1.benchmark import find_benchmark  # noqa: E402
from candle_p1.distributed.optimizer import distribute_optimizer  # noqa: E402
from candle_p1.distributed.reducers.reducer import SerialReducer  # noqa: E402
from candle_p1.errors import ParameterError  # noqa: E402
from candle_p1.models.optimizers import CANDLE_OPTIMIZERS, make_optimizer  # noqa: E402

RATE, RHO, B1, B2 = 0.001, 0.9, 0.9, 0.999
SCALES = 10.0 ** np.arange(-6, 1)
GRADIENTS = np.random.default_rng(8).normal(size=(20, 50, 1)) * SCALES


def make(flags, **constants):
    return make_optimizer(find_benchmark("p1b2").read_parameters(flags.split()), RATE, **constants)


def rmsprop(gradients, epsilon, under_root=0.0):
    square = 0
    for g in gradients:
        square = RHO * square + (1 - RHO) * g**2
        yield RATE * g / (np.sqrt(square + under_root) + epsilon)


def nadam(gradients, epsilon, decay=0.004):
    m = v = 0
    product = 1
    for t, g in enumerate(gradients, start=1):
        now, then = (B1 * (1 - 0.96 ** (decay * i) / 2) for i in (t, t + 1))
        product *= now
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
        mean = (1 - now) * g / (1 - product) + then * m / (1 - product * then)
        yield RATE * mean / (np.sqrt(v / (1 - B2**t)) + epsilon)


@pytest.mark.parametrize(
    ("flags", "formula", "epsilon"),
    [
        ("--optimizer rmsprop", rmsprop, 1e-8),
        ("--optimizer nadam", nadam, 1e-8),
        ("--optimizer rmsprop --optimizer_formula keras3", partial(rmsprop, under_root=1e-7), 0),
        ("--optimizer nadam --optimizer_formula keras3", partial(nadam, decay=1), 1e-7),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.extended)])
def test_an_optimizer_has_its_formula_and_constants(request, flags, formula, epsilon, dtype):
    if dtype == "float64":
        request.getfixturevalue("double_precision")
    optimizer = make(flags)
    variable = keras.Variable(np.zeros(GRADIENTS.shape[1:]), dtype=dtype)
    places = []
    for gradient in GRADIENTS:
        optimizer.apply([keras.ops.convert_to_tensor(gradient, dtype)], [variable])
        places.append(-keras.ops.convert_to_numpy(variable))
    expected = np.cumsum(list(formula(GRADIENTS, epsilon)), axis=0)
    tolerance = 1e-5 * np.abs(expected).max(axis=(0, 1))  # of each scale of gradients
    assert (np.abs(np.array(places) - expected) <= tolerance).all()


CONSTANTS = {
    "sgd": {"momentum": 0.0, "nesterov": False},
    "adadelta": {"rho": 0.9, "epsilon": 1e-8},
    "adagrad": {"initial_accumulator_value": 0.1, "epsilon": 1e-8},
    "adam": {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-8, "amsgrad": False},
    "adamax": {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-8},
    "adamw": {"epsilon": 1e-7},  # which CANDLE does not have
    "sgd --momentum 0.5": {"momentum": 0.5, "nesterov": False},
}


@pytest.mark.parametrize("flags", CONSTANTS)
def test_optimizers_of_keras_have_candles_constants_where_it_has_some(flags):
    optimizer, expected = make(f"--optimizer {flags}"), CONSTANTS[flags]
    assert {name: getattr(optimizer, name) for name in expected} == expected


def test_p1b1_makes_its_optimizer_without_constants_as_its_script_does():
    constants = find_benchmark("p1b1").optimizer_constants
    assert make("--optimizer adam", constants=constants).epsilon == 1e-7


def test_momentum_is_refused_where_an_optimizer_has_none():
    with pytest.raises(ParameterError, match="momentum"):
        make("--optimizer adam --momentum 0.5")


class TwoRanks:
    size = 2


@pytest.mark.parametrize("name", CANDLE_OPTIMIZERS)
def test_an_optimizer_can_be_made_again_from_its_settings(name):
    optimizer = make(f"--optimizer {name}")
    distributed = distribute_optimizer(optimizer, SerialReducer(TwoRanks()))
    assert type(optimizer) in type(distributed).__mro__
    assert distributed.get_config() == optimizer.get_config()
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is type(optimizer)
    assert again.get_config() == optimizer.get_config()
