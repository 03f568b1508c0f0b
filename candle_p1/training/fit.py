"""Training itself: the callbacks in their order, the checkpoints, and what the record says."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

import keras

from candle_p1.checkpoints.manifest import Position
from candle_p1.checkpoints.policy import SavePolicy, keep_policy
from candle_p1.checkpoints.writer import CheckpointWriter
from candle_p1.data.batches import EvaluationBatches, TrainBatches
from candle_p1.distributed import step_trace
from candle_p1.distributed.allreduce_log import allreduce_times
from candle_p1.distributed.callbacks import (
    EpochMetrics,
    LearningRateWarmup,
    ReplicaCheck,
    SharedValidation,
    TimeLimit,
)
from candle_p1.distributed.timeline import is_traced
from candle_p1.instrument import tensorboard
from candle_p1.training.callback_state import CallbackStates, decode
from candle_p1.training.callbacks import EpochTable, EpochTimer, Progress
from candle_p1.training.continued import TrainingCallbacks, fit_from
from candle_p1.training.epoch_facts import GatheredEpochs, epoch_from
from candle_p1.training.pulse import Pulse
from candle_p1.training.restart import Start
from candle_p1.training.saver import Saver
from candle_p1.training.setup import explained_memory_errors
from candle_p1.training.state import build_metrics, replicated_arrays, restore_own

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from candle_p1.benchmark import Benchmark
    from candle_p1.data.samples import DataSet
    from candle_p1.distributed.allreduce_log import AllreduceLog
    from candle_p1.instrument.mllog import RunLog
    from candle_p1.parameters.parameter_set import ParameterSet
    from candle_p1.scaling import ScalingPlan
    from candle_p1.training.lifecycle import Run
    from candle_p1.training.restart import Restart


class TrainingOutcome(NamedTuple):
    """What came out of training.

    Attributes:
        history: The ``keras.callbacks.History``, with the metrics of all parts of the run.
        facts: What the record says about it; complete on rank 0.
        begin: Where it began.
        end: Where it ended.
        writer: Writes checkpoints, the last one maybe still now; None: there are none.
        is_interrupted: A signal has ended it; its checkpoint is safe.
    """

    history: Any
    facts: dict[str, Any]
    begin: Position
    end: Position
    writer: CheckpointWriter | None = None
    is_interrupted: bool = False


def train_model(
    benchmark: Benchmark,
    model: Any,
    data: DataSet,
    plan: ScalingPlan,
    params: ParameterSet,
    allreduces: AllreduceLog | None,
    this: Run,
    log: RunLog,
    saving: Sequence[Any],
    identity: Mapping[str, Any],
    restart: Restart | None = None,
) -> TrainingOutcome:
    """Trains a model that is the same on every rank; collective.

    Args:
        benchmark: The benchmark.
        model: The compiled model, with the arrays of the restart's checkpoint if there is one.
        data: The samples.
        plan: The plan.
        params: The parameters of the run.
        allreduces: The log of the gradients' allreduces; None: they are not logged.
        this: The run.
        log: The log in MLPerf's format.
        saving: The callbacks that save the model; there may be some on rank 0 only.
        identity: What a checkpoint must have in common with a run that goes on from it.
        restart: The restart from a checkpoint; None: training begins.
    """
    comm = this.comm
    if not params["train_bool"]:
        model_of = ""
        if restart:
            restart.release()
            model_of = f", the model is that of {restart.directory}"
        facts = {"epochs": [], "stopped": f"train_bool is False{model_of}"}
        return TrainingOutcome(keras.callbacks.History(), facts, Position(0, 0), Position(0, 0))
    start = restart.start if restart else Start()
    own = restart.restore_ranks(model, plan, params["rng_seed"]) if restart else {}
    batches = TrainBatches(
        data.train, plan, seed=params["rng_seed"], rank=comm.rank, shuffle=params["reshuffle"]
    )
    listed = _Callbacks.of(benchmark, model, data, batches, plan, params, allreduces, this, log)
    if start.step:
        listed.timer.resume(epoch_from(own))
        build_metrics(model, batches[0])
    if comm.rank == 0:
        listed.callbacks += _rank_0_callbacks(plan, params, this, start)
    listed.callbacks += saving
    states = CallbackStates([*listed.callbacks, log])
    num_samples = comm.size * plan.samples_per_epoch
    saved = restart.facts if restart else None
    epochs = GatheredEpochs(
        comm, listed.timer, listed.validation, listed.history, num_samples, this.part, saved
    )
    if comm.rank == 0:
        this.note(training={"epochs": epochs.facts})
        note = keras.callbacks.LambdaCallback(on_epoch_end=lambda *ended: this.note_epochs(epochs))
        listed.callbacks.append(note)
    writer = saver = None
    if this.checkpoint_root is not None:
        writer = _make_writer(params, this)
        weights_only = params["ckpt_save_weights_only"]
        writer.prepare(replicated_arrays(model, with_optimizer=not weights_only))
        policy = SavePolicy.of(params, last_epoch=plan.epochs_per_rank)
        if saved:
            policy.restore_state(decode(saved["policy"]))
        saver = Saver(
            writer,
            policy,
            Pulse(comm, params["ckpt_every_s"], lambda: this.watchdog.save_requested),
            plan,
            states,
            listed.timer,
            epochs,
            lambda: {**identity, "weights_only": weights_only, "run": this.run_facts()},
            start=Position(start.epoch, start.step),
            every_steps=params["ckpt_every_steps"],
            passes=params["backward_passes_per_step"],
            weights_only=weights_only,
            allow_nan=params["allow_nan"],
        )
        listed.callbacks.append(saver)

    def begin() -> None:
        states.begin()
        if saved:
            states.restore(saved["callbacks"])

    together = TrainingCallbacks(
        listed.callbacks,
        model,
        plan.epochs_per_rank,
        plan.steps_per_epoch,
        begun=begin,
        resumed=lambda: restore_own(model, own, within_epoch=True),
        before_step=saver.before_step if saver else lambda step: None,
    )
    try:
        with explained_memory_errors(), this.watchdog.saving() if saver else nullcontext():
            is_complete = fit_from(model, batches, together, start, plan.epochs_per_rank)
    except BaseException:
        if writer:
            writer.abandon()
        raise
    finally:
        this.screen.end_training()
    for lost in states.lost:
        this.screen.warn(f"checkpoints do not contain {lost}, which is not plain data")

    epochs.gather()
    return TrainingOutcome(
        listed.history,
        _describe(epochs, listed, plan, params, is_complete) if comm.rank == 0 else {},
        Position(start.epoch, start.step),
        saver.position if saver else Position(len(listed.history.epoch), 0),
        writer,
        not is_complete,
    )


@dataclass
class _Callbacks:
    """The callbacks of every rank, in order, and those of them that are asked for results."""

    callbacks: list[Any]
    timer: EpochTimer
    validation: SharedValidation
    history: Any
    early_stop: Any
    limit: TimeLimit | None

    @classmethod
    def of(
        cls,
        benchmark: Benchmark,
        model: Any,
        data: DataSet,
        batches: TrainBatches,
        plan: ScalingPlan,
        params: ParameterSet,
        allreduces: AllreduceLog | None,
        this: Run,
        log: RunLog,
    ) -> _Callbacks:
        """Returns them; see `train_model`."""
        comm = this.comm
        timer = EpochTimer(this.start, allreduce_times(allreduces, comm))
        validated = EvaluationBatches(
            data.validation, params["batch_size"], comm, params["val_steps"]
        )
        validation = SharedValidation(validated, comm)

        def count_step(batch: int, logs: dict[str, float]) -> None:
            this.watchdog.count_step()
            if allreduces:
                allreduces.count_step()

        def end_epoch(epoch: int, logs: dict[str, float]) -> None:
            log.add_epoch(timer.epochs[-1], validation.seconds[-1], logs)
            if not params["allow_nan"] and not isfinite(logs.get("loss", 0)):  # on every rank
                model.stop_training = True

        callbacks = [
            timer,
            keras.callbacks.LambdaCallback(
                on_epoch_begin=lambda epoch, logs: batches.set_epoch(epoch),
                on_train_batch_begin=count_step,
            ),
            EpochMetrics(comm),
            validation,
            keras.callbacks.LambdaCallback(on_epoch_end=end_epoch),
        ]
        if params["tensorboard"] and comm.rank == 0:  # before callbacks that change the rate
            directory = this.directory / tensorboard.DIRECTORY
            is_continued = this.restart is not None
            callbacks.append(tensorboard.epoch_logs(directory, is_continued=is_continued))
        if plan.warmup_epochs:
            callbacks.append(LearningRateWarmup(plan, params["warmup_by"]))
        callbacks += benchmark.callbacks(params)
        if params["check_replicas"]:
            callbacks.append(ReplicaCheck(comm))
        early_stop = keras.callbacks.EarlyStopping("val_loss", patience=params["patience"])
        if params["early_stop"]:
            callbacks.append(early_stop)
        limit = TimeLimit(params["timeout"], comm) if (params["timeout"] or -1) > 0 else None
        if limit:
            callbacks.append(limit)
        history = keras.callbacks.History()
        callbacks.append(history)
        return cls(callbacks, timer, validation, history, early_stop, limit)


def _rank_0_callbacks(
    plan: ScalingPlan, params: ParameterSet, this: Run, start: Start
) -> list[Any]:
    # Both tables are the same; the second name is the one that CANDLE's scripts use.
    callbacks: list[Any] = [
        EpochTable(this.directory / name) for name in ("history.csv", "training.log")
    ]
    progress = Progress(this.screen, plan.epochs_per_rank, plan.steps_per_epoch, start.epoch)
    callbacks.append(progress)
    if params["step_trace"]:
        callbacks.append(step_trace.StepTracer(this.directory / step_trace.DIRECTORY))
    return callbacks


def _make_writer(params: ParameterSet, this: Run) -> CheckpointWriter:
    assert this.checkpoint_root is not None
    return CheckpointWriter(
        this.comm,
        this.checkpoint_root,
        keep=keep_policy(params["ckpt_keep_mode"], params["ckpt_keep_limit"]),
        checksum=params["ckpt_checksum"],
        writers=params["ckpt_writers"],
        required=params["ckpt_required"],
        say=this.screen.warn,
        after=this.restart,
    )


def _describe(
    epochs: GatheredEpochs,
    listed: _Callbacks,
    plan: ScalingPlan,
    params: ParameterSet,
    is_complete: bool,
) -> dict[str, Any]:
    """Returns what the record says about training, on rank 0."""
    facts: dict[str, Any] = {"epochs": epochs.facts}
    if epochs.samples_per_s is not None:
        facts["samples_per_s"] = epochs.samples_per_s
    if params["profiling"] or params["step_trace"]:
        facts["profiled"] = True
    if is_traced():
        facts["traced"] = True
    if not is_complete:
        facts["stopped"] = "a signal asked to save and end"
    elif 0 < len(epochs.facts) < plan.epochs_per_rank:
        if listed.limit and listed.limit.reached:
            facts["stopped"] = f"timeout of {params['timeout']} s"
        elif epochs.facts[-1].metrics.get("loss", 0) is None:
            facts["stopped"] = "the loss was not a number"
        elif listed.early_stop.stopped_epoch:
            facts["stopped"] = (
                f"early_stop: the validation loss did not fall for {params['patience']} epochs; the"
                " model is that of the last epoch"
            )
        else:
            facts["stopped"] = "a callback of the benchmark ended it"
    return facts
