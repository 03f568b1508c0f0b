"""CANDLE's options: early stopping, profiling, a log file, result files, kinds of models."""

from __future__ import annotations

import csv
from importlib.util import find_spec

import numpy as np
import pytest

from tests.records import read_record

pytestmark = pytest.mark.extended

HAS_TENSORBOARD = find_spec("tensorflow") is not None  # with which Keras writes its logs
P1B1 = (
    "p1b1 --dense 64 32 --latent_dim 3 --epochs 12 --residual True --batch_normalization True"
    " --dropout 0.05 --alpha_dropout True --warmup_lr True --base_lr 0.0005 --reduce_lr True"
)
RUNS = {
    "vae": f"{P1B1} --model vae --learning_rate 0.001 --tb {HAS_TENSORBOARD}",
    "cvae": f"{P1B1} --model cvae",
    # At this learning rate the loss does not fall.
    "p1b2": "p1b2 --dense 8 --epochs 30 --learning_rate 1e-12 --early_stop True --patience 2"
    " --profiling True --logfile run.log --save_path results",
    "p1b3": "p1b3 --config_file p1b3_conv_model.txt --cell_noise_sigma 0.1"
    " --train_samples 4050 --batch_normalization True",
    "nt3": "nt3 --locally_connected True --conv 4 10 5 --pool 4 --dense 8 --epochs 2"
    " --add_noise True --scaling_fit train",
}
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def directory(train_all):
    """Holds a directory for each of RUNS, trained in one process."""
    return train_all(1, RUNS)


def test_p1b2_stops_early_is_profiled_and_writes_where_it_is_told(directory):
    record = read_record(directory / "p1b2/run.json")
    assert len(record["training"]["epochs"]) == 3
    assert record["training"]["stopped"]
    assert record["training"]["profiled"]
    assert [path for path in (directory / "p1b2/profile").rglob("*") if path.is_file()]
    log = (directory.parent / "run.log").read_text()
    assert "epoch  3/30" in log
    assert "trained 3 of 30 epochs: early_stop" in log
    rows = csv.DictReader((directory.parent / "results/classes.csv").read_text().splitlines())
    num_samples = [int(row["num_samples"]) for row in rows]
    assert len(num_samples) == 10
    assert sum(num_samples) == record["data"]["num_test"]


@pytest.mark.parametrize("model", ["vae", "cvae"])
def test_p1b1s_variational_models_learn_and_their_latent_space_is_saved(directory, model):
    record = read_record(directory / model / "run.json")
    epochs = [epoch["metrics"] for epoch in record["training"]["epochs"]]
    losses = [epoch["loss"] for epoch in epochs]
    assert losses[-1] < losses[4] < losses[0]
    names = {"loss", "xent", "corr", "mse"}
    assert set(epochs[0]) == {*names, *(f"val_{name}" for name in names), "learning_rate"}
    rates = [epoch["learning_rate"] for epoch in epochs[:6]]
    step = 0.0001 if model == "vae" else 0  # to learning_rate, or base_lr for a batch of 100
    assert rates == pytest.approx([0.0005 + step * epoch for epoch in range(6)])
    assert {"loss", "xent", "mse", "r2", "correlation"} <= set(record["quality"])
    assert (directory / model / "tensorboard").exists() == (model == "vae" and HAS_TENSORBOARD)
    assert record["plan"]["warmup_epochs"] == 5
    assert record["plan"]["warmup_learning_rate"] == 0.0005
    assert record["parameters"]["warmup_epochs"]["origin"] == "flag --warmup_lr"
    assert record["model"]["loss"] == "binary_crossentropy"
    with np.load(directory / model / "latent.npz") as saved:
        assert saved["latent"].shape == (record["data"]["num_test"], 3)
        assert len(set(saved["cancer_type"])) > 5
    assert (directory / model / "latent.png").read_bytes().startswith(PNG)


def test_p1b3s_convolutions_train_and_predictions_are_drawn(directory):
    record = read_record(directory / "p1b3/run.json")
    assert record["parameters"]["dense"]["value"] is None
    assert record["data"]["num_train"] == 4050
    assert (record["plan"]["steps_per_epoch"], record["plan"]["samples_per_epoch"]) == (40, 4000)
    assert record["quality"]["loss"]["value"] < 1
    drugs = record["data"]["joins"][2]
    lost = drugs["num_left"] - drugs["num_matched"]
    assert f"{lost} of {drugs['num_left']:,} drugs in P1B3_dose_response" in record["warnings"][-1]
    for name in ("errors.png", "predictions.png"):
        assert (directory / "p1b3" / name).read_bytes().startswith(PNG)


def test_nt3s_noise_and_locally_connected_layers(directory):
    record = read_record(directory / "nt3/run.json")
    assert record["status"] == "ok"
    assert record["data"]["scaling_fit"] == "train"
