"""Layers, metrics and losses that Keras does not have."""

import numpy as np
import pytest

from candle_p1.models.networks import categorical_crossentropy, same_loss

keras = pytest.importorskip("keras", reason="no Keras backend is installed")

from candle_p1.models.layers import (  # noqa: E402
    ActivityL2,
    Correlation,
    CutoffAccuracy,
    LocallyConnected1D,
    NoiseOnColumns,
    SampleNormal,
)

rng = np.random.default_rng(1)


@pytest.mark.parametrize("strides", [1, 3])
def test_each_position_has_its_own_kernel(strides):
    x = rng.normal(size=(4, 11, 2)).astype("float32")
    layer = LocallyConnected1D(3, 5, strides)
    y = np.asarray(layer(x))
    kernel, bias = (np.asarray(weight) for weight in (layer.kernel, layer.bias))
    positions = (11 - 5) // strides + 1
    assert y.shape == layer.compute_output_shape(x.shape) == (4, positions, 3)
    assert kernel.shape == (positions, 10, 3)
    for p in range(positions):
        window = x[:, p * strides : p * strides + 5].reshape(4, 10)
        np.testing.assert_allclose(y[:, p], window @ kernel[p] + bias[p], rtol=1e-4, atol=1e-5)


def test_the_latent_sample_and_its_divergence():
    mean = np.array([[0.0, 1.0], [2.0, 0.0]], "float32")
    log_variance = np.zeros((2, 2), "float32")
    layer = SampleNormal(stddev=0.5, kl_weight=0.25)
    np.testing.assert_array_equal(layer([mean, log_variance], training=False), mean)
    # The divergence of N(m, 1) from N(0, 1) is m^2 / 2 for each dimension.
    assert float(layer.losses[0]) == pytest.approx(0.25 * (0.5 + 2.0) / 2)
    many = [np.zeros((20_000, 1), "float32"), np.full((20_000, 1), np.log(4), "float32")]
    assert np.std(np.asarray(layer(many, training=True))) == pytest.approx(1.0, rel=0.05)


def test_activities_are_penalized_by_the_mean_over_the_batch():
    layer = ActivityL2(0.5)
    x = np.array([[1.0, 2.0], [3.0, 0.0]], "float32")
    np.testing.assert_array_equal(layer(x), x)
    assert float(layer.losses[0]) == pytest.approx(0.5 * (5 + 9) / 2)


def test_noise_is_added_only_to_its_columns_and_only_in_training():
    x = np.zeros((500, 6), "float32")
    layer = NoiseOnColumns(0.3, 1, 4)
    np.testing.assert_array_equal(layer(x), x)
    y = np.asarray(layer(x, training=True))
    assert not y[:, [0, 4, 5]].any()
    assert y[:, 1:4].std() == pytest.approx(0.3, rel=0.1)


def test_correlation_over_batches_equals_that_of_all_values():
    y_true = rng.random((90, 7)).astype("float32")
    y_pred = (y_true + rng.normal(scale=0.3, size=y_true.shape)).astype("float32")
    metric = Correlation()
    for batch in np.array_split(np.arange(90), 4):
        metric.update_state(y_true[batch], y_pred[batch])
    expected = np.corrcoef(y_true.ravel(), y_pred.ravel())[0, 1]
    assert float(metric.result()) == pytest.approx(expected, abs=1e-4)


def test_accuracy_is_counted_at_cutoffs():
    """Those between two float32 values separate as in NumPy."""
    cutoffs = [-0.3, 0.1, 0.7]
    at = np.float32(cutoffs)
    near = [np.nextafter(at, np.float32(side)) for side in (1, -1)]
    batches = [
        (np.array([[-0.5], [0.1], [0.6], [0.75]]), np.array([-0.4, 0.4, 0.05, 0.9])),
        (np.concatenate([at, at]), np.concatenate(near)),
    ]
    metric, same = CutoffAccuracy(cutoffs), []
    for true, predicted in batches:
        metric.update_state(true, predicted)
        same.extend(np.digitize(true.ravel(), cutoffs) == np.digitize(predicted, cutoffs))
        assert float(metric.result()) == pytest.approx(np.mean(same))
    assert 0 < np.mean(same) < 1


LOGITS = np.random.default_rng(2).uniform(-8, 8, size=(50, 7)).astype("float32")
TARGETS = np.eye(7, dtype="float32")[np.arange(50) % 7]
SHIFTED = LOGITS.astype(float) - LOGITS.max(axis=1, keepdims=True)
LOSSES = -(TARGETS * (SHIFTED - np.log(np.exp(SHIFTED).sum(axis=1, keepdims=True)))).sum(axis=1)


def test_the_probabilities_of_sigmoids_are_the_softmax_of_their_logits():
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
