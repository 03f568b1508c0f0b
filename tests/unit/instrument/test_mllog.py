"""The log in MLPerf's format: what it says, and when."""

import json
import math
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from candle_p1.errors import ParameterError
from candle_p1.instrument import logs
from candle_p1.instrument.epochs import Epoch
from candle_p1.instrument.logs import RunLog
from candle_p1.instrument.phases import PhaseTimer
from tests.mllog_check import check_mllog

PARAMS = {"rng_seed": 7, "backward_passes_per_step": 2, "optimizer": "adam"}
PLAN = SimpleNamespace(global_batch_size=40, learning_rate=0.002, warmup_epochs=5)
SETTINGS = {
    "seed": 7,
    "global_batch_size": 80,
    "gradient_accumulation_steps": 2,
    "train_samples": 280,
    "eval_samples": 140,
    "opt_name": "adam",
    "opt_base_learning_rate": 0.002,
    "opt_learning_rate_warmup_epochs": 5,
}


@pytest.fixture
def run(tmp_path):
    """Logs a run of some epochs, of 10 ms each, and returns its phases.

    A run with an error has left a state in `states` after its second epoch.
    """

    def run(num_epochs=2, metrics=None, error=None, first_epoch=0, states=()):
        metrics = metrics or {"loss": 0.5, "val_loss": 0.6, "val_accuracy": 0.9}
        start_s = time.perf_counter()
        phases = PhaseTimer(begin=start_s)
        with RunLog(tmp_path / "mllog.txt", "nt3", phases, start_s, first_epoch) as log:
            with phases("startup"):
                time.sleep(0.01)
            log.begin()
            log.describe(PARAMS, PLAN, 280, 140)
            with phases("train"):
                if first_epoch:
                    log.restore_state(states[0])
                for number in range(1, num_epochs + 1):
                    begin_s = time.perf_counter() - start_s
                    time.sleep(0.015)
                    log.add_epoch(Epoch(begin_s, 0.01, []), 0.004, metrics)
                    if error and number == 2:
                        states.append(log.checkpoint_state())
            if error:
                raise error
            with phases("evaluate"):
                time.sleep(0.005)
            log.finish({"loss": {"value": 0.4}, "accuracy": {"value": 0.95, "naive": 0.5}})
        return phases

    return run


@pytest.fixture
def path(tmp_path):
    return tmp_path / "mllog.txt"


def test_a_log_has_the_format_and_the_times_of_the_run(run, path):
    before_ms = time.time() * 1e3
    phases = run()
    lines = check_mllog(path.read_text())
    by_key = {line["key"]: line for line in lines}
    assert {key: by_key[key]["value"] for key in SETTINGS} == SETTINGS
    assert by_key["submission_benchmark"]["value"] == "nt3"
    assert before_ms - 5 < by_key["init_start"]["time_ms"] < time.time() * 1e3
    assert lines[-1]["metadata"]["status"] == "success"
    accuracies = [line for line in lines if line["key"] == "eval_accuracy"]
    assert [(line["value"], line["metadata"]["samples"]) for line in accuracies] == [
        (0.9, "validation"), (0.9, "validation"), (0.95, "test"),
    ]  # fmt: skip
    startup_ms, evaluate_ms = (phases.phases[n,].seconds * 1e3 for n in ("startup", "evaluate"))
    for name, took_ms in (
        ("init", [startup_ms]),
        ("epoch", [10, 10]),
        ("eval", [4, 4, evaluate_ms]),  # validation twice, then the test set
    ):
        starts, stops = (
            [line["time_ms"] for line in lines if line["key"] == f"{name}_{end}"]
            for end in ("start", "stop")
        )
        found_ms = [stop - start for start, stop in zip(starts, stops, strict=True)]
        assert found_ms == pytest.approx(took_ms, abs=1)  # times are rounded to 1 ms
    assert by_key["run_start"]["time_ms"] == by_key["init_stop"]["time_ms"]
    assert by_key["run_stop"]["time_ms"] == by_key["eval_stop"]["time_ms"]


def test_the_loss_is_logged_if_there_is_no_accuracy(run, path):
    run(metrics={"loss": 0.5, "val_loss": math.nan})
    lines = [json.loads(line.split(" ", 1)[1]) for line in path.read_text().splitlines()]
    first = next(line for line in lines if line["key"] == "eval_accuracy")
    assert (first["value"], first["metadata"]["metric"]) == (None, "loss")


OF_A_SUBMISSION = ("submission_", "cache_clear")
"""Keys that only a submission to MLPerf has."""


@pytest.mark.formats
@pytest.mark.skipif(find_spec("mlperf_logging") is None, reason="mlperf-logging is not installed")
@pytest.mark.filterwarnings("ignore")  # its own
@pytest.mark.parametrize("rules", ["training_5.1.0", "hpc_3.0.0"])
def test_mlperfs_own_checker_accepts_a_log(run, path, tmp_path, rules):
    import yaml
    from mlperf_logging.compliance_checker import mlp_compliance, mlp_parser

    run()
    lines, errors = mlp_parser.parse_file(str(path), ruleset="5.1.0")
    assert (len(lines), errors) == (len(path.read_text().splitlines()), [])

    config = Path(mlp_compliance.__file__).parent / rules / "common.yaml"
    every = yaml.load(config.read_text(), Loader=yaml.BaseLoader)
    name = {"NAME": ""}
    kept = [r for r in every if not r.get("KEY", name)["NAME"].startswith(OF_A_SUBMISSION)]
    # The rule of submission_division sets how long the initialization may take: 30 minutes.
    begin = next(rule["BEGIN"] for rule in kept if "BEGIN" in rule)
    begin["CODE"] = begin["CODE"].replace("'compile_time_mins': 0", "'compile_time_mins': 30")
    own = tmp_path / "rules.yaml"
    own.write_text(yaml.dump(kept))

    checker = mlp_compliance.make_checker(rules.split("_")[0], "5.1.0", False, True)
    assert checker.check_file(str(path), str(own))


def test_a_killed_run_is_aborted_and_goes_on_with_its_log_as_it_was_at_the_checkpoint(run, path):
    """It starts once, and logs no epoch twice, however its segments ended."""
    states = []
    with pytest.raises(ValueError, match="killed"):
        run(3, error=ValueError("killed"), states=states)
    assert check_mllog(path.read_text())[-1]["metadata"]["status"] == "aborted"
    run(first_epoch=2, states=states)
    lines = check_mllog(path.read_text())
    numbers = [line["metadata"]["epoch_num"] for line in lines if line["key"] == "epoch_start"]
    assert numbers == [1, 2, 3, 4]


def test_logs_for_tensorboard_need_tensorflow(monkeypatch):
    from candle_p1.benchmark import find_benchmark  # not installed where only formats are checked

    read = find_benchmark("nt3").read_parameters
    monkeypatch.setattr(logs, "find_spec", lambda name: None)
    logs.check_tensorboard(read([]))
    with pytest.raises(ParameterError, match=r"tensorboard True \(flag\)"):
        logs.check_tensorboard(read(["--tensorboard", "True"]))


def test_a_continued_run_repeats_no_epoch_for_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    import keras
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    def train(logs, *epochs, state=None):
        logs.set_model(model)
        logs.on_train_begin()
        if state:
            logs.restore_state(state)
        for epoch in epochs:
            logs.on_epoch_end(epoch, {"loss": 1.0, "val_loss": 2.0})

    train(first := logs.epoch_logs(tmp_path), 0, 1)
    state = first.checkpoint_state()
    train(logs.epoch_logs(tmp_path, is_continued=True), 2)  # by a segment that saved nothing
    first.on_epoch_end(2, {"loss": 1.0})
    train(second := logs.epoch_logs(tmp_path, is_continued=True), 2, 3, state=state)
    second.checkpoint_state()
    for name in ("train", "validation"):
        events = EventAccumulator(str(tmp_path / name)).Reload()
        for tag in (tags := events.Tags()["tensors"]):
            assert [event.step for event in events.Tensors(tag)] == [0, 1, 2, 3]
        assert tags
    logs.epoch_logs(tmp_path)
    assert not list(tmp_path.rglob("events*"))
