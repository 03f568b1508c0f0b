"""CANDLE's options around a run: early stopping, profiling, a log, a place for results."""

from __future__ import annotations

import csv
import sys

import pytest

from candle_p1.records.record import read_record


@pytest.fixture
def train(execute, benchmark_folders, tmp_path):
    """Runs a script in one process; returns (record, output)."""

    def train(name, *flags, out="out"):
        script = benchmark_folders / name / f"{name}_baseline_keras2.py"
        code, output = execute([sys.executable, script, "--output_dir", out, *flags])
        print(output)
        assert code == 0, output
        return read_record(tmp_path / out / "EXP000/RUN000/run.json"), output

    return train


def test_p1b2_stops_early_is_profiled_and_writes_where_it_is_told(train, tmp_path):
    flags = ["--dense", "8", "--epochs", "30", "--learning_rate", "1e-12"]  # nothing is learned
    flags += ["--early_stop", "True", "--patience", "2", "--profiling", "True"]
    record, output = train("p1b2", *flags, "--logfile", "run.log", "--save_path", "results")
    assert len(record["training"]["epochs"]) == 3
    assert "did not fall for 2 epochs" in record["training"]["stopped"]
    assert record["training"]["profiled"]
    profile = tmp_path / "out/EXP000/RUN000/profile"
    assert [path for path in profile.rglob("*") if path.is_file()]
    log = (tmp_path / "run.log").read_text()
    for words in ("the data are synthetic", "epoch  3/30", "test accuracy"):
        assert words in log
        assert words in output
    rows = list(csv.DictReader((tmp_path / "results/classes.csv").read_text().splitlines()))
    assert len(rows) == 10
    assert sum(int(row["num_samples"]) for row in rows) == record["data"]["num_test"]


@pytest.mark.parametrize("model", ["vae", "cvae"])
def test_p1b1s_variational_models_learn_and_their_latent_space_is_saved(train, tmp_path, model):
    import numpy as np

    flags = ["--model", model, "--dense", "64", "32", "--latent_dim", "3", "--epochs", "12"]
    flags += ["--residual", "True", "--batch_normalization", "True", "--dropout", "0.05"]
    flags += ["--alpha_dropout", "True", "--warmup_lr", "True", "--base_lr", "0.0005"]
    record, _ = train("p1b1", *flags, "--reduce_lr", "True")
    losses = [epoch["metrics"]["loss"] for epoch in record["training"]["epochs"]]
    assert losses[-1] < losses[4] < losses[0]
    assert record["plan"]["warmup_epochs"] == 5
    assert record["plan"]["warmup_learning_rate"] == 0.0005
    assert record["parameters"]["warmup_epochs"]["origin"] == "warmup_lr"
    assert record["model"]["loss"] == "binary_crossentropy"
    run = tmp_path / "out/EXP000/RUN000"
    with np.load(run / "latent.npz") as saved:
        assert saved["latent"].shape == (record["data"]["num_test"], 3)
        assert len(set(saved["cancer_type"])) > 5
    assert (run / "latent.png").read_bytes().startswith(b"\x89PNG")


def test_p1b3s_convolutions_train_and_predictions_are_drawn(train, tmp_path):
    flags = ["--config_file", "p1b3_conv_model.txt", "--cell_noise_sigma", "0.1"]
    flags += ["--pool", "3", "--train_steps", "40", "--batch_normalization", "True"]
    record, _ = train("p1b3", *flags)
    assert record["parameters"]["dense"]["value"] is None
    assert record["quality"]["loss"]["value"] < 1
    run = tmp_path / "out/EXP000/RUN000"
    for name in ("errors.png", "predictions.png"):
        assert (run / name).read_bytes().startswith(b"\x89PNG")


def test_nt3s_noise_and_locally_connected_layers(train):
    flags = ["--locally_connected", "True", "--conv", "4", "10", "5", "--pool", "4"]
    flags += ["--dense", "8", "--epochs", "2", "--add_noise", "True", "--scaling_fit", "train"]
    record, _ = train("nt3", *flags)
    assert record["status"] == "ok"
    assert record["data"]["scaling_fit"] == "train"
