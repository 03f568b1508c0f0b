"""Initial weights are drawn once, and have the values that Keras draws."""

from __future__ import annotations

import resource

import numpy as np
import pytest

from tests.conftest import NEEDS_HOROVOD

keras = pytest.importorskip("keras", reason="no Keras backend is installed")
if keras.backend.backend() != "tensorflow":
    pytest.skip(NEEDS_HOROVOD, allow_module_level=True)

import tensorflow as tf  # noqa: E402

from candle_p1.models import fast  # noqa: E402
from candle_p1.models.fast.layers import Dense  # noqa: E402
from candle_p1.models.fast.operations import drawn_once  # noqa: E402

SHAPE = (4096, 8192)
NUM_BYTES = 4 * SHAPE[0] * SHAPE[1]
"""128 MiB: above what the C library keeps for later, so that every array has new pages."""


def bytes_touched(draw):
    """Returns what a call draws, and the bytes of memory that it is the first to use."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    weights = draw()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return weights, faults * resource.getpagesize()


def test_weights_are_drawn_once():
    for initializer in (
        keras.initializers.GlorotUniform(3),
        keras.initializers.RandomNormal(0, 1, 3),
    ):
        np.testing.assert_array_equal(drawn_once(initializer)((7, 5)), initializer((7, 5)))
    _, num_bytes = bytes_touched(lambda: drawn_once(initializer)(SHAPE))
    if num_bytes < NUM_BYTES / 2:
        pytest.skip("the kernel gives memory in pages larger than those it counts")
    assert num_bytes < 1.5 * NUM_BYTES


def test_many_layers_do_not_look_like_one_function_traced_anew(caplog, monkeypatch):
    monkeypatch.setattr(tf.get_logger(), "handlers", [caplog.handler])
    for units in range(2, 9):
        drawn_once(keras.initializers.GlorotUniform(seed=3))((units, 5))
    assert "retracing" not in caplog.text


def test_dense_layers_draw_so_and_leave_tensorflows_settings_as_they_were():
    fast.choose("fast", on_cpu=True)
    before = tf.config.optimizer.get_experimental_options()
    seen = []

    class Initializer(keras.initializers.Constant):
        def __call__(self, shape, dtype=None):
            seen.append(tf.config.optimizer.get_experimental_options()["constant_folding"])
            return super().__call__(shape, dtype)

    try:
        Dense(3, kernel_initializer=Initializer(0.5)).build((None, 2))
    finally:
        fast.choose("plain", on_cpu=True)
    assert seen == [False]
    assert tf.config.optimizer.get_experimental_options() == before
