"""Saved models, which hold Keras's own classes wherever there are some."""

import random
import resource

import numpy as np
import pytest

from candle_p1.benchmark import ModelFile, find_benchmark
from candle_p1.data.inputs import Inputs
from candle_p1.models.saving import describe, foreign_classes, plain_copy, save, with_inputs

keras = pytest.importorskip("keras", reason="no Keras backend is installed")


@pytest.fixture(autouse=True)
def fresh_keras(fast_kernels):
    keras.utils.set_random_seed(7)
    yield
    keras.backend.clear_session()


def network():
    from candle_p1.models.fast.layers import L2, Conv1D, Dense, MaxPooling1D
    from candle_p1.models.layers import ActivityL2

    inputs = keras.Input((90, 1))
    x = MaxPooling1D(1)(Conv1D(8, 20, activation="relu")(inputs))
    x = keras.layers.BatchNormalization()(Conv1D(4, 3, 2)(x))
    x = keras.layers.Flatten()(MaxPooling1D(3)(x))
    hidden = Dense(6, activation="sigmoid", kernel_regularizer=L2(0.01))(x)
    hidden = keras.layers.Add()([ActivityL2(0.02)(hidden), hidden])
    hidden = keras.layers.Dropout(0.5)(hidden)
    return keras.Model(inputs, Dense(2, "softmax", dtype=keras.config.floatx())(hidden))


def trained():
    """Returns a network, compiled and trained as runs do, and inputs."""
    from candle_p1.models.fast.optimizers import Keras2RMSprop

    random_values, model = np.random.default_rng(1), network()
    x = random_values.normal(size=(10, 90, 1)).astype("float32")
    y = random_values.random(size=(10, 2)).astype("float32")
    model.compile(Keras2RMSprop(0.01), loss="mse", metrics=["mae"])
    for _ in range(3):
        model.train_on_batch(x, y)
    return model, x


def test_layers_that_keras_does_not_have_are_named_and_kept(tmp_path):
    from candle_p1.models.layers import LocallyConnected1D, NoiseOnColumns, SampleNormal

    inputs = keras.Input((30,))
    noisy = NoiseOnColumns(0.1, 1, 5)(inputs)
    local = LocallyConnected1D(2, 3, 2)(keras.layers.Reshape((30, 1))(noisy))
    flat = keras.layers.Flatten()(local)
    mean, log_variance = keras.layers.Dense(4)(flat), keras.layers.Dense(4)(flat)
    model = keras.Model(inputs, SampleNormal(0.5, 0.1)([mean, log_variance]))
    save(model, tmp_path / "model.keras")
    assert foreign_classes(describe(model)) == [
        f"candle_p1.models.layers.{name}"
        for name in ("LocallyConnected1D", "NoiseOnColumns", "SampleNormal")
    ]
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    x = np.random.default_rng(1).normal(size=(5, 30)).astype("float32")
    np.testing.assert_array_equal(loaded.predict_on_batch(x), model.predict_on_batch(x))
    assert (loaded.layers[-1].stddev, loaded.layers[-1].kl_weight) == (0.5, 0.1)


def test_weights_and_layers_make_the_model_again(tmp_path):
    model, x = trained()
    save(model, tmp_path / "layers.json")
    save(model, tmp_path / "best.weights.h5")
    layers = (tmp_path / "layers.json").read_text()
    assert "candle_p1" not in layers
    rebuilt = keras.models.model_from_json(layers)
    rebuilt.load_weights(tmp_path / "best.weights.h5")
    before = random.getstate()
    expected = plain_copy(model).predict_on_batch(x)
    assert random.getstate() == before, "which decides what a run does next"
    np.testing.assert_array_equal(rebuilt.predict_on_batch(x), expected)


@pytest.mark.extended
@pytest.mark.parametrize("data_type", ["mixed_float16", "float64"])
def test_other_precisions_are_kept(tmp_path, data_type, double_precision):
    floatx = "float64" if data_type == "float64" else "float32"
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(data_type)
    try:
        model, x = trained()
        expected = model.predict_on_batch(x)
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
    save(model, tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert all(type(layer).__module__.startswith("keras.") for layer in loaded.layers)
    assert [each.dtype for each in loaded.weights] == [floatx] * len(model.weights)
    np.testing.assert_array_equal(loaded.predict_on_batch(x), expected)


def test_sigmoids_are_told_as_the_probabilities_that_they_were_trained_as(tmp_path):
    logits = np.array([[-20, -18, -19], [11, 10, 1], [30, 0, 0]], np.float32)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, activation="sigmoid")])
    model.set_weights([np.eye(3), np.zeros(3)])
    facts = {"benchmark": "p1b2", "classes": [*"abc"], "scaling": "none", "fitted_to": "all"}
    inputs = Inputs(**facts, offset=np.full(3, 5), scale=np.full(3, 2))
    save(with_inputs(model, inputs), tmp_path / "model.keras")
    alone = keras.saving.load_model(tmp_path / "model.keras").predict_on_batch(2 * logits + 5)
    columns = find_benchmark("p1b2").predictor(model, {}, inputs)(logits)
    assert columns["class"].tolist() == ["b", "a", "a"]
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    for i, name in enumerate("abc"):
        column = columns[f"probability_{name}"]
        assert column.dtype == np.float32
        # Of a sigmoid near 1, float32 holds few digits of the odds.
        np.testing.assert_allclose(column, expected[:, i], rtol=0.02, atol=1e-7)
        np.testing.assert_allclose(alone[name][:, 0], column, rtol=1e-5)


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5", "model.json"])
def test_without_space_the_old_file_stays(tmp_path, name):
    model = network()
    path = tmp_path / name
    path.write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            save(model, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_suffix_says_what_a_file_holds():
    with pytest.raises(ValueError, match=r"model\.h5"):
        ModelFile("model.h5")
