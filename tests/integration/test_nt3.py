"""NT3 on one and two ranks: what it learns, how its runs repeat, and what they write."""

from __future__ import annotations

import csv
import os
import shutil
import sys

import pytest

from candle_p1.records.environment import available_cores
from tests.integration.ranks import assert_ranks
from tests.mllog_check import check_mllog
from tests.records import per_rank, read_record

pytestmark = pytest.mark.extended

SMALL = "nt3 --conv 8 20 1 --pool 10 --dense 16"
"""A network that trains in a second, for what is not about learning."""
REPEATED = f"{SMALL} --epochs 4 --warmup_epochs 1 --check_replicas True"
LIMITED = f"{SMALL} --train_steps 2"
OF_TWO = {
    "strong": "nt3 --size small --epochs 96 --epochs_scaling strong",
    "short": "nt3 --epochs 16 --epochs_scaling strong",
    "first": REPEATED,
    "again": "nt3 --config_file EXP000/first/final_params.txt",
    "other-seed": f"{REPEATED} --rng_seed 5",
    "weak": f"{SMALL} --epochs 3 --epochs_scaling weak",
    "chunked": f"{LIMITED} --epochs 2 --loader chunked",
    "formats": f"{SMALL} --epochs 4 --mllog True --tensorboard True",
    "shards": f"{SMALL} --epochs 2 --data_parallel batch_step --batch_scaling sqrt --data_type f16",
}


@pytest.fixture(scope="module")
def git_calls(tmp_path_factory):
    """The file to which a program in place of git writes the rank that calls it."""
    return tmp_path_factory.mktemp("git") / "calls"


@pytest.fixture(scope="module")
def of_two(train_all, git_calls):
    """Returns the directory of a run of two ranks, by its name."""
    git = git_calls.with_name("git")
    git.write_text(
        f'#!/bin/sh\necho "$OMPI_COMM_WORLD_RANK" >> {git_calls}\n'
        f'exec {shutil.which("git") or "false"} "$@"\n'
    )
    git.chmod(0o755)
    path = f"{git.parent}{os.pathsep}{os.environ['PATH']}"
    return train_all(2, OF_TWO, settings={"PATH": path}).joinpath


@pytest.fixture(scope="module")
def of_one(train_all):
    """Returns the directory of a run of one process, by its name."""
    run = f"{LIMITED} --epochs 1 --loader original"
    return train_all(1, {"RUN000": run, "RUN001": run}).joinpath


def record_of(directory):
    return read_record(directory / "run.json")


@pytest.mark.parallel
def test_the_published_network_learns(of_two):
    directory = of_two("strong")
    record = record_of(directory)
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
        assert len(per_rank(directory / "run.json", f"phases.{phase}")) == 2
    assert set(record["phases"]["broadcast"]["parts"]) == {"wait", "transfer"}
    history = list(csv.DictReader((directory / "history.csv").read_text().splitlines()))
    assert [row["epoch"] for row in history] == [str(epoch) for epoch in range(48)]
    recorded = record["training"]["epochs"][-1]["metrics"]["val_accuracy"]
    assert float(history[-1]["val_accuracy"]) == pytest.approx(recorded)
    assert {log.name for log in directory.glob("rank-*.log") if not log.stat().st_size} == set()

    record = record_of(of_two("short"))
    assert record["plan"]["epochs_per_rank"] == 8
    assert record["quality"]["accuracy"]["value"] <= 0.9


@pytest.mark.parallel
def test_rank_0_alone_describes_the_environment(of_two, git_calls):
    of_two("strong")
    assert set(git_calls.read_text().split()) == {"0"}


@pytest.mark.parallel
def test_a_run_repeats_bit_for_bit_and_its_parameters_read_back(of_two):
    first, again, other = (record_of(of_two(name)) for name in ("first", "again", "other-seed"))

    def metrics(record):
        return [epoch["metrics"] for epoch in record["training"]["epochs"]]

    assert metrics(first) == metrics(again) != metrics(other)
    assert first["quality"] == again["quality"]
    assert again["parameters"]["epochs"]["origin"].startswith("config file")


@pytest.mark.parallel
def test_weak_scaling_batch_step_level_and_mixed_precision(of_two):
    assert record_of(of_two("weak"))["plan"]["epochs_per_rank"] == 3
    record = record_of(of_two("shards"))
    assert record["plan"]["epochs_per_rank"] == 2
    assert record["plan"]["batch_size"] == 28
    assert record["plan"]["samples_per_epoch"] == 140
    assert record["model"]["data_type"] == "f16"


@pytest.mark.parallel
def test_loaders_and_ranks_read_bit_identical_matrices(of_one, of_two):
    digests = set()
    for num_ranks, loader, directory in (
        (1, "original", of_one("RUN000")),
        (2, "chunked", of_two("chunked")),
    ):
        record = record_of(directory)
        assert record["data"]["loader"] == loader
        assert record["plan"]["steps_per_epoch"] == 2
        for role in record["data"]["files"]:
            assert len(per_rank(directory / "run.json", f"data.files.{role}.load")) == num_ranks
        digests.add(tuple(file["values_sha256"] for file in record["data"]["files"].values()))
    assert len(digests) == 1


def test_runs_are_numbered_and_an_explicit_one_is_never_overwritten(of_one, execute, nt3_script):
    place = of_one("RUN001")
    before = (place / "run.json").read_bytes()
    assert record_of(place)["status"] == "ok"
    flags = ["--epochs", "1", "--output_dir", place.parent.parent, "--run_id", "RUN001"]
    code, output = execute([sys.executable, nt3_script, *flags])
    assert code == 2
    assert str(place) in output
    assert (place / "run.json").read_bytes() == before


def scalars(directory):
    """Returns the scalars of TensorBoard's event files, by tag, in order of their steps."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util import tensor_util

    (path,) = directory.iterdir()
    found = {}
    for event in EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            number = float(tensor_util.make_ndarray(value.tensor))
            found.setdefault(value.tag, []).append((event.step, number))
    return {tag: [number for _, number in sorted(values)] for tag, values in found.items()}


@pytest.mark.parallel
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what TensorBoard imports
def test_a_run_writes_for_mlperf_and_tensorboard(of_two):
    run = of_two("formats")
    path = run / "run.json"
    record = read_record(path)
    epochs = record["training"]["epochs"]
    assert len(epochs) == 2

    lines = check_mllog((run / "mllog.txt").read_text())
    by_key = {line["key"]: line for line in lines}
    assert by_key["global_batch_size"]["value"] == record["plan"]["global_batch_size"]
    assert by_key["train_samples"]["value"] == record["data"]["num_train"]
    accuracies = [line["value"] for line in lines if line["key"] == "eval_accuracy"]
    assert accuracies == [
        *(epoch["metrics"]["val_accuracy"] for epoch in epochs),
        record["quality"]["accuracy"]["value"],
    ]
    init_ms = by_key["init_stop"]["time_ms"] - by_key["init_start"]["time_ms"]
    assert init_ms == pytest.approx(per_rank(path, "phases.startup")[0] * 1e3, abs=1)
    starts = [line["time_ms"] for line in lines if line["key"] == "epoch_start"]
    stops = [line["time_ms"] for line in lines if line["key"] == "epoch_stop"]
    for i, start, stop in zip(range(2), starts, stops, strict=True):
        train_s = per_rank(path, f"training.epochs.{i}.train")[0]
        assert stop - start == pytest.approx(train_s * 1e3, abs=1)
        begin_ms = per_rank(path, f"training.epochs.{i}.begin")[0] * 1e3
        assert start - by_key["init_start"]["time_ms"] == pytest.approx(begin_ms, abs=1)

    train, validation = (scalars(run / "tensorboard" / name) for name in ("train", "validation"))
    for name in ("loss", "accuracy", "learning_rate"):
        expected = [epoch["metrics"][name] for epoch in epochs]
        assert train[f"epoch_{name}"] == pytest.approx(expected, rel=1e-6)
    for name in ("loss", "accuracy"):
        expected = [epoch["metrics"][f"val_{name}"] for epoch in epochs]
        assert validation[f"epoch_{name}"] == pytest.approx(expected, rel=1e-6)
