"""What MLPerf's log format requires, from the documentation of mlperf_logging."""

import json

POINT, START, STOP = "POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"
TYPES = {
    "submission_benchmark": POINT,
    "seed": POINT,
    "global_batch_size": POINT,
    "gradient_accumulation_steps": POINT,
    "train_samples": POINT,
    "eval_samples": POINT,
    "opt_name": POINT,
    "opt_base_learning_rate": POINT,
    "opt_learning_rate_warmup_epochs": POINT,
    "eval_accuracy": POINT,
    **{f"{name}_start": START for name in ("init", "run", "epoch", "eval")},
    **{f"{name}_stop": STOP for name in ("init", "run", "epoch", "eval")},
}
"""The keys that are logged, from mlperf_logging.mllog.constants."""

ONCE = {
    "submission_benchmark", "seed", "global_batch_size", "train_samples", "eval_samples",
    "opt_name", "opt_base_learning_rate", "init_start", "init_stop", "run_start", "run_stop",
}  # fmt: skip


def check_mllog(text):
    """Asserts that a log is well-formed and complete; returns its lines."""
    lines = []
    assert text.endswith("\n")
    for line in text.splitlines():
        token, _, content = line.partition(" ")
        assert token == ":::MLLOG"
        event = json.loads(content)
        assert list(event) == ["namespace", "time_ms", "event_type", "key", "value", "metadata"]
        assert isinstance(event["time_ms"], int)
        assert event["event_type"] == TYPES[event["key"]]
        assert event["metadata"]["file"].startswith("candle_p1/")
        assert event["metadata"]["lineno"] > 0
        lines.append(event)
    times = [event["time_ms"] for event in lines]
    assert times == sorted(times)
    keys = [event["key"] for event in lines]
    assert all(keys.count(key) == 1 for key in ONCE)
    assert len(set(keys)) == len(TYPES)
    order = [keys.index(f"{name}") for name in ("init_start", "init_stop", "run_start", "run_stop")]
    assert order == sorted(order)
    assert keys[-1] == "run_stop"
    assert lines[-1]["metadata"]["status"] in ("success", "aborted")
    _check_intervals(lines)
    return lines


def _check_intervals(lines):
    """Asserts that intervals of a kind do not overlap, and that epochs are counted from 1."""
    opened, epochs = {}, []
    for event in lines:
        name = event["key"].rpartition("_")[0]
        if event["event_type"] == START:
            assert name not in opened
            opened[name] = event["metadata"].get("epoch_num")
        elif event["event_type"] == STOP:
            started = opened.pop(name)
            if name in ("epoch", "eval"):
                assert event["metadata"]["epoch_num"] == started
            if name == "epoch":
                epochs.append(started)
        elif event["key"] == "eval_accuracy":
            assert event["metadata"]["epoch_num"] >= 1
    assert not opened
    assert epochs == list(range(1, len(epochs) + 1))
