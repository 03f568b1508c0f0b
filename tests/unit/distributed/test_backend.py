"""Which backend Keras computes with, in every combination of engine, variable and installation.

Keras is imported without what no run uses.
"""

import json
import os
import sys
from types import SimpleNamespace

import pytest

from candle_p1.distributed import backend
from candle_p1.distributed.backend import choose_backend
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.distributed.reducers.jax import _connect
from candle_p1.errors import SetupError


@pytest.fixture
def situation(monkeypatch):
    """Pretends which packages are installed, how Keras was imported, and what the variable says."""

    def pretend(installed=(), imported=None, told=None):
        monkeypatch.setattr(backend, "find_spec", lambda name: name if name in installed else None)
        if imported is None:
            monkeypatch.delitem(sys.modules, "keras", raising=False)
        else:
            keras = SimpleNamespace(backend=SimpleNamespace(backend=lambda: imported))
            monkeypatch.setitem(sys.modules, "keras", keras)
        monkeypatch.setenv("KERAS_BACKEND", told or "")  # Keras takes an empty one for none

    return pretend


BOTH = ("tensorflow", "jax")


@pytest.mark.parametrize(
    ("engine", "installed", "imported", "told", "expected"),
    [
        ("auto", BOTH, None, None, "tensorflow"),
        ("auto", ("jax",), None, None, "jax"),
        ("auto", (), None, None, "tensorflow"),
        ("auto", ("jax",), None, "tensorflow", "tensorflow"),
        ("auto", BOTH, "jax", None, "jax"),
        ("jax", BOTH, "jax", "jax", "jax"),
        ("horovod", ("jax",), None, None, "tensorflow"),
        ("horovod", BOTH, None, "jax", "horovod computes with tensorflow, but KERAS_BACKEND is"),
        ("jax", BOTH, "tensorflow", None, "jax needs jax, but Keras is already imported with ten"),
        ("auto", BOTH, "tensorflow", "jax", "is jax, but Keras is already imported with tensorfl"),
        ("auto", BOTH, None, "torch", "KERAS_BACKEND is torch"),
        ("horovod", BOTH, "torch", None, "already imported with torch"),
    ],
)
def test_the_choice_is_told_to_keras_and_a_contradiction_changes_nothing(
    situation, engine, installed, imported, told, expected
):
    situation(installed, imported, told)
    if " " in expected:
        with pytest.raises(SetupError, match=expected):
            choose_backend(engine)
        expected = told or ""
    else:
        assert choose_backend(engine) == expected
    assert os.environ["KERAS_BACKEND"] == expected


def test_tensorflow_is_refused_without_its_docstrings(execute):
    program = "from candle_p1.distributed.backend import choose_backend; choose_backend('horovod')"
    code, output = execute([sys.executable, "-OO", "-c", program])
    assert (code, "TensorFlow reads its docstrings" in output) == (1, True), output


@pytest.mark.parametrize(
    ("variables", "direct"),
    [
        ({}, "127.0.0.1"),
        ({"no_proxy": "a,b"}, "a,b,127.0.0.1"),
        ({"no_grpc_proxy": "c", "no_proxy": "a"}, "c,127.0.0.1"),
    ],
)
def test_jax_reaches_rank_0_without_a_proxy(monkeypatch, variables, direct):
    for name in ("no_grpc_proxy", "no_proxy"):
        monkeypatch.setenv(name, variables.get(name, ""))
    seen = []
    config = SimpleNamespace(update=lambda name, value: None)
    start = SimpleNamespace(initialize=lambda *_, **__: seen.append(dict(os.environ)))
    jax = SimpleNamespace(config=config, devices=list, distributed=start)
    monkeypatch.setitem(sys.modules, "jax", jax)
    _connect(SerialCommunicator(), "127.0.0.1:5000")
    assert seen[0]["no_grpc_proxy"] == direct


PROGRAM = """
import gc, json, sys, warnings
from candle_p1.distributed.backend import LATER, choose_backend, import_keras
choose_backend()
import_keras()
for module in list(sys.modules.values()):  # as AutoGraph does; it runs no module
    hasattr(module, "__file__"), hasattr(module, "__wrapped__")
found = {"early": [name for name in ("sklearn", "matplotlib") if name in sys.modules]}
found["parts"] = sorted(LATER & set(sys.modules))
found["frozen"] = gc.get_freeze_count() > 0
found["collects"] = gc.isenabled()
import keras
model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
keras.wrappers.SKLearnRegressor(model)
found["base"] = "sklearn.base" in sys.modules
found["shows"] = callable(keras.visualization.plot_image_gallery)
found["later"] = [name for name in ("sklearn", "matplotlib") if name in sys.modules]
found["type"] = type(keras.wrappers).__name__
found["names"] = "SKLearnClassifier" in dir(keras._tf_keras.keras.wrappers)
found["unknown"] = hasattr(keras.wrappers, "SKLearnNothing")
print(json.dumps(found))
"""


def test_parts_that_no_run_uses_are_imported_when_they_are_used(succeed):
    pytest.importorskip("keras", reason="no Keras backend is installed")
    printed = succeed([sys.executable, "-W", "error::ImportWarning", "-c", PROGRAM])
    found = json.loads(printed.splitlines()[-1])
    # If Keras had other parts, those would import what is to be imported later.
    assert {"keras.wrappers", "keras.src.visualization"} <= set(found.pop("parts"))
    assert found == {
        **{"early": [], "later": ["sklearn", "matplotlib"], "type": "module", "unknown": False},
        **dict.fromkeys(("frozen", "collects", "base", "shows", "names"), True),
    }
