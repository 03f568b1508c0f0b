"""A run in the formats of other tools: MLPerf, TensorBoard, and the viewers of pstats.

A line of MLPerf's log is ``:::MLLOG`` and a JSON object. Its fields, keys and event types are those
of MLCommons' ``mlperf_logging.mllog``, https://github.com/mlcommons/logging. Of the keys that
describe a submission to MLPerf, only the benchmark's name is logged. The phase ``startup`` is
MLPerf's initialization: the run starts when data are first touched, and ends with the evaluation on
the test set. Every epoch is validated, so there are no blocks of epochs.

Keras writes loss and metrics of every epoch for TensorBoard, with TensorFlow. Profiles of Python
calls are one per rank, and a table over all ranks.
"""

from __future__ import annotations

import cProfile
import io
import json
import marshal
import os
import pstats
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from candle_p1.errors import ParameterError
from candle_p1.instrument.epochs import Epoch
from candle_p1.instrument.phases import PhaseTimer, read_anchor
from candle_p1.parameters.parameter_set import ParameterSet
from candle_p1.records.record import finite
from candle_p1.scaling import ScalingPlan

MLLOG_NAME = "mllog.txt"
TOKEN = ":::MLLOG"
POINT, START, STOP = "POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"
TARGETS = ("accuracy", "loss")
"""``eval_accuracy`` is the first of these metrics that exists; its metadata say which."""


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
        caller, root = sys._getframe(1), Path(__file__).resolve().parents[2]
        epoch_ms = self._anchor.epoch_us / 1e3 + (time_s - self._anchor.perf_counter_s) * 1e3
        line = {
            "namespace": "",
            "time_ms": round(epoch_ms),
            "event_type": event_type,
            "key": key,
            "value": value,
            "metadata": {
                "file": str(Path(caller.f_code.co_filename).resolve().relative_to(root)),
                "lineno": caller.f_lineno,
                **metadata,
            },
        }
        self._file.write(f"{TOKEN} {json.dumps(line, allow_nan=False)}\n")


TENSORBOARD_FOLDER = "tensorboard"


def check_tensorboard(params: ParameterSet) -> None:
    """Raises ParameterError if logs for TensorBoard are requested and cannot be written."""
    missing = [name for name in ("tensorflow", "tensorboard") if find_spec(name) is None]
    if params["tensorboard"] and missing:
        raise ParameterError(
            f"tensorboard True ({params.origin('tensorboard')}): Keras writes these logs with"
            f" TensorFlow, but {' and '.join(missing)} cannot be imported: install"
            " candle-p1[tensorflow-cpu], which is needed with JAX, too, or omit --tensorboard"
        )


def _files(directory: Path) -> dict[str, Path]:
    files = directory.glob("*/events.out.*")
    return {str(path.relative_to(directory)): path for path in files}


def epoch_logs(directory: Path, *, is_continued: bool = False) -> Any:
    """Returns a Keras callback that must come after those that write metrics into the logs.

    A run that continues from a checkpoint cuts the files back to it; another one removes them. The
    directory is the parent of ``train/`` and ``validation/``.
    """
    import keras

    earlier = _files(directory)

    class EpochLogs(keras.callbacks.TensorBoard):  # type: ignore[misc]
        """Keras's callback, without what it does in every step, which is not needed here."""

        # Not overridden: whoever reads the logs of a step waits for it.
        on_train_batch_end = keras.callbacks.Callback.on_train_batch_end

        def checkpoint_state(self) -> dict[str, int]:
            """Returns the sizes of the files."""
            for writer in self._writers.values():
                writer.flush()
            return {name: path.stat().st_size for name, path in _files(directory).items()}

        def restore_state(self, sizes: dict[str, int]) -> None:
            """Cuts the files of earlier segments back to their sizes."""
            for name, path in earlier.items():
                if name in sizes:
                    os.truncate(path, sizes[name])
                else:
                    path.unlink()

        on_train_batch_begin = keras.callbacks.Callback.on_train_batch_begin

    logs = EpochLogs(str(directory), write_graph=False, update_freq="epoch", profile_batch=0)
    if not is_continued:
        logs.restore_state({})
    return logs


PROFILE_FOLDER = "profile"


class CallProfile:
    """Profiles the Python calls of this rank's main thread; does nothing if it is not wanted."""

    def __init__(self, wanted: bool) -> None:
        self._profile = cProfile.Profile() if wanted else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Profiles the body of ``with``."""
        if self._profile is None:
            yield
            return
        self._profile.enable()
        try:
            yield
        finally:
            self._profile.disable()

    def statistics(self) -> dict[Any, Any] | None:
        """Returns what was counted, as `pstats` holds it; None if this rank is not profiled."""
        if self._profile is None:
            return None
        self._profile.create_stats()
        profile: Any = self._profile
        statistics: dict[Any, Any] = profile.stats
        return statistics


def write_profile(directory: Path, rank: int, statistics: Any) -> None:
    """Writes `CallProfile.statistics` into a run's directory, as pstats and its viewers read it."""
    folder = directory / PROFILE_FOLDER
    folder.mkdir(exist_ok=True)
    (folder / f"rank-{rank:04d}.prof").write_bytes(marshal.dumps(statistics))


def merge_profiles(one: dict[Any, Any], other: dict[Any, Any]) -> dict[Any, Any]:
    """Returns the sums of two profiles; neither of them can be used any longer."""
    merged: Any = pstats.Stats(_counted(one)).add(_counted(other))
    statistics: dict[Any, Any] = merged.stats
    return statistics


def write_profile_table(directory: Path, statistics: dict[Any, Any]) -> None:
    """Writes a table of the functions with the longest own time, from all ranks' merged profiles.

    There is a profile in the run's directory already.
    """
    text = io.StringIO()
    stats = pstats.Stats(_counted(statistics), stream=text)
    stats.sort_stats("tottime").print_stats(60)
    (directory / PROFILE_FOLDER / "top.txt").write_text(text.getvalue(), encoding="utf-8")


def _counted(statistics: dict[Any, Any]) -> Any:
    """Returns a profile with these counts, in the form in which `pstats.Stats` takes it."""
    return SimpleNamespace(stats=statistics, create_stats=lambda: None)
