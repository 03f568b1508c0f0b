from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.training.callback_state import CallbackStates, decode, encode

keras = pytest.importorskip("keras", reason="no Keras backend is installed")

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.floats(width=32).map(np.float32)
    | st.integers(-(2**63), 2**63 - 1).map(np.int64)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3)
        | st.fixed_dictionaries({"type": inner, "value": inner})
    ),
)


def same(one, two):
    if type(one) is not type(two):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, (float, np.floating)) and math.isnan(one):
        return bool(math.isnan(two))
    return one == two


@given(VALUES)
def test_values_return_from_json_as_they_were(value):
    text = json.dumps(encode(value), allow_nan=False)
    assert same(decode(json.loads(text)), value)


@pytest.mark.parametrize("value", [object(), np.zeros(3), {1, 2}, [open], {"a": b"bytes"}])
def test_other_values_are_refused(value):
    with pytest.raises(TypeError, match="cannot be saved"):
        encode(value)


class Counter(keras.callbacks.Callback):
    """As an author may write it."""

    def __init__(self, path="a"):
        super().__init__()
        self.seen, self.path, self.log = [], path, None

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(logs["val_loss"])
        self.log = object()


class Explicit(keras.callbacks.Callback):
    total = 0.0

    def checkpoint_state(self):
        return {"total": self.total}

    def restore_state(self, state):
        self.total = state["total"]


def made(path="a"):
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    callbacks = [
        keras.callbacks.ReduceLROnPlateau("val_loss", patience=2, min_delta=0.5),
        keras.callbacks.EarlyStopping("val_loss", patience=4, min_delta=0.5),
        Counter(path),
        Counter(path),
        Explicit(),
        keras.callbacks.History(),
    ]
    for callback in callbacks:
        callback.set_model(model)
        callback.on_train_begin()
    states = CallbackStates(callbacks)
    states.begin()
    model.stop_training = False
    return model, callbacks, states


def end_epochs(model, callbacks, losses, first=0):
    """Returns the learning rate after each epoch, and after which training stopped."""
    rates = []
    for epoch, loss in enumerate(losses, start=first):
        for callback in callbacks:
            callback.on_epoch_end(epoch, {"loss": 1.0, "val_loss": loss})
        rates.append((float(model.optimizer.learning_rate), model.stop_training))
    callbacks[4].total += sum(losses)
    return rates


LOSSES = [3.0, 2.8, 2.0, 1.9, 1.8, 1.75, 1.7, 1.7]


@pytest.mark.parametrize("done", range(len(LOSSES)))
def test_callbacks_go_on_as_if_they_had_never_stopped(done):
    model, callbacks, states = made()
    end_epochs(model, callbacks, LOSSES[:done])
    saved = json.loads(json.dumps(states.capture(), allow_nan=False))
    rate = float(model.optimizer.learning_rate)
    expected = end_epochs(model, callbacks, LOSSES[done:], done)
    assert expected[-1][1]  # early stopping acts

    other, restored, again = made()
    again.restore(saved)
    other.optimizer.learning_rate = rate  # as the arrays of the state say
    assert end_epochs(other, restored, LOSSES[done:], done) == expected
    for one, two in zip(callbacks, restored, strict=True):
        for name in ("seen", "total", "wait", "best", "min_delta", "history", "epoch"):
            assert getattr(one, name, None) == getattr(two, name, None)
    assert again.capture() == states.capture()


def test_settings_are_those_of_the_new_run():
    model, callbacks, states = made("old")
    end_epochs(model, callbacks, LOSSES[:2])
    _, restored, again = made("new")
    again.restore(states.capture())
    assert [restored[2].path, restored[2].seen] == ["new", LOSSES[:2]]


def test_what_is_not_plain_data_is_named_once():
    model, callbacks, states = made()
    end_epochs(model, callbacks, LOSSES[:1])
    states.capture()
    end_epochs(model, callbacks, LOSSES[1:2], 1)
    states.capture()
    assert states.lost == ["log of the callback Counter"]


def test_states_of_callbacks_that_are_gone_are_ignored():
    model, callbacks, states = made()
    end_epochs(model, callbacks, LOSSES[:3])
    fewer = CallbackStates([keras.callbacks.History()])
    fewer.begin()
    fewer.restore(states.capture())
