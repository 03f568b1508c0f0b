"""A run in MLPerf's log format, for tools that read it.

A line is ``:::MLLOG`` and a JSON object. Its fields, keys and event types are those of MLCommons'
``mlperf_logging.mllog``, https://github.com/mlcommons/logging. Of the keys that describe a
submission to MLPerf, only the benchmark's name is logged.

The phase ``startup`` is MLPerf's initialization: the run starts when data are first touched, and
ends with the evaluation on the test set. Every epoch is validated, so there are no blocks of
epochs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from candle_p1.instrument.clock import read_anchor
from candle_p1.instrument.epochs import Epoch
from candle_p1.instrument.phases import PhaseTimer
from candle_p1.parameters.parameter_set import ParameterSet
from candle_p1.records.record import finite
from candle_p1.scaling import ScalingPlan

FILE_NAME = "mllog.txt"
TOKEN = ":::MLLOG"
POINT, START, STOP = "POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"
TARGETS = ("accuracy", "loss")
"""``eval_accuracy`` is the first of these metrics that exists; its metadata say which."""

_ROOT = Path(__file__).resolve().parents[2]


class RunLog:
    """Writes the log of a run, in order of time; the times are those of the run's phases.

    Leaving the context without `finish` logs the run as aborted. If a log has no ``run_stop``, its
    run was killed. A run that goes on from a checkpoint goes on with the log as it was then: it
    starts and stops once, and every epoch is logged once.

    Nothing is written without a path. The run began at `start_s`, by time.perf_counter; earlier
    segments of it have completed `first_epoch` epochs.
    """

    def __init__(
        self,
        path: Path | None,
        benchmark: str,
        phases: PhaseTimer,
        start_s: float,
        first_epoch: int = 0,
    ) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1) if path else None
        self._benchmark, self._phases, self._start_s = benchmark, phases, start_s
        self._anchor = read_anchor()
        self._epoch_num = first_epoch
        self._is_running = False

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_running:
            self._write(STOP, "run_stop", time.perf_counter(), status="aborted")
        if self._file is not None:
            self._file.close()

    def begin(self) -> None:
        """Logs the initialization, which is the phase "startup", and the start of the run."""
        begin_s, end_s = self._interval("startup")
        self._write(POINT, "submission_benchmark", begin_s, self._benchmark)
        self._write(START, "init_start", begin_s)
        self._write(STOP, "init_stop", end_s)
        self._write(START, "run_start", end_s)
        self._is_running = True

    def describe(
        self, params: ParameterSet, plan: ScalingPlan, num_train: int, num_validation: int
    ) -> None:
        """Logs hyperparameters and numbers of samples under MLPerf's keys."""
        passes = params["backward_passes_per_step"]
        settings = {
            "seed": params["rng_seed"],
            "global_batch_size": plan.global_batch_size * passes,
            "gradient_accumulation_steps": passes,
            "train_samples": num_train,
            "eval_samples": num_validation,
            "opt_name": params["optimizer"],
            "opt_base_learning_rate": plan.learning_rate,
            "opt_learning_rate_warmup_epochs": plan.warmup_epochs,
        }
        for key, value in settings.items():
            self._write(POINT, key, time.perf_counter(), value)

    def add_epoch(self, epoch: Epoch, validation_s: float, logs: Mapping[str, float]) -> None:
        """Logs an epoch and its validation, which has just ended and took `validation_s`.

        The logs are the epoch's metrics over all ranks; those of the validation start with "val_".
        """
        end_s = time.perf_counter()
        self._epoch_num += 1
        begin_s = self._start_s + epoch.begin_s
        self._write(START, "epoch_start", begin_s, epoch_num=self._epoch_num)
        # Of a continued epoch, the seconds include those of an earlier segment.
        stop_s = min(begin_s + epoch.seconds, end_s - validation_s)
        self._write(STOP, "epoch_stop", stop_s, epoch_num=self._epoch_num)
        values = {name: logs[f"val_{name}"] for name in TARGETS if f"val_{name}" in logs}
        self._add_evaluation(end_s - validation_s, end_s, values, "validation")

    def finish(
        self, quality: Mapping[str, Mapping[str, float | None]], *, is_success: bool = True
    ) -> None:
        """Logs the evaluation, which is the phase "evaluate", and the end of the run.

        The quality is that of the record; it may be empty.
        """
        begin_s, end_s = self._interval("evaluate")
        values = {name: quality[name]["value"] for name in TARGETS if name in quality}
        if quality:
            self._add_evaluation(begin_s, end_s, values, "test")
        status = "success" if is_success else "aborted"
        self._write(STOP, "run_stop", end_s, status=status, epoch_num=self._epoch_num)
        self._is_running = False

    def checkpoint_state(self) -> dict[str, str]:
        """Returns the text of the file."""
        return {"text": Path(self._file.name).read_text(encoding="utf-8") if self._file else ""}

    def restore_state(self, state: dict[str, str]) -> None:
        """Writes the text in place of what this segment has logged, its initialization."""
        if self._file and state["text"]:
            self._file.seek(0)
            self._file.truncate()
            self._file.write(state["text"])

    def _add_evaluation(
        self, begin_s: float, end_s: float, values: Mapping[str, float | None], samples: str
    ) -> None:
        facts = {"epoch_num": self._epoch_num, "samples": samples}
        self._write(START, "eval_start", begin_s, **facts)
        self._write(STOP, "eval_stop", end_s, **facts)
        for name, value in list(values.items())[:1]:
            shown = None if value is None else finite(value)
            self._write(POINT, "eval_accuracy", end_s, shown, metric=name, **facts)

    def _interval(self, phase: str) -> tuple[float, float]:
        return next((begin, end) for name, begin, end in self._phases.intervals() if name == phase)

    def _write(
        self, event_type: str, key: str, time_s: float, value: Any = None, **metadata: Any
    ) -> None:
        if self._file is None:
            return
        caller = sys._getframe(1)
        epoch_ms = self._anchor.epoch_us / 1e3 + (time_s - self._anchor.perf_counter_s) * 1e3
        line = {
            "namespace": "",
            "time_ms": round(epoch_ms),
            "event_type": event_type,
            "key": key,
            "value": value,
            "metadata": {
                "file": str(Path(caller.f_code.co_filename).resolve().relative_to(_ROOT)),
                "lineno": caller.f_lineno,
                **metadata,
            },
        }
        self._file.write(f"{TOKEN} {json.dumps(line, allow_nan=False)}\n")
