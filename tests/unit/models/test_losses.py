"""The cross-entropy of sigmoids is that of TensorFlow with any backend."""

import numpy as np
import pytest

from candle_p1.models.networks import categorical_crossentropy, same_loss

keras = pytest.importorskip("keras", reason="no Keras backend is installed")

LOGITS = np.random.default_rng(2).uniform(-8, 8, size=(50, 7)).astype("float32")
TARGETS = np.eye(7, dtype="float32")[np.arange(50) % 7]
SHIFTED = LOGITS.astype(float) - LOGITS.max(axis=1, keepdims=True)
LOSSES = -(TARGETS * (SHIFTED - np.log(np.exp(SHIFTED).sum(axis=1, keepdims=True)))).sum(axis=1)


def test_the_probabilities_are_the_softmax_of_the_logits():
    found = categorical_crossentropy(TARGETS, keras.ops.sigmoid(LOGITS))
    np.testing.assert_allclose(keras.ops.convert_to_numpy(found), LOSSES, atol=1e-3)
    saturated = categorical_crossentropy(np.eye(3)[:2], np.float32([[1, 0, 0.5], [0, 1, 1]]))
    assert np.isfinite(keras.ops.convert_to_numpy(saturated)).all()


def test_a_compiled_model_has_the_same_loss_with_any_backend():
    inputs = keras.Input((7,))
    model = keras.Model(inputs, keras.layers.Activation("sigmoid")(inputs))
    model.compile(loss=same_loss("categorical_crossentropy", "sigmoid"), jit_compile=False)
    found = model.test_on_batch(LOGITS, TARGETS, return_dict=True)["loss"]
    np.testing.assert_allclose(found, LOSSES.mean(), rtol=1e-4)
    assert same_loss("categorical_crossentropy", "softmax") == "categorical_crossentropy"
