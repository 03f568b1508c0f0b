"""NT3 as users start it: the script under mpirun, the command line, a driver that imports it."""

from __future__ import annotations

import csv
import sys

import pytest

from candle_p1.records.environment import available_cores
from candle_p1.records.record import read_record
from tests.integration.ranks import assert_ranks

SMALL_MODEL = ["--conv", "8", "20", "1", "--pool", "10", "--dense", "16"]
"""A network that trains in a second, for what is not about learning."""


def record_in(directory, run="RUN000"):
    return read_record(directory / "EXP000" / run / "run.json")


@pytest.fixture
def train(mpirun, execute, nt3_script, tmp_path):
    """Runs the script; returns (record, output)."""

    def train(num_ranks, *flags, out="out"):
        words = [nt3_script, "--output_dir", out, *flags]
        code, output = execute(
            mpirun(num_ranks, *words) if num_ranks > 1 else [sys.executable, *words]
        )
        print(output)
        assert code == 0, output
        return record_in(tmp_path / out), output

    return train


@pytest.mark.parallel
def test_the_published_network_learns_with_epochs_and_not_at_once(train, tmp_path):
    record, output = train(2, "--size", "small", "--epochs", "96", "--epochs_scaling", "strong")
    assert record["status"] == "ok"
    assert record["plan"]["epochs_per_rank"] == 48
    assert record["plan"]["learning_rate"] == 0.002
    assert record["plan"]["steps_per_epoch"] == 14
    share = max(1, len(available_cores()) // 2)
    assert_ranks(record, "mpirun", [(0, 0), (0, 1)], threads=share)
    assert record["data"]["synthetic"]
    assert record["distributed"]["averaging_checked"]
    assert record["quality"]["accuracy"]["value"] >= 0.95
    assert record["quality"]["accuracy"]["naive"] == 0.5
    assert len(record["training"]["epochs"]) == 48
    for phase in ("load", "preprocess", "build", "broadcast", "train", "evaluate"):
        assert len(record["phases"][phase]["per_rank_s"]) == 2
    parts = record["phases"]["broadcast"]["parts"]
    assert set(parts) == {"wait", "transfer"}
    assert "synthetic" in output
    assert "naive predictor 0.5" in output
    assert str(tmp_path / "out/EXP000/RUN000/run.json") in output
    directory = tmp_path / "out/EXP000/RUN000"
    history = list(csv.DictReader((directory / "history.csv").read_text().splitlines()))
    assert [row["epoch"] for row in history] == [str(epoch) for epoch in range(48)]
    recorded = record["training"]["epochs"][-1]["metrics"]["val_accuracy"]
    assert float(history[-1]["val_accuracy"]) == pytest.approx(recorded)
    assert (directory / "rank-0001.log").exists()

    record, _ = train(2, "--epochs", "16", "--epochs_scaling", "strong", out="short")
    assert record["plan"]["epochs_per_rank"] == 8
    assert record["quality"]["accuracy"]["value"] <= 0.9


@pytest.mark.parallel
def test_a_run_repeats_bit_for_bit_and_its_parameters_read_back(train, tmp_path):
    flags = [*SMALL_MODEL, "--epochs", "4", "--warmup_epochs", "1", "--check_replicas", "True"]
    first, _ = train(2, *flags)
    again = tmp_path / "out/EXP000/RUN000/final_params.txt"
    second, _ = train(2, "--config_file", again, out="again")
    other, _ = train(2, *flags, "--rng_seed", "5", out="other")

    def metrics(record):
        return [epoch["metrics"] for epoch in record["training"]["epochs"]]

    assert metrics(first) == metrics(second) != metrics(other)
    assert first["quality"] == second["quality"]
    assert second["parameters"]["epochs"]["origin"].startswith("config file")


@pytest.mark.parallel
def test_weak_scaling_batch_step_level_and_mixed_precision(train):
    record, _ = train(2, *SMALL_MODEL, "--epochs", "3", "--epochs_scaling", "weak")
    assert record["plan"]["epochs_per_rank"] == 3
    flags = ["--data_parallel", "batch_step", "--batch_scaling", "sqrt", "--data_type", "f16"]
    record, _ = train(2, *SMALL_MODEL, "--epochs", "2", *flags, out="shards")
    assert record["plan"]["epochs_per_rank"] == 2
    assert record["plan"]["batch_size"] == 28
    assert record["plan"]["samples_per_epoch"] == 140
    assert record["model"]["data_type"] == "f16"


@pytest.mark.parallel
def test_loaders_and_ranks_read_bit_identical_matrices(train):
    digests = set()
    for num_ranks, loader in ((1, "original"), (2, "chunked")):
        flags = ["--loader", loader, "--epochs", str(num_ranks), "--train_steps", "2"]
        record, _ = train(num_ranks, *SMALL_MODEL, *flags, out=loader)
        assert record["data"]["loader"] == loader
        assert record["plan"]["steps_per_epoch"] == 2
        for file in record["data"]["files"].values():
            assert len(file["load"]["per_rank_s"]) == num_ranks
        digests.add(tuple(file["values_sha256"] for file in record["data"]["files"].values()))
    assert len(digests) == 1


def test_runs_are_numbered_and_an_explicit_one_is_never_written_over(
    train, execute, nt3_script, tmp_path
):
    flags = [*SMALL_MODEL, "--epochs", "1", "--train_steps", "1"]
    train(1, *flags)
    code, output = execute([sys.executable, nt3_script, "--output_dir", "out", *flags])
    assert code == 0, output
    assert record_in(tmp_path / "out", "RUN001")["status"] == "ok"
    flags += ["--run_id", "RUN001"]
    code, output = execute([sys.executable, nt3_script, "--output_dir", "out", *flags])
    assert code == 2
    assert "already holds the record of a run" in output


def test_made_files_that_are_named_are_known_as_synthetic(train, execute, tmp_path):
    command = [sys.executable, "-m", "candle_p1.cli", "data", "make", "nt3"]
    code, output = execute([*command, "--size", "small", "--out", "made"])
    assert code == 0, output
    files = ["--train_data", "made/nt_train2.csv", "--test_data", "made/nt_test2.csv"]
    record, _ = train(1, *SMALL_MODEL, *files, "--epochs", "1", "--train_steps", "1")
    assert record["data"]["synthetic"]
    path = tmp_path / "made/nt_train2.csv"
    assert record["data"]["files"]["train"]["path"] == str(path)
    assert record["data"]["files"]["train"]["file_bytes"] == path.stat().st_size
    assert record["parameters"]["train_data"]["value"] == str(path)


@pytest.mark.parallel
def test_the_command_line_starts_mpirun_itself(mpirun, execute, tmp_path):
    command = [sys.executable, "-m", "candle_p1.cli", "run", "nt3", "--np", "3", "--"]
    flags = [*SMALL_MODEL, "--epochs", "3", "--train_steps", "2", "--output_dir", "out"]
    code, output = execute([*command, *flags])
    assert code == 0, output
    assert "mpirun -np 3" in output
    assert record_in(tmp_path / "out")["num_ranks"] == 3


def test_the_doctor_finds_the_installation_well(mpirun, execute):
    code, output = execute([sys.executable, "-m", "candle_p1.cli", "doctor"])
    assert code == 0, output
    for name in ("keras", "MPI library", "launcher", "Horovod", "cores", "memory", "GPUs"):
        assert f"\n{name}" in "\n" + output
    assert "built with mpi" in output
