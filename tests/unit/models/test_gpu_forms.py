"""The fast forms for GPUs compute what Keras's own layers do; here JAX computes both on the CPU."""

from functools import partial

import numpy as np
import pytest

keras = pytest.importorskip("keras", reason="no Keras backend is installed")

from candle_p1.models import fast  # noqa: E402
from candle_p1.models.fast.layers import Conv1D, Dense, MaxPooling1D  # noqa: E402

if keras.backend.backend() != "jax":
    pytest.skip("Keras's backend is not JAX", allow_module_level=True)

import jax  # noqa: E402

from candle_p1.models.fast import gpu_forms  # noqa: E402
from tests.unit.models.conftest import values_and_gradients  # noqa: E402

CLOSE = {"float32": {"rtol": 1e-5, "atol": 1e-5}, "mixed_bfloat16": {"rtol": 0.05, "atol": 0.05}}


@pytest.fixture(autouse=True)
def plain_afterwards(monkeypatch):
    monkeypatch.setattr(gpu_forms, "LEAST_WEIGHTS", 1)
    yield
    fast.choose("plain", on_cpu=False)


@pytest.mark.parametrize("policy", CLOSE)
@pytest.mark.parametrize(
    ("make", "x_shape", "used"),
    [
        (partial(Conv1D, 4, 5, activation="relu"), (2, 99, 1), ["Conv1D"]),
        (partial(Conv1D, 4, 5), (2, 99, 3), []),
        (partial(Conv1D, 4, 5, strides=2), (2, 99, 1), []),
        (partial(Conv1D, 4, 5, use_bias=False), (2, 99, 1), []),
        (partial(MaxPooling1D, 3), (2, 11, 4), ["MaxPooling1D"]),
        (partial(MaxPooling1D, 128), (1, 300, 2), []),
        (partial(MaxPooling1D, 3, 2), (2, 11, 4), []),
        (partial(Dense, 6, activation="relu"), (32, 9), ["Dense"]),
        (partial(Dense, 6), (33, 9), ["Dense"]),
        (partial(Dense, 6), (2, 3, 9), []),
        (partial(Dense, 6, use_bias=False), (2, 9), []),
    ],
)
def test_a_form_gives_the_values_and_gradients_of_keras(make, x_shape, used, policy):
    x = np.random.default_rng(1).normal(size=x_shape).astype("float32")
    results = []
    for kind in ("plain", "fast"):
        fast.choose(kind, on_cpu=False)
        keras.utils.set_random_seed(1)
        layer = make(dtype=policy)
        layer.build(x.shape)
        results.append(values_and_gradients(layer, x))
    assert fast.used() == used
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, **CLOSE[policy])


def test_the_first_of_equal_maxima_has_the_gradient():
    x = np.array([0, 0, -1, 2, 2, 2, 7], np.float32).reshape(1, 7, 1)
    gradient = jax.grad(lambda x: gpu_forms.pool(x, 3).sum())(x)
    assert gradient.ravel().tolist() == [1, 0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize(("samples", "products"), [(gpu_forms.MAX_OUTER_PRODUCTS, 2), (40, 3)])
def test_the_gradient_of_a_kernel_is_no_product_for_few_samples(samples, products):
    def loss(x, kernel):
        return jax.numpy.sin(gpu_forms.multiply(x, kernel)).sum()

    x, kernel = np.ones((samples, 9), np.float32), np.ones((9, 5), np.float32)
    traced = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, kernel))
    assert traced.count("dot_general") == products
