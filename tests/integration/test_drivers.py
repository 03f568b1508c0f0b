"""What programs that start many runs depend on: CANDLE Supervisor's calls, losses that are lost."""

import json
import math
import sys

import pytest

from tests.conftest import ROOT
from tests.records import read_record

pytestmark = pytest.mark.extended

SUPERVISOR = ROOT / "tests/integration/supervisor.py"
TINY = ROOT / "tests/files/tiny"
TINY_SCRIPT = TINY / "tiny_baseline_keras2.py"


@pytest.fixture
def supervise(execute, monkeypatch, tmp_path):
    """Runs a benchmark as Supervisor does; returns its directory and the exit code with output."""

    def supervise(folder, overlay, value, *before, directory="instance"):
        monkeypatch.setenv("PYTHONPATH", str(folder))
        monkeypatch.setenv("MODEL_NAME", folder.name)
        monkeypatch.setenv("EXPID", "X001")
        monkeypatch.setenv("MODEL_RETURN", value)
        argv = [json.dumps(overlay), tmp_path / directory, "keras", "7", "3600"]
        return tmp_path / directory, *execute([*(before or [sys.executable, SUPERVISOR]), *argv])

    return supervise


def test_supervisor_runs_p1b1(supervise):
    overlay = {
        "id": "set 7",
        "config_file": "p1b1_perf_bench_model.txt",
        "use_landmark_genes": 0,
        "dense": "32 16",
        "epochs": 2,
        "warmup_lr": 1,
        "residual": 0,
        "timeout": 3600,
        "clr_flag": False,
        "cp": 1,
        "ckpt_restart_mode": "off",
    }
    directory, code, output = supervise(ROOT / "benchmarks/p1b1", overlay, "val_corr")
    assert code == 0, output
    history = json.loads((directory / "history.txt").read_text())
    assert float((directory / "result.txt").read_text()) == history["val_corr"][-1]
    assert {"loss", "val_loss", "corr", "val_corr"} <= set(history)
    assert not (directory / "stop.marker").exists()
    record = read_record(directory / "output/p1b1/X001/7/run.json")
    assert record["status"] == "ok"
    values = {name: each["value"] for name, each in record["parameters"].items()}
    assert (values["dense"], values["timeout"]) == ([32, 16], 3600)
    assert (values["use_landmark_genes"], values["warmup_lr"]) == (False, True)
    assert record["plan"]["epochs_per_rank"] == 2
    saved = {"model.json", "best.weights.h5", "encoder.keras", "decoder.keras"}
    assert saved <= {path.name for path in (directory / "output").iterdir()}  # its save_path


@pytest.mark.parallel
def test_a_rank_of_supervisor_runs_alone_and_gets_the_history_of_a_lost_loss(
    supervise, mpirun, monkeypatch
):
    monkeypatch.setenv("CANDLE_P1_SINGLE_PROCESS", "1")
    overlay, before = {"spoil": "train", "epochs": 4}, mpirun(2, SUPERVISOR, "--from-mpi")
    directory, code, output = supervise(TINY, overlay, "val_loss", *before)
    assert code == 0, output
    for place in (directory / "0", directory / "1"):
        history = json.loads((place / "history.txt").read_text())
        assert all(map(math.isnan, history["val_loss"]))
        assert float((place / "result.txt").read_text()) == 999999999
        assert (place / "stop.marker").exists()
        record = read_record(place / "output/tiny/X001/7/run.json")
        assert (record["status"], record["num_ranks"], record["launcher"]) == ("failed", 1, "none")


@pytest.mark.parallel
def test_a_loss_that_is_not_a_number_fails_the_run_on_all_ranks(execute, mpirun, tmp_path):
    flags = ["--spoil", "train", "--data_parallel", "batch_step", "--output_dir", tmp_path]
    code, output = execute(mpirun(2, TINY_SCRIPT, *flags))
    print(output)
    assert code == 2
    assert output.count("error: ") == 1
    assert "--allow_nan" in output
    record = read_record(tmp_path / "EXP000/RUN000/run.json")
    assert (record["status"], record["num_ranks"]) == ("failed", 2)
    assert (record["failure"]["phase"], record["failure"]["rank"]) == ("train", None)
    assert len(record["training"]["epochs"]) == 1
    assert set(record["phases"]) >= {"load", "train", "evaluate", "report"}


def test_every_loss_counts_and_may_be_allowed(train_all, monkeypatch):
    monkeypatch.setenv("CANDLE_BENCHMARKS_PATH", str(TINY.parent))
    flags = {
        "fine": "",
        "validation": "--spoil validation",
        "test": "--spoil test",
        "infinite": "--spoil infinite",
        "allowed": "--spoil train --allow_nan True",
        "untrained": "--train_bool False --eval_bool False",
    }
    directory = train_all(1, {name: f"tiny {each}" for name, each in flags.items()})
    records = {path.parent.name: read_record(path) for path in directory.glob("*/run.json")}
    ends = {
        name: (record["status"], record.get("failure", {}).get("phase"), len(record["warnings"]))
        for name, record in records.items()
    }
    assert ends == {
        "fine": ("ok", None, 0),
        "validation": ("failed", "train", 1),
        "test": ("failed", "evaluate", 1),
        "infinite": ("failed", "train", 3),
        "allowed": ("ok", None, 3),
        "untrained": ("ok", None, 0),
    }
    epochs = {name: len(record["training"]["epochs"]) for name, record in records.items()}
    assert epochs == dict.fromkeys(ends, 4) | {"infinite": 1, "untrained": 0}
    assert records["untrained"]["training"]["stopped"].endswith("the weights are untrained")


@pytest.mark.parallel
def test_a_search_by_optuna_prunes_on_all_ranks_and_resumes(execute, mpirun, tmp_path):
    """Two trials that learn on one rank, then one on two ranks that hardly does."""
    optuna = pytest.importorskip("optuna", reason="optuna is not installed")
    storage = f"sqlite:///{tmp_path / 'search.db'}"
    study = optuna.create_study(study_name="nt3", storage=storage)
    for rate in (0.02, 0.01, 1e-4):
        study.enqueue_trial({"learning_rate": rate, "batch_size": 20, "dropout": 0.1})
    script = ROOT / "examples/search_nt3.py"
    for command in ([sys.executable, script, "2"], mpirun(2, script, "3")):
        code, output = execute(command)
        assert code == 0, output
    states = [trial.state.name for trial in study.trials]
    assert states == ["COMPLETE", "COMPLETE", "PRUNED"]
    records = [read_record(tmp_path / f"output/search/trial{i}/run.json") for i in range(3)]
    assert [record["num_ranks"] for record in records] == [1, 1, 2]
    epochs = [[e["metrics"]["val_loss"] for e in r["training"]["epochs"]] for r in records]
    assert [len(epochs[0]), len(epochs[1])] == [16, 16]
    assert len(epochs[2]) == len(study.trials[2].intermediate_values) < 8
    assert records[2]["training"]["stopped"] == "the program that called run() ended it"
    assert study.trials[0].value == epochs[0][-1]
    for trial, record in zip(study.trials, records, strict=True):
        for name, value in trial.params.items():
            assert record["parameters"][name]["value"] == value


REFUSED = {
    "p1b2 --dense 1000000 1000000": "GiB",
    "p1b1 --latent_dim 1000000000": "latent_dim",
    "nt3 --classes 1000000000": "classes",
    "tiny --power cray": "power cray",
    "tiny --power solar": "power: 'solar'",
    "tiny --power replay:missing.csv": "missing.csv",
    "tiny --timeline t.json": "timeline t.json",
    "tiny --save_path file/results --output_dir .": "save_path file/results",
}
ATTEMPTS = """
import sys
from candle_p1 import train
from candle_p1.benchmark import find_benchmark
from candle_p1.errors import CandleError

for line in sys.argv[1:]:
    name, *flags = line.split()
    benchmark = find_benchmark(name)
    try:
        train.run(benchmark, benchmark.initialize_parameters(argv=[*flags, "--epochs", "1"]))
    except CandleError as error:
        print("refused:", error, flush=True)
"""


def test_what_cannot_be_held_or_measured_or_written_is_refused(succeed, monkeypatch, tmp_path):
    monkeypatch.setenv("CANDLE_BENCHMARKS_PATH", str(TINY.parent))
    (tmp_path / "file").write_text("")
    output = succeed([sys.executable, "-c", ATTEMPTS, *REFUSED])
    refusals = [line for line in output.splitlines() if line.startswith("refused: ")]
    for line, (command, part) in zip(refusals, REFUSED.items(), strict=True):
        assert part in line, command
    record = read_record(tmp_path / "run.json")
    assert (record["status"], record["failure"]["phase"]) == ("failed", "startup")
