"""Saving a run's state while it trains: when, and what is saved.

All ranks count alike, so checkpoints at the end of epochs and every N steps need no agreement. The
time differs among ranks, and a signal need not reach all of them: they agree on these about once a
second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import isfinite

import keras
import numpy as np

from candle_p1.checkpoints.policy import SavePolicy
from candle_p1.checkpoints.writer import CheckpointWriter
from candle_p1.distributed.comm import Communicator
from candle_p1.distributed.replicas import average_state, restore_state
from candle_p1.instrument.phases import region
from candle_p1.records.types import Position
from candle_p1.training import state
from candle_p1.training.epochs import EpochTimer, GatheredEpochs, epoch_arrays
from candle_p1.training.restart import TrainingState
from candle_p1.training.setup import Training

PERIOD_S = 1.0
MAX_GROWTH = 10
"""A pause may be so much longer, in steps, than the one before: the first steps are no measure."""


class SaveTrigger:
    """Agrees on the time and on signals about once a second, after a number of steps.

    A checkpoint is due every `every_s` seconds of rank 0's clock, which is monotonic; never if that
    is 0. `is_signalled` returns whether this rank was told to save and end.
    """

    def __init__(
        self,
        comm: Communicator,
        every_s: float,
        is_signalled: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._comm, self._every_s = comm, every_s
        self._is_signalled, self._clock = is_signalled, clock
        self._saved_s = self._agreed_s = clock()
        self._steps_since, self._pause = 0, 1

    def step(self, num: int = 1) -> tuple[bool, bool]:
        """Counts the steps before one that is about to begin, and at times agrees; collective."""
        self._steps_since += num
        return self.agree() if self._steps_since >= self._pause else (False, False)

    def agree(self) -> tuple[bool, bool]:
        """Returns whether a checkpoint is due, and whether any rank was signalled; collective."""
        now = self._clock()
        is_due = 0 < self._every_s <= now - self._saved_s
        rate = self._steps_since / max(now - self._agreed_s, 1e-9)
        pause = min(max(round(rate * PERIOD_S), 1), MAX_GROWTH * self._pause)
        first = self._comm.rank == 0  # the others add nothing but their signals
        summand = np.array([is_due * first, self._is_signalled(), pause * first], np.int64)
        is_due_at_first, num_signalled, self._pause = self._comm.allreduce_sum(summand).tolist()
        self._agreed_s, self._steps_since = now, 0
        return bool(is_due_at_first), bool(num_signalled)

    def saved(self) -> None:
        """Counts the time to the next checkpoint from now."""
        self._saved_s = self._clock()


class Saver:
    """Saves checkpoints between steps; every rank must have one.

    Where this segment of the run begins is saved already. `arrays` returns what is saved and is the
    same on all ranks.

    Attributes:
        position: Where training is.
        is_interrupted: Whether a signal has ended training; then the checkpoint is safe.
    """

    def __init__(
        self,
        training: Training,
        writer: CheckpointWriter,
        states: state.CallbackStates,
        timer: EpochTimer,
        epochs: GatheredEpochs,
        arrays: Callable[[], Mapping[str, state.LiveArray]],
    ) -> None:
        self._training, self._writer, self._states = training, writer, states
        self._timer, self._epochs, self._arrays = timer, epochs, arrays
        run, self._params, self._plan = training.run, training.params, training.plan
        every_s = self._params["ckpt_every_s"]
        self._trigger = SaveTrigger(run.comm, every_s, lambda: run.watchdog.save_requested)
        self._policy = SavePolicy.of(self._params, last_epoch=self._plan.epochs_per_rank)
        if training.restart:
            self._policy.restore_state(training.restart.state.policy)
        self._is_due = self._is_best = self._is_signalled = self._is_lost = False
        self.position, self.is_interrupted = training.start, False
        self._steps_before = self._total_steps

    def before_step(self, position: Position) -> bool:
        """Saves before a step if that is due; returns whether training goes on. Collective."""
        num_steps = max(1, position.step - self.position.step)
        self.position = position
        if not position.step:  # it is due, if at all, since the end of the epoch before
            self._is_lost = False
            return True
        self._note_due(*self._trigger.step(num_steps))
        return self._save_if_due()

    def most_steps(self) -> int:
        """Returns how many steps may be trained before `before_step` must be called again."""
        passes, every = self._params["backward_passes_per_step"], self._params["ckpt_every_steps"]
        if (self._is_due or self._is_signalled) and not self._is_lost:
            return int(passes - (self._total_steps - self._steps_before) % passes)
        return int(every - self._total_steps % every) if every else self._plan.steps_per_epoch

    def after_epoch(self, epoch: int, logs: Mapping[str, float]) -> bool:
        """Saves after an epoch if that is due; returns whether training goes on. Collective."""
        self.position = Position(epoch=epoch + 1, step=0)
        if not self._params["allow_nan"] and not isfinite(logs.get("loss", 0)):  # on every rank
            return True  # training ends here, and the checkpoints before may be of use
        self._withdraw_lost_best()
        end = self._policy.after_epoch(epoch + 1, logs)
        is_last = self._training.model.stop_training or epoch + 1 == self._plan.epochs_per_rank
        is_due, is_signalled = self._trigger.agree()
        self._note_due(is_due or end.save or is_last, is_signalled)
        self._is_best |= end.best
        return self._save_if_due(wait=is_last)

    @property
    def _total_steps(self) -> int:
        return self.position.epoch * self._plan.steps_per_epoch + self.position.step

    def _note_due(self, is_due: bool, is_signalled: bool) -> None:
        """Notes whether a checkpoint is due here: as told, or by the number of steps."""
        self._is_signalled |= is_signalled
        if self._policy.allows(self.position.epoch):
            total, every = self._total_steps, self._params["ckpt_every_steps"]
            by_steps = bool(every) and total > self._steps_before and total % every == 0
            self._is_due |= is_due or by_steps

    def _withdraw_lost_best(self) -> None:
        """Lets a later epoch be the best if the one so far could not be written; collective."""
        best = self._policy.best
        if best is not None and not self._is_best and self._writer.best_is_lost():
            best.withdraw()

    def _save_if_due(self, *, wait: bool = False) -> bool:
        """Saves, unless gradients are being accumulated; what is due then stays so.

        Accumulation begins with this segment of the run, whose ranks may have other steps than
        those of the segment before. With `wait`, a checkpoint that is still being written does not
        prevent this one.
        """
        passes = self._params["backward_passes_per_step"]
        is_between = (self._total_steps - self._steps_before) % passes == 0
        if not is_between or not (self._is_due or self._is_signalled):
            return True
        model, run, params = self._training.model, self._training.run, self._params
        state.attach_state(model)
        within_epoch = self.position.step > 0
        if within_epoch and not params["allow_nan"]:
            # The loss may be lost on one rank only, but then the weights are lost on all.
            self._is_lost = self._is_lost or run.comm.any(not isfinite(state.loss_so_far(model)))
            if self._is_lost:  # the epoch's end reports it, but a signal leaves no time for that
                model.stop_training |= self._is_signalled
                return True
        self._withdraw_lost_best()
        with region("checkpoint"):
            own = state.own_arrays(model, within_epoch=within_epoch)
            layers = average_state(model, run.comm) if within_epoch else {}
            if within_epoch:
                own |= epoch_arrays(self._timer.so_far()) | layers
            facts = TrainingState(  # collective, and complete on rank 0 only
                **self._training.fingerprint,
                weights_only=params["ckpt_save_weights_only"],
                run=run.saved_run(),
                plan=self._plan.model_dump(),
                learning_rate=float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)),
                stopped=bool(model.stop_training),
                policy=self._policy.checkpoint_state(),
                callbacks=self._states.capture(),
                **self._epochs.to_facts(),
            ).model_dump()
            options = {"best": self._is_best, "wait": wait or self._is_signalled}
            self._writer.save(self.position, self._arrays(), own, facts, **options)
            restore_state(model, layers)  # training goes on as if nothing had been saved
        self._is_due = self._is_best = False
        self._trigger.saved()
        self.is_interrupted = self._is_signalled
        return not self.is_interrupted
