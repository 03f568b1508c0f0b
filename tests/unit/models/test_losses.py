"""The cross-entropy of sigmoids is that of TensorFlow with any backend."""

from __future__ import annotations

import numpy as np
import pytest

from candle_p1.models.networks import categorical_crossentropy, same_loss

keras = pytest.importorskip("keras", reason="no Keras backend is installed")

LOGITS = np.random.default_rng(2).uniform(-8, 8, size=(50, 7)).astype("float32")
TARGETS = np.eye(7, dtype="float32")[np.arange(50) % 7]


def expected():
    shifted = LOGITS.astype(float) - LOGITS.max(axis=1, keepdims=True)
    return -(TARGETS * (shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))).sum(axis=1)


def test_the_probabilities_are_the_softmax_of_the_logits():
    sigmoids = keras.ops.sigmoid(LOGITS)
    found = keras.ops.convert_to_numpy(categorical_crossentropy(TARGETS, sigmoids))
    np.testing.assert_allclose(found, expected(), atol=1e-3)
    divided = keras.ops.convert_to_numpy(sigmoids)
    divided /= divided.sum(axis=1, keepdims=True)
    other = -(TARGETS * np.log(divided)).sum(axis=1)
    assert np.abs(other - expected()).max() > 0.5, "the two functions would not be told apart"


def test_a_compiled_model_has_the_same_loss_with_any_backend():
    inputs = keras.Input((7,))
    model = keras.Model(inputs, keras.layers.Activation("sigmoid")(inputs))
    loss = same_loss("categorical_crossentropy", "sigmoid")
    model.compile(loss=loss, jit_compile=False)
    found = model.test_on_batch(LOGITS, TARGETS, return_dict=True)["loss"]
    np.testing.assert_allclose(found, expected().mean(), rtol=1e-4)


def test_other_losses_are_keras_own():
    assert same_loss("categorical_crossentropy", "softmax") == "categorical_crossentropy"
    assert same_loss("mse", "sigmoid") == "mse"


def test_saturated_sigmoids_have_finite_losses():
    sigmoids = np.float32([[1, 0, 0.5], [0, 1, 1]])
    found = keras.ops.convert_to_numpy(categorical_crossentropy(np.eye(3)[:2], sigmoids))
    assert np.isfinite(found).all()
