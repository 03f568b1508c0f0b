"""Runs of the four networks on two ranks: how they repeat, what they write, record and measure."""

import csv
import pstats
import re

import numpy as np
import pytest

from candle_p1.records.environment import available_cores
from tests.conftest import CANDLE_P1
from tests.integration.conftest import assert_ranks
from tests.mllog_check import check_mllog
from tests.records import per_rank, read_record

pytestmark = [pytest.mark.extended, pytest.mark.parallel]

PNG = b"\x89PNG"


def rows_of(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def test_ranks_and_epochs_are_recorded(trained):
    directory = trained / "nt3"
    record = read_record(directory / "run.json")
    assert_ranks(record, "mpirun", [(0, 0), (0, 1)], threads=max(1, len(available_cores()) // 2))
    assert record["quality"]["accuracy"]["naive"] == 0.5
    assert set(record["phases"]["broadcast"]["regions"]) == {"wait", "transfer"}
    history = rows_of(directory / "history.csv")
    assert [row["epoch"] for row in history] == ["0", "1"]
    recorded = record["training"]["epochs"][-1]["metrics"]["val_accuracy"]
    assert float(history[-1]["val_accuracy"]) == pytest.approx(recorded)
    assert {log.name for log in directory.glob("rank-*.log") if log.stat().st_size} == set()


def test_rank_0_alone_describes_the_environment(trained, git_calls):
    assert set(git_calls.read_text().split()) == {"0"}


def test_a_run_repeats_bit_for_bit_and_its_parameters_read_back(variants):
    first, again, other = (
        read_record(variants / name / "run.json") for name in ("first", "again", "other-seed")
    )

    def metrics(record):
        return [epoch["metrics"] for epoch in record["training"]["epochs"]]

    assert metrics(first) == metrics(again) != metrics(other)
    assert first["quality"] == again["quality"]
    assert again["parameters"]["epochs"]["origin"].startswith("config file")


def test_batch_step_level_mixed_precision_and_a_trace_of_steps(variants):
    record = read_record(variants / "shards/run.json")
    assert record["plan"]["epochs_per_rank"] == 2
    assert record["plan"]["batch_size"] == 28
    assert record["plan"]["samples_per_epoch"] == 140
    assert record["model"]["data_type"] == "f16"
    assert any(path.is_file() for path in (variants / "shards/step_trace").rglob("*"))
    assert record["energy"]["kind"] == "absent"


def test_p1b2_stops_early_and_writes_where_it_is_told(variants):
    record = read_record(variants / "p1b2/run.json")
    assert len(record["training"]["epochs"]) == 3
    assert record["training"]["stopped"]
    assert record["training"]["model_epoch"] == 1
    assert "3 of 30 epochs: early_stop" in (variants.parent / "run.log").read_text()
    rows = rows_of(variants.parent / "results/classes.csv")
    assert len(rows) == 10
    assert sum(int(row["num_samples"]) for row in rows) == record["data"]["num_test"]


@pytest.mark.parametrize("model", ["vae", "cvae"])
def test_p1b1s_variational_models_learn_and_their_latent_space_is_saved(variants, model):
    record = read_record(variants / model / "run.json")
    epochs = [epoch["metrics"] for epoch in record["training"]["epochs"]]
    losses = [epoch["loss"] for epoch in epochs]
    assert losses[-1] < losses[4] < losses[0]
    names = {"loss", "xent", "corr", "mse"}
    assert set(epochs[0]) == {*names, *(f"val_{name}" for name in names), "learning_rate"}
    rates = [epoch["learning_rate"] for epoch in epochs[:6]]
    step = 0.0001 if model == "vae" else 0  # to learning_rate, or base_lr for a batch of 100
    assert rates == pytest.approx([0.0005 + step * epoch for epoch in range(6)])
    assert {"loss", "xent", "mse", "r2", "correlation"} <= set(record["quality"])
    assert (variants / model / "tensorboard").exists() == (model == "vae")
    with np.load(variants / model / "latent.npz") as saved:
        assert saved["latent"].shape == (record["data"]["num_test"], 3)
        assert len(set(saved["cancer_type"])) > 5
    assert (variants / model / "latent.png").read_bytes().startswith(PNG)


def test_p1b3s_convolutions_train_and_predictions_are_drawn(variants):
    record = read_record(variants / "p1b3/run.json")
    assert (record["plan"]["steps_per_epoch"], record["plan"]["samples_per_epoch"]) == (32, 4000)
    assert record["quality"]["loss"]["value"] < 1
    for name in ("errors.png", "predictions.png"):
        assert (variants / "p1b3" / name).read_bytes().startswith(PNG)


def test_phases_fill_the_run_and_energies_add_up(trained, succeed, tmp_path):
    run = trained / "nt3"
    path = run / "run.json"
    record = read_record(path)

    phases = record["phases"]
    for rank in range(2):
        begins = [per_rank(path, f"phases.{name}.begin")[rank] for name in phases]
        lasted = [per_rank(path, f"phases.{name}")[rank] for name in phases]
        ends = [begin + each for begin, each in zip(begins, lasted, strict=True)]
        # No moment is in two phases, and few are in none: the more, the busier the machine is.
        assert begins[0] == 0
        assert all(end < begin + 1e-3 for end, begin in zip(ends, begins[1:], strict=False))
        assert rank > 0 or ends[-1] <= record["total_s"]  # which is that of rank 0
        assert sum(lasted) > 0.9 * record["total_s"]
    for phase in phases.values():
        parts_s = sum(each["mean_s"] for each in phase.get("regions", {}).values())
        assert parts_s <= phase["mean_s"]
    assert {"read", "parse", "communicate"} <= set(phases["load"]["regions"])
    for file in record["data"]["files"].values():
        # The ranks have read all bytes behind the header, if any, between them, while they loaded.
        read = file["reading"]["read"]["mean_bytes"] * 2
        assert 0.9 * file["file_bytes"] < read <= file["file_bytes"]
        assert file["reading"]["begin"]["min_s"] >= phases["load"]["begin"]["min_s"]
    assert phases["train"]["usage"]["peak_rss"]["max_bytes"] <= record["peak_rss"]["max_bytes"]

    energy = record["energy"]
    assert energy["kind"] == "simulated"
    assert energy["covers"] == ["cpu", "memory"]
    # A phase in which the sampler could not run has no energy, and there is time between phases,
    # the more the busier the machine is. The recorded power is between these limits.
    known = {name: phase for name, phase in energy["phases"].items() if "energy_j" in phase}
    assert "train" in known
    rest_j = energy["total_j"] - sum(phase["energy_j"] for phase in known.values())
    rest_s = energy["total_s"] - sum(per_rank(path, f"phases.{name}")[0] for name in known)
    assert 61.5 * rest_s < rest_j + 1e-3 * energy["total_j"]
    assert 121.5 * rest_s > rest_j - 1e-3 * energy["total_j"]
    memory = next(group for group in energy["devices"] if group["domain"] == "memory")
    assert memory["power"]["mean_w"] == pytest.approx(11.5, rel=1e-3)
    assert (run / energy["traces"][0]).exists()

    profiles = sorted((run / "profile").glob("rank-*.prof"))
    assert len(profiles) == 2
    calls = sum(pstats.Stats(str(profile)).total_calls for profile in profiles)
    assert f"{calls} function calls" in (run / "profile/top.txt").read_text()

    assert "simulated" in succeed([*CANDLE_P1, "show", run, "--full", "--html", "page.html"])
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 2
    assert not re.search(r'(src|href)="(?!data:|#)', page)


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what TensorBoard imports
def test_a_run_writes_for_mlperf_and_tensorboard(trained):
    run = trained / "nt3"
    path = run / "run.json"
    record = read_record(path)
    epochs = record["training"]["epochs"]
    lines = check_mllog((run / "mllog.txt").read_text())
    by_key = {line["key"]: line for line in lines}
    assert by_key["global_batch_size"]["value"] == record["plan"]["global_batch_size"]
    assert by_key["train_samples"]["value"] == record["data"]["num_train"]
    accuracies = [line["value"] for line in lines if line["key"] == "eval_accuracy"]
    assert accuracies == [
        *(epoch["metrics"]["val_accuracy"] for epoch in epochs),
        record["quality"]["accuracy"]["value"],
    ]
    starts = [line["time_ms"] for line in lines if line["key"] == "epoch_start"]
    for i, start in enumerate(starts):
        begin_ms = per_rank(path, f"training.epochs.{i}.begin")[0] * 1e3
        assert start - by_key["init_start"]["time_ms"] == pytest.approx(begin_ms, abs=1)

    train, validation = (scalars(run / "tensorboard" / name) for name in ("train", "validation"))
    for name in ("loss", "accuracy", "learning_rate"):
        expected = [epoch["metrics"][name] for epoch in epochs]
        assert train[f"epoch_{name}"] == pytest.approx(expected, rel=1e-6)
    for name in ("loss", "accuracy"):
        expected = [epoch["metrics"][f"val_{name}"] for epoch in epochs]
        assert validation[f"epoch_{name}"] == pytest.approx(expected, rel=1e-6)
