"""Keras is imported without what no run uses; a process of its own imports it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("keras", reason="no Keras backend is installed")

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


def test_parts_that_no_run_uses_are_imported_when_they_are_used():
    done = subprocess.run(
        [sys.executable, "-W", "error::ImportWarning", "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # If Keras had other parts, those would import what is to be imported later.
    assert {"keras.wrappers", "keras.src.visualization"} <= set(found.pop("parts"))
    assert found == {
        **{"early": [], "later": ["sklearn", "matplotlib"], "type": "module", "unknown": False},
        **dict.fromkeys(("frozen", "collects", "base", "shows", "names"), True),
    }
