"""Training: epochs and steps, what happens between them, and what the record says about them."""

from __future__ import annotations

import time
from contextlib import nullcontext
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import keras

from candle_p1.checkpoints.policy import keep_policy
from candle_p1.checkpoints.writer import CheckpointWriter
from candle_p1.data.batches import EvaluationBatches, TrainBatches
from candle_p1.distributed import callbacks
from candle_p1.distributed.allreduce_log import allreduce_times
from candle_p1.distributed.reducers.horovod import is_traced
from candle_p1.distributed.replicas import average_state
from candle_p1.instrument.logs import TENSORBOARD_FOLDER, epoch_logs
from candle_p1.models.fast import device_data
from candle_p1.models.fast.batches import taken_by
from candle_p1.records.segments import BEGINNING
from candle_p1.records.types import Position
from candle_p1.text import count
from candle_p1.training import state
from candle_p1.training.epochs import EpochTimer, GatheredEpochs, epoch_from
from candle_p1.training.saver import Saver
from candle_p1.training.setup import Training, explained_memory_errors
from candle_p1.training.steps import Pace, Steps, evaluation_on_device, make_steps, python_logs


class TrainingOutcome(NamedTuple):
    """What came out of training."""

    history: Any  # a keras.callbacks.History, with the metrics of all segments of the run
    facts: dict[str, Any]  # what the record says about it; complete on rank 0
    begin: Position
    end: Position
    writer: CheckpointWriter | None = None  # of checkpoints, the last one maybe still being written
    is_interrupted: bool = False  # by a signal; its checkpoint is safe


def train_model(training: Training) -> TrainingOutcome:
    """Trains a model that is the same on every rank; collective."""
    if training.params["train_bool"]:
        return _Loop(training).run()
    restart, model_of = training.restart, "the weights are untrained"
    facts: dict[str, Any] = {"epochs": []}
    if restart:
        model_of = f"the model is that of {restart.directory}"
    if restart and restart.is_over and (best := restart.best_weights()):
        training.model.set_weights(best)
        saved = restart.state.callbacks[f"{state.BestEpoch.__name__}-1"]
        facts["model_epoch"] = saved["best_epoch"] + 1
    facts["stopped"] = f"train_bool is False: {model_of}"
    return TrainingOutcome(keras.callbacks.History(), facts, BEGINNING, BEGINNING)


class _Loop:
    """Trains the epochs of a segment of a run."""

    def __init__(self, training: Training) -> None:
        run, params, plan = training.run, training.params, training.plan
        comm, model, restart = run.comm, training.model, training.restart
        self._training, self._run, self._model, self._plan = training, run, model, plan
        self._logs: dict[str, float] = {}
        self._is_first, self._is_jax = comm.rank == 0, keras.backend.backend() == "jax"
        start = self._start = training.start
        self._own = restart.restore_ranks(model, plan, params["rng_seed"]) if restart else {}
        data, seed, shuffle = training.data, params["rng_seed"], params["reshuffle"]
        self._samples = [taken_by(model, each) for each in (data.train, data.validation)]
        self._batches = TrainBatches(
            self._samples[0], plan, seed=seed, rank=comm.rank, shuffle=shuffle
        )
        self._validation_batches = EvaluationBatches(
            self._samples[1], params["batch_size"], comm, params["val_steps"]
        )
        earlier = epoch_from(self._own) if start.step else None
        self._timer = EpochTimer(run.start, allreduce_times(training.allreduces, comm), earlier)
        if start.step or self._is_jax:
            state.build_metrics(model, self._batches[0])
        self._history = keras.callbacks.History()
        self._early_stop = None
        if params["early_stop"]:
            best = restart.best_weights() if restart else None
            self._early_stop = state.BestEpoch(model, params["patience"], best)
        self._callbacks = self._make_callbacks()
        self._at_step_begin = [each for each in self._callbacks if _overrides(each, "begin")]
        self._at_step_end = [each for each in self._callbacks if _overrides(each, "end")]
        # Rank 0 has more callbacks than others, but blocks are the same on all ranks.
        self._one_by_one = not self._is_jax or comm.any(
            bool(self._at_step_end)
            or any(not hasattr(each, "steps_until_seen") for each in self._at_step_begin)
        )
        self._pace = Pace(comm)
        self._placement = self._place_samples()
        self._states = state.CallbackStates([*self._callbacks, training.models, training.log])
        num_samples, saved = comm.size * plan.samples_per_epoch, restart.state if restart else None
        self._epochs = GatheredEpochs(comm, self._history, num_samples, run.segment, saved)
        if self._is_first:
            run.note(training={"epochs": self._epochs.facts})
        self._saver = self._writer = None
        if run.checkpoint_root is not None:
            self._writer = self._make_writer(run.checkpoint_root)
            self._saver = Saver(
                training, self._writer, self._states, self._timer, self._epochs, self._saved_arrays
            )

    def run(self) -> TrainingOutcome:
        run, saver = self._run, self._saver
        try:
            with explained_memory_errors(), run.watchdog.saving() if saver else nullcontext():
                self._train()
        except BaseException:
            if self._writer:
                self._writer.abandon()
            raise
        finally:
            run.screen.end_training()
        self._epochs.gather()
        return TrainingOutcome(
            self._history,
            self._describe() if self._is_first else {},
            self._start,
            saver.position if saver else Position(epoch=len(self._history.epoch), step=0),
            self._writer,
            bool(saver and saver.is_interrupted),
        )

    def _train(self) -> None:
        model, start, restart = self._model, self._start, self._training.restart
        is_over = restart is not None and restart.is_over
        epochs = range(start.epoch, start.epoch if is_over else self._plan.epochs_per_rank)
        model.stop_training = False
        self._begin()
        data, validation_data = self._placement.data or (None, None)
        if epochs:
            steps = make_steps(model, self._batches, data, epochs, start.step)
        self._evaluate = validation_data and evaluation_on_device(
            model, validation_data, self._validation_batches
        )
        for epoch in epochs:
            first_step = start.step * (epoch == start.epoch)
            if not self._train_epoch(epoch, first_step, steps):
                break
            logs = self._end_epoch(epoch)
            if (self._saver and not self._saver.after_epoch(epoch, logs)) or model.stop_training:
                break
        state.attach_state(model)
        model.optimizer.finalize_variable_values(model.trainable_weights)
        for callback in self._callbacks:
            callback.on_train_end(self._logs)

    def _begin(self) -> None:
        """Begins training; a continued run restores the states of callbacks."""
        model, plan, restart = self._model, self._plan, self._training.restart
        num_epochs, num_steps = plan.epochs_per_rank, plan.steps_per_epoch
        model.history = self._history
        for callback in self._callbacks:
            callback.set_model(model)
            callback.set_params({"verbose": 0, "epochs": num_epochs, "steps": num_steps})
        for callback in self._callbacks:
            callback.on_train_begin({})
        for kind in self._states.unknown if self._saver else ():
            self._run.screen.warn(
                f"checkpoints do not contain the state of the callback {kind}, which lacks"
                " checkpoint_state and restore_state"
            )
        if self._is_first:
            self._run.screen.begin_training(num_epochs, num_steps, self._start.epoch)
        self._training.models.save_initial(model)
        if restart:
            self._states.restore(restart.state.callbacks)

    def _train_epoch(self, epoch: int, first_step: int, steps: Steps) -> bool:
        """Trains an epoch from `first_step` on; returns False if a signal has ended it."""
        model, allreduces = self._model, self._training.allreduces
        model.reset_metrics()
        self._timer.begin_epoch()
        for callback in self._callbacks:
            callback.on_epoch_begin(epoch, {})
        if first_step:
            state.restore_own(model, self._own, within_epoch=True)
        step = first_step
        while step < self._plan.steps_per_epoch:
            if self._saver and not self._saver.before_step(Position(epoch=epoch, step=step)):
                return False
            most = self._most_steps(step, steps)
            num = min(most, self._pace.num_steps)
            begin_s = self._timer.begin_steps(num)
            self._run.watchdog.count_steps(num)
            if allreduces:
                allreduces.count_steps(num)
            for callback in self._at_step_begin:
                callback.on_train_batch_begin(step, {})
            if self._is_first:
                self._run.screen.show_step(step)
            logs = steps.train(epoch, step, num)
            if most > 1:
                self._pace.wait(num, begin_s, logs)
            step += num
            seen = python_logs(logs) if self._at_step_end else {}
            for callback in self._at_step_end:
                callback.on_train_batch_end(step - 1, seen)
            if model.stop_training:
                break
        state.attach_state(model)
        # A model with a step of its own may return other metrics than it has.
        metrics = model.get_metrics_result()
        self._logs = python_logs(metrics if metrics.keys() == logs.keys() else logs)
        return True

    def _most_steps(self, step: int, steps: Steps) -> int:
        """Returns how many steps, from this one on, may form one block."""
        if self._one_by_one:
            return 1
        limits: list[int] = [
            steps.most(step),
            *(each.steps_until_seen(step) for each in self._at_step_begin),
        ]
        return min([*limits, self._saver.most_steps()] if self._saver else limits)

    def _place_samples(self) -> device_data.Placement:
        """Puts the samples for training and validation on the device, with JAX and if they fit."""
        run = self._run
        if not self._is_jax:
            return device_data.Placement(None)
        limit_mb = self._training.params["device_data_mb"]
        limit = device_data.limit_bytes(run.comm.local_size)
        with run.screen.making_data("copying to the device:") as show:
            placement = device_data.place(
                self._samples,
                limit if limit_mb is None else limit_mb << 20,
                run.comm.any,
                lambda before, total, num: show("the samples", before + num, total),
            )
        if placement.reason:
            run.screen.warn(f"{placement.reason}: each step gets its batch from the host")
        return placement

    def _end_epoch(self, epoch: int) -> dict[str, float]:
        """Ends an epoch with its validation; returns its metrics over all ranks. Collective."""
        training, run, model, logs = self._training, self._run, self._model, dict(self._logs)
        trained = self._timer.end_epoch()
        if run.comm.size > 1:
            logs.update(callbacks.reduce_metrics(model, run.comm))
        logs["learning_rate"] = float(model.optimizer.learning_rate)
        average_state(model, run.comm)  # from here to the next epoch, all replicas are equal
        begin = time.perf_counter()
        validated = callbacks.evaluate_shared(
            model, self._validation_batches, run.comm, self._evaluate
        )
        validation_s = time.perf_counter() - begin
        logs.update({f"val_{name}": value for name, value in validated.items()})
        training.log.add_epoch(trained, validation_s, logs)
        if not training.params["allow_nan"] and not isfinite(logs.get("loss", 0)):  # on every rank
            model.stop_training = True
        for callback in self._callbacks:
            callback.on_epoch_end(epoch, logs)
        self._epochs.add(trained, validation_s)
        if self._is_first:
            run.screen.show_epoch(epoch, logs)
        training.models.save_best(model, logs)
        if self._is_first:
            run.note_epochs(self._epochs)
        return logs

    def _make_callbacks(self) -> list[Any]:
        """Returns the callbacks in the order in which they are called."""
        training, run, plan = self._training, self._run, self._plan
        params, is_first, limit_s = training.params, self._is_first, training.params["timeout"]
        traces, logs = (
            run.directory / callbacks.TRACE_DIRECTORY,
            run.directory / TENSORBOARD_FOLDER,
        )
        before = [
            # Before callbacks that change the rate.
            is_first
            and params["tensorboard"]
            and epoch_logs(logs, is_continued=run.restart is not None),
            plan.warmup_epochs and callbacks.LearningRateWarmup(plan, params["warmup_by"]),
        ]
        after = [
            params["check_replicas"] and callbacks.ReplicaCheck(run.comm),
            self._early_stop,
            (limit_s or 0) > 0 and callbacks.TimeLimit(limit_s, run.comm),
            training.after_epoch and callbacks.AfterEpoch(training.after_epoch, run.comm),
            self._history,
            # Both tables are the same; the second name is the one that CANDLE's scripts use.
            is_first and state.EpochTable(run.directory / "history.csv"),
            is_first and state.EpochTable(run.directory / "training.log"),
            is_first and params["step_trace"] and callbacks.StepTracer(traces),
        ]
        own = training.benchmark.callbacks(params)
        return [*filter(None, before), *own, *filter(None, after)]

    def _make_writer(self, root: Path) -> CheckpointWriter:
        params, run = self._training.params, self._run
        options = {name: params[f"ckpt_{name}"] for name in ("checksum", "required")}
        keep = keep_policy(params["ckpt_keep_mode"], params["ckpt_keep_limit"])
        writer = CheckpointWriter(
            run.comm, root, keep=keep, say=run.screen.warn, after=run.restart, **options
        )
        writer.prepare(self._saved_arrays())
        return writer

    def _saved_arrays(self) -> dict[str, state.LiveArray]:
        """Returns what checkpoints keep that is the same on all ranks."""
        with_optimizer = not self._training.params["ckpt_save_weights_only"]
        best = self._early_stop.weights if self._early_stop else ()
        return state.replicated_arrays(self._model, with_optimizer=with_optimizer, best=best)

    def _describe(self) -> dict[str, Any]:
        """Returns what the record says about training, on rank 0."""
        params, epochs = self._training.params, self._epochs.facts
        facts: dict[str, Any] = {"epochs": epochs}
        if self._is_jax:
            placed = self._placement
            facts["device_data"] = {
                "copied_bytes": placed.copied_bytes,
                "in_place_bytes": placed.in_place_bytes,
                "streamed_because": placed.reason or None,
                "largest_block": self._pace.largest,
            }
        if self._epochs.samples_per_s is not None:
            facts["samples_per_s"] = self._epochs.samples_per_s
        if self._early_stop:
            facts["model_epoch"] = self._early_stop.number
        if params["profiling"] or params["step_trace"]:
            facts["profiled"] = True
        if is_traced():
            facts["traced"] = True
        if self._saver and self._saver.is_interrupted:
            facts["stopped"] = "a signal asked to save and end"
        elif 0 < len(epochs) < self._plan.epochs_per_rank:
            facts["stopped"] = self._why_stopped()
        return facts

    def _why_stopped(self) -> str:
        params, last = self._training.params, self._epochs.facts[-1]
        ended = {type(each) for each in self._callbacks if getattr(each, "has_ended", False)}
        if callbacks.TimeLimit in ended:
            return f"timeout of {params['timeout']} s"
        if last.metrics.get("loss", 0) is None:
            return "the loss was not a number"
        if state.BestEpoch in ended:
            waited = count(params["patience"], "epoch")
            return f"early_stop: the validation loss did not fall for {waited}"
        if callbacks.AfterEpoch in ended:
            return "the program that called run() ended it"
        return "a callback ended it"


def _overrides(callback: Any, when: str) -> bool:
    """Returns whether a callback sees steps begin or end: reading metrics for it takes time."""
    return any(
        getattr(getattr(callback, name), "__func__", None)
        is not getattr(keras.callbacks.Callback, name)
        for name in (f"on_train_batch_{when}", f"on_batch_{when}")
    )
