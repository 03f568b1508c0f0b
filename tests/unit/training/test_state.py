"""The arrays of a model's state, and the states of callbacks.

That training goes on from them bit for bit is in test_loop.py.
"""

import json
import tracemalloc

import numpy as np
import pytest

from candle_p1.errors import CandleError

keras = pytest.importorskip("keras", reason="no Keras backend is installed")
state = pytest.importorskip("candle_p1.training.state")


def made(optimizer=None):
    keras.backend.clear_session()
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
    model.compile(optimizer or keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model


def test_names_do_not_depend_on_the_name_of_the_optimizer():
    class Distributed(keras.optimizers.Adam):
        pass

    one, two = (
        set(state.replicated_arrays(made(keras.optimizers.LossScaleOptimizer(kind()))))
        for kind in (keras.optimizers.Adam, Distributed)
    )
    assert one == two
    assert {name for name in one if name.endswith("-2")}  # the inner optimizer's iterations


def test_weights_alone_leave_the_optimizer_as_it_is():
    model, other = made(), made()
    model.train_on_batch(np.ones((2, 4)), np.ones((2, 3)))
    arrays = {
        name: keras.ops.convert_to_numpy(array._variable)
        for name, array in state.replicated_arrays(model, with_optimizer=False).items()
    }
    state.restore_replicated(other, arrays.__getitem__, arrays)
    assert int(other.optimizer.iterations) == 0
    for found, expected in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_missing_state_of_a_rank_is_an_error():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dropout(0.5)])
    with pytest.raises(CandleError, match="seed/0"):
        state.restore_own(model, {}, within_epoch=False)


def test_a_variable_is_copied_once_and_no_view_of_it_stays():
    """TensorFlow would copy it at each update, as long as anything refers to its memory."""
    variable, out = keras.Variable(np.zeros((1000, 1000), "float32")), np.empty((1000, 1000), "f4")
    array, places = state.LiveArray(variable), set()
    tracemalloc.start()
    try:
        array.copy_into(slice(0, 1000), out)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < out.nbytes / 10
    if keras.backend.backend() == "tensorflow":
        for _ in range(6):
            variable.value.assign_add(np.ones((1000, 1000), "float32"))
            array.copy_into(slice(0, 1000), out)
            places.add(state.view_of(variable).__array_interface__["data"][0])
        assert (out == 6).all()
    assert len(places) <= 2  # the first update may move it


class Counter(keras.callbacks.Callback):
    """As an author may write it."""

    def __init__(self):
        super().__init__()
        self.total = np.float32(0)

    def on_epoch_end(self, epoch, logs=None):
        self.total += np.float32(logs["val_loss"])


class Saved(Counter):
    def checkpoint_state(self):
        return {"total": self.total, "worst": float("inf")}

    def restore_state(self, state):
        self.total = np.float32(state["total"])
        assert state["worst"] == float("inf")


class OwnStopping(keras.callbacks.EarlyStopping):
    pass


LOSSES = [3.0, 2.8, 2.0, 1.9, 1.8, 1.75, 1.7, 1.7]


def listening():
    model = made(keras.optimizers.SGD(0.1))
    callbacks = [
        keras.callbacks.ReduceLROnPlateau("val_loss", patience=2, min_delta=0.5),
        OwnStopping("val_loss", patience=4, min_delta=0.5),
        Saved(),
        Saved(),
        keras.callbacks.History(),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
    ]
    for callback in callbacks:
        callback.set_model(model)
        callback.on_train_begin()
    model.stop_training = False
    return model, callbacks, state.CallbackStates(callbacks)


def end_epochs(model, callbacks, losses, first=0):
    """Returns the learning rate after each epoch, and whether training stopped."""
    rates = []
    for epoch, loss in enumerate(losses, start=first):
        for callback in callbacks:
            callback.on_epoch_end(epoch, {"loss": 1.0, "val_loss": loss})
        rates.append((float(model.optimizer.learning_rate), model.stop_training))
    return rates


@pytest.mark.parametrize("num_before", range(len(LOSSES)))
def test_callbacks_go_on_as_if_they_had_never_stopped(num_before):
    model, callbacks, states = listening()
    end_epochs(model, callbacks, LOSSES[:num_before])
    captured = json.loads(json.dumps(states.capture()))
    rate = float(model.optimizer.learning_rate)
    expected = end_epochs(model, callbacks, LOSSES[num_before:], num_before)
    assert expected[-1][1]  # early stopping acts

    other, restored, again = listening()
    again.restore(captured)
    other.optimizer.learning_rate = rate  # as the arrays of the state say
    assert end_epochs(other, restored, LOSSES[num_before:], num_before) == expected
    for one, two in zip(callbacks, restored, strict=True):
        for name in ("total", "wait", "best", "min_delta", "history", "epoch"):
            assert getattr(one, name, None) == getattr(two, name, None)
    assert again.capture() == states.capture()
    assert states.unknown == ["OwnStopping"]  # its own attributes, if it had any, would be lost
    state.CallbackStates([]).restore(captured)  # of callbacks that are gone


def test_callbacks_that_may_lose_state_are_named_once():
    stopping = keras.callbacks.EarlyStopping(restore_best_weights=True)
    callbacks = [Counter(), Counter(), Saved(), stopping, keras.callbacks.TerminateOnNaN()]
    assert state.CallbackStates(callbacks).unknown == ["Counter", "EarlyStopping"]


def test_a_state_that_is_no_json_is_an_error():
    callback = Saved()
    callback.total = object()
    with pytest.raises(CandleError, match="callback Saved"):
        state.CallbackStates([callback]).capture()
