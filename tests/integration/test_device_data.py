"""Samples on the device and blocks of steps train as streamed batches do: each kind of inputs.

They are equal bit for bit, but for NT3: within the loop, XLA adds up the gradient of a convolution
in another order, which may change the last bit. One rank trains where none of TensorFlow, Horovod
and mpi4py is found.
"""

import io
import zipfile

import numpy as np
import pytest

from tests.integration.conftest import NARROW
from tests.records import read_record

pytestmark = [pytest.mark.extended, pytest.mark.jax_engine]

STEPS = "--epochs 2 --train_steps 21 --val_steps 3 --test_steps 2 --power none --save_model True"
RUNS = {
    "nt3": NARROW,
    "p1b1": "p1b1 --model vae --dense 32",
    "p1b3": "p1b3 --dense 16 --cell_noise_sigma 0.1 --dropout 0.1",
}
NOT_NEEDED = ("tensorflow", "horovod", "mpi4py")
HIDE = f"import sys\nsys.modules.update(dict.fromkeys({NOT_NEEDED}))\n"
"""Makes them look as if they were not installed, where Python reads this at its start."""


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.parallel)])
def test_training_is_as_with_streamed_batches(train_all, num_ranks, tmp_path):
    ways = {"placed": "", "streamed": "--device_data_mb 0"}
    flags = f"{STEPS} --check_replicas False --engine jax"
    # Ranks differ in their batches, whatever the benchmark.
    chosen = {name: RUNS[name] for name in (RUNS if num_ranks == 1 else ("p1b3",))}
    runs = {f"{n}-{way}": f"{r} {flags} {f}" for n, r in chosen.items() for way, f in ways.items()}
    if num_ranks > 1:  # rank 0 alone traces; blocks are the same on all ranks nevertheless
        runs["traced"] = f"{RUNS['p1b3']} {flags} --step_trace True"
    (tmp_path / "sitecustomize.py").write_text(HIDE if num_ranks == 1 else "")
    settings = {"PYTHONPATH": str(tmp_path)}
    directory = train_all(num_ranks, runs, limit_s=900, settings=settings)
    if num_ranks > 1:
        traced = read_record(directory / "traced/run.json")["training"]
        assert traced["device_data"]["largest_block"] == 1
    for name in chosen:
        placed, streamed = (directory / f"{name}-{way}" for way in ways)
        records = [read_record(each / "run.json") for each in (placed, streamed)]
        facts = [record["training"]["device_data"] for record in records]
        assert records[0]["num_ranks"] == num_ranks
        assert records[0]["quality"]["loss"]["value"] > 0
        assert facts[0]["copied_bytes"] + facts[0]["in_place_bytes"] > 0
        assert facts[0]["largest_block"] > 1
        assert facts[1]["largest_block"] == 1
        assert "may be used" in facts[1]["streamed_because"]
        placed, streamed = learned(placed), learned(streamed)
        assert placed.keys() == streamed.keys()
        for part, values in placed.items():
            most = np.abs(values).max() * (2e-6 if name == "nt3" else 0.0)
            np.testing.assert_allclose(values, streamed[part], rtol=0, atol=most, err_msg=part)


def learned(directory):
    """Returns the arrays of the saved model, and the metrics of all epochs, by name."""
    import h5py

    rows = np.genfromtxt(directory / "history.csv", delimiter=",", names=True)
    found = {name: rows[name] for name in rows.dtype.names}

    def note(name, item):
        if hasattr(item, "dtype"):
            found[name] = item[()]

    with (
        zipfile.ZipFile(directory / "model.keras") as file,
        h5py.File(io.BytesIO(file.read("model.weights.h5"))) as h5,
    ):
        h5.visititems(note)
    assert any("layers" in name for name in found)
    return found
