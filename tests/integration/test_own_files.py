"""Benchmarks that read no tables: one whose model has several inputs and outputs, and MNIST."""

import json

import numpy as np
import pytest

from tests.conftest import CANDLE_P1, ROOT
from tests.records import read_record

pytestmark = pytest.mark.extended

ARRAYS = ROOT / "tests/files/arrays"


@pytest.fixture
def data(tmp_path):
    random = np.random.default_rng(0)
    numbers = random.normal(size=(200, 4)).astype(np.float32)
    np.save(tmp_path / "train.npy", numbers)
    np.savez(tmp_path / "test.npz", numbers=numbers[:70])
    digits = {
        f"{kind}_{part}": random.integers(top, size=(num, *shape), dtype=np.uint8)
        for part, num in (("train", 320), ("test", 96))
        for kind, top, shape in (("x", 256, (28, 28)), ("y", 10, ()))
    }
    np.savez_compressed(tmp_path / "mnist.npz", **digits)
    return tmp_path


@pytest.mark.parallel
def test_they_are_trained_on_two_ranks_and_their_files_are_recorded(data, train_all):
    few = f"--epochs 2 --train_steps 5 --test_steps 3 --train_data {data / 'mnist.npz'}"
    runs = {"arrays": f"{ARRAYS} --data_dir {data}", "mnist": f"{ROOT / 'examples/mnist'} {few}"}
    place = train_all(2, runs)
    of_mnist = read_record(place / "mnist/run.json")["data"]
    assert (of_mnist["synthetic"], of_mnist["num_train"]) == (False, 320)
    digits = of_mnist["files"]["digits"]
    assert digits["path"] == str(data / "mnist.npz")
    assert len(digits["values_sha256"]) == 64
    record = read_record(place / "arrays/run.json")
    files = record["data"]["files"]
    for role, name in {"train": "train.npy", "test": "test.npz"}.items():
        assert files[role]["path"] == str(data / name)
    assert all(facts["file_bytes"] and facts["sha256"] for facts in files.values())
    assert files["train"]["num_rows"] == 200
    assert files["train"]["load"]["max_s"] > 0
    assert "load" not in files["test"]
    assert record["model"]["loss"] == "total: mse, sign: binary_crossentropy"
    assert {"sign_accuracy", "total_mae"} <= set(record["quality"])


def test_there_are_no_loaders_to_compare(data, execute):
    code, output = execute([*CANDLE_P1, "bench", "load", ARRAYS, "--data_dir", "."])
    assert code == 2
    assert output.count("\n") == 1
    assert "arrays reads no table" in output


def test_its_steps_are_compared_with_plain_keras(data, succeed):
    argv = ["step", ARRAYS, "--data_dir", ".", "--rounds", "1", "--json", "step.json"]
    succeed([*CANDLE_P1, "bench", *argv])
    report = json.loads((data / "step.json").read_text())
    assert [result["kernels"] for result in report["results"]] == ["fast", "plain"]
    differences = report["differences"]["plain Keras"]
    assert differences["loss"] < 1e-5
    assert 0 <= differences["update"] < 1e-3
