"""The arrays of a model's state, with all that its variables can be."""

from __future__ import annotations

import functools
import tracemalloc

import numpy as np
import pytest

from candle_p1.errors import CandleError

keras = pytest.importorskip("keras", reason="no Keras backend is installed")
state = pytest.importorskip("candle_p1.training.state")

extended = functools.partial(pytest.param, marks=pytest.mark.extended)


def made(units=3, *, scaled=False, **settings):
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((4,)),
            layers.Dense(units),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(1),
        ]
    )
    optimizer = keras.optimizers.Adam(0.01, **settings)
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model


X, Y = np.random.default_rng(0).normal(size=(2, 16, 4)).astype("float32")


def trained(model, num_steps):
    for _ in range(num_steps):
        logs = model.train_on_batch(X, Y[:, :1], return_dict=True)
    return [keras.ops.convert_to_numpy(v) for v in model.variables], logs


def saved(model, **which):
    """Copies arrays as a writer does, those of several rows in two parts."""
    arrays = {}
    for name, source in state.replicated_arrays(model, **which).items():
        array = arrays[name] = np.full(source.shape, 7, source.dtype)
        assert source.nbytes == array.nbytes
        if source.shape:
            half = source.shape[0] // 2
            source.copy_into(slice(0, half), array[:half])
            source.copy_into(slice(half, source.shape[0]), array[half:])
        else:
            source.copy_into(slice(0, 1), array)
    return arrays


@pytest.mark.parametrize(
    "settings",
    [{}, extended({"scaled": True}), extended({"gradient_accumulation_steps": 2})],
)
def test_training_goes_on_bit_for_bit(settings):
    model = made(**settings)
    trained(model, 4)
    arrays, own = saved(model), state.own_arrays(model, within_epoch=True)
    expected, logs = trained(model, 4)

    other = made(**settings)
    other.train_on_batch(X, Y[:, :1])  # builds the metrics
    state.restore_replicated(other, arrays.__getitem__, arrays)
    state.restore_own(other, own, within_epoch=True)
    found, metrics = trained(other, 4)
    assert metrics == logs
    assert [v.path for v in model.variables] == [v.path for v in other.variables]
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("left_out", [extended("optimizer/"), "weights/", extended("seed/")])
def test_nothing_that_is_saved_could_be_left_out(left_out):
    model = made(scaled=True)
    trained(model, 4)
    arrays, own = saved(model), state.own_arrays(model, within_epoch=True)
    expected, _ = trained(model, 4)
    other = made(scaled=True)
    other.train_on_batch(X, Y[:, :1])
    fresh = saved(other) | state.own_arrays(other, within_epoch=True)
    for kept in (arrays, own):
        kept.update({name: fresh[name] for name in kept if name.startswith(left_out)})
    state.restore_replicated(other, arrays.__getitem__, arrays)
    state.restore_own(other, own, within_epoch=True)
    found, _ = trained(other, 4)
    equal = [np.array_equal(one, two) for one, two in zip(found, expected, strict=True)]
    assert not all(equal)


def test_metrics_go_on_within_an_epoch():
    model = made()
    model.fit(X, Y[:, :1], epochs=1, verbose=0)
    own = state.own_arrays(model, within_epoch=True)
    metrics = model.get_metrics_result()
    model.reset_metrics()
    state.restore_own(model, own, within_epoch=True)
    assert model.get_metrics_result() == metrics
    assert not any(
        name.startswith("metric/") for name in state.own_arrays(model, within_epoch=False)
    )


def test_names_do_not_depend_on_the_name_of_the_optimizer():
    model = made(scaled=True)
    names = set(state.replicated_arrays(model))

    class Distributed(keras.optimizers.Adam):
        pass

    other = made()
    other.compile(keras.optimizers.LossScaleOptimizer(Distributed()), "mse", jit_compile=False)
    other.optimizer.build(other.trainable_variables)
    assert set(state.replicated_arrays(other)) == names
    assert {name for name in names if name.endswith("-2")}  # the inner optimizer's iterations


def test_weights_alone_leave_the_optimizer_as_it_is():
    model = made()
    trained(model, 2)
    arrays = saved(model, with_optimizer=False)
    assert all(name.startswith("weights/") for name in arrays)
    other = made()
    state.restore_replicated(other, arrays.__getitem__, arrays)
    assert int(other.optimizer.iterations) == 0
    for one, two in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)


def specs(model):
    return {name: (each.shape, each.dtype) for name, each in saved(model).items()}


def test_differences_are_named():
    model, wider = made(), made(units=5)
    assert state.differences(model, specs(model)) == []
    found = state.differences(model, specs(wider))
    kernel = next(clause for clause in found if "dense/kernel" in clause)
    assert kernel == "weights/sequential/dense/kernel has the shape (4, 5) there and (4, 3) here"
    fewer = specs(model)
    del fewer["weights/sequential/dense/bias"]
    assert state.differences(model, fewer) == ["it has no weights/sequential/dense/bias"]
    more = specs(model) | {"weights/more": ((1,), "float32")}
    assert state.differences(model, more) == ["the model has no weights/more"]
    other = specs(model) | {"weights/sequential/dense/bias": ((3,), "float64")}
    expected = "weights/sequential/dense/bias is float64 there and float32 here"
    assert state.differences(model, other) == [expected]


def test_a_missing_state_of_a_rank_is_an_error():
    model = made()
    with pytest.raises(CandleError, match="seed/0"):
        state.restore_own(model, {}, within_epoch=False)


def test_an_array_is_copied_without_a_temporary_copy():
    variable = keras.Variable(np.ones((1000, 1000), "float32"))
    array, out = state.LiveArray(variable), np.zeros((1000, 1000), "float32")
    tracemalloc.start()
    try:
        array.copy_into(slice(0, 1000), out)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (out == 1).all()
    assert peak_bytes < array.nbytes / 10


def test_a_view_does_not_outlive_the_copy():
    """TensorFlow would copy the variable, as long as anything refers to its memory."""
    if keras.backend.backend() != "tensorflow":
        pytest.skip("the memory of TensorFlow's variables")
    variable = keras.Variable(np.zeros((1000, 1000), "float32"))

    def address():
        return state.view_of(variable).__array_interface__["data"][0]

    places, out = set(), np.empty((1000, 1000), "float32")
    for number in range(6):
        state.LiveArray(variable).copy_into(slice(0, 1000), out)
        assert (out == number).all()
        variable.value.assign_add(np.ones((1000, 1000), "float32"))
        places.add(address())
    assert len(places) <= 2  # the first update may move it
    held = state.view_of(variable)
    variable.value.assign_add(np.ones((1000, 1000), "float32"))
    assert address() != held.__array_interface__["data"][0]
    assert (held == number + 1).all()
