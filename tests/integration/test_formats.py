"""What a run and its report write for other tools: MLPerf, TensorBoard, Extra-P, data frames."""

from __future__ import annotations

import csv
import sys

import pytest

from tests.mllog_check import check_mllog
from tests.records import per_rank, read_record
from tests.unit.reports.test_extrap import check as check_extrap

pytestmark = pytest.mark.extended

NUM_EPOCHS = 2


@pytest.fixture
def run(execute, mpirun, nt3_script, tmp_path):
    """Trains a small NT3 on two ranks; returns its directory."""
    flags = ["--conv", "4", "10", "5", "--pool", "4", "--dense", "8", "--epochs", 2 * NUM_EPOCHS]
    flags += ["--mllog", "True", "--tensorboard", "True", "--output_dir", "out"]
    code, output = execute(mpirun(2, nt3_script, *flags))
    assert code == 0, output
    return tmp_path / "out/EXP000/RUN000"


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


def test_a_run_writes_for_mlperf_and_tensorboard(run):
    path = run / "run.json"
    record = read_record(path)
    epochs = record["training"]["epochs"]
    assert len(epochs) == NUM_EPOCHS

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
    for i, start, stop in zip(range(NUM_EPOCHS), starts, stops, strict=True):
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


def test_a_report_of_runs_writes_for_extrap_and_data_frames(execute, tmp_path):
    from tests.planted_records import plant

    (tmp_path / "runs").mkdir()
    for num_ranks in (1, 2, 4):
        plant(tmp_path / "runs", "nt3", num_ranks)
    plant(tmp_path / "runs", "nt3", 2, status="failed")
    words = ["-m", "candle_p1.cli", "report", "runs", "-o", "report"]
    code, output = execute([sys.executable, *words])
    assert code == 0, output
    with (tmp_path / "report/runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sorted((row["num_ranks"], row["status"]) for row in rows) == [
        ("1", "ok"), ("2", "failed"), ("2", "ok"), ("4", "ok"),
    ]  # fmt: skip
    measured = check_extrap((tmp_path / "report/extrap/nt3-strong-all-runs.jsonl").read_text())
    assert list(measured["total", "time_s"]) == [1, 2, 4]
