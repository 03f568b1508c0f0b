"""Models that runs have saved: Keras loads them without this package, and they predict the same."""

import subprocess
import sys

import numpy as np
import pytest

from candle_p1.benchmark import find_benchmark
from candle_p1.data.reader import FileSet, Reader
from tests.records import read_record

pytestmark = [pytest.mark.extended, pytest.mark.parallel]

RUNS = ("nt3", "p1b1", "p1b2", "p1b3", "p1b3-conv")
LOAD_WITHOUT_PACKAGE = """
import sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "candle_p1":
            raise ImportError(name + " is forbidden here")

sys.meta_path.insert(0, Forbidden())
import keras
import numpy as np

load = keras.saving.load_model
runs, samples, *names = sys.argv[1:]
found = {}
for name in names:
    x = np.load(f"{samples}/{name}.npy")
    found[name] = load(f"{runs}/{name}/model.keras").predict(x, verbose=0)
    if name == "p1b1":
        parts = [load(f"{runs}/{name}/{part}.keras") for part in ("encoder", "decoder")]
        latent = parts[0].predict(x, verbose=0)
        found |= {"latent": latent, "decoded": parts[1].predict(latent, verbose=0)}
        best = keras.models.model_from_json(open(f"{runs}/{name}/model.json").read())
        best.load_weights(f"{runs}/{name}/best.weights.h5")
    if name.startswith("p1b3"):
        found[name + "-best"] = load(f"{runs}/{name}/best.keras").predict(x, verbose=0)
np.savez(f"{samples}/found.npz", **found)
"""


@pytest.fixture(scope="module")
def runs(trained, variants, tmp_path_factory):
    """The directory of the runs that have saved models, with a normalized network among them."""
    directory = tmp_path_factory.mktemp("saved")
    for name in RUNS[:-1]:
        (directory / name).symlink_to(trained / name)
    (directory / RUNS[-1]).symlink_to(variants / "p1b3")
    return directory


@pytest.fixture(scope="module")
def targets(runs, small_data, tmp_path_factory):
    """Writes the inputs of the test samples as files; returns their directory and the targets."""
    directory, targets = tmp_path_factory.mktemp("samples"), {}
    for name in RUNS:
        benchmark = find_benchmark(name.partition("-")[0])
        files = small_data(benchmark.name)
        params = benchmark.read_parameters(["--config_file", str(runs / name / "final_params.txt")])
        paths = {role: files / file for role, file in benchmark.recipe.roles.items()}
        reader = Reader(FileSet.at({r: paths[r] for r in benchmark.needed_files(params)}))
        test = benchmark.preprocess(benchmark.load_data(reader, params), params).test
        rows = np.arange(len(test))
        np.save(directory / f"{name}.npy", test.x[rows])
        targets[name] = test.y[rows]
    return directory, targets


@pytest.fixture(scope="module")
def found(runs, targets, tmp_path_factory):
    """What the loaded models predict."""
    samples, _ = targets
    script = tmp_path_factory.mktemp("script") / "load.py"
    script.write_text(LOAD_WITHOUT_PACKAGE)
    command = [sys.executable, "-I", script, runs, samples, *RUNS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return np.load(samples / "found.npz")


@pytest.mark.parametrize("name", RUNS)
def test_a_loaded_model_has_the_quality_that_the_record_states(name, runs, targets, found):
    record = read_record(runs / name / "run.json")
    y, predicted = targets[1][name], found[name]
    values = {key: each["value"] for key, each in record["quality"].items()}
    if name in ("nt3", "p1b2"):
        accuracy = (y.argmax(axis=1) == predicted.argmax(axis=1)).mean()
        assert values["accuracy"] == pytest.approx(accuracy)
    else:
        mse = np.square(y - predicted, dtype=np.float64).mean()
        assert values["mse" if name == "p1b1" else "loss"] == pytest.approx(mse, rel=1e-5)
    assert record["phases"]["save"]["mean_s"] > 0


def test_the_encoder_and_the_decoder_are_the_autoencoder(runs, found):
    latent = np.load(runs / "p1b1" / "latent.npz")["latent"]
    np.testing.assert_allclose(found["latent"], latent, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["decoded"], found["p1b1"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["p1b3", "p1b3-conv"])
def test_the_best_model_is_that_of_the_lowest_validation_loss(name, runs, found):
    record = read_record(runs / name / "run.json")
    losses = [epoch["metrics"]["val_loss"] for epoch in record["training"]["epochs"]]
    is_last = losses[-1] == min(losses)
    assert np.array_equal(found[name], found[f"{name}-best"]) is is_last
