"""Saving a run's state while it trains: when, and what of it."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

import keras

from candle_p1.checkpoints.manifest import Position
from candle_p1.distributed.callbacks import average_state, restore_state
from candle_p1.errors import CandleError
from candle_p1.instrument.phases import part
from candle_p1.training.callback_state import encode
from candle_p1.training.continued import TrainingInterrupted
from candle_p1.training.epoch_facts import epoch_arrays
from candle_p1.training.state import loss_so_far, own_arrays, replicated_arrays

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from candle_p1.checkpoints.policy import SavePolicy
    from candle_p1.checkpoints.writer import CheckpointWriter
    from candle_p1.scaling import ScalingPlan
    from candle_p1.training.callback_state import CallbackStates
    from candle_p1.training.callbacks import EpochTimer
    from candle_p1.training.epoch_facts import GatheredEpochs
    from candle_p1.training.pulse import Pulse


class Saver(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves checkpoints. Must be the last callback; collective.

    Args:
        writer: Writes them.
        policy: Which ends of epochs are saved.
        pulse: Agrees on the time and on signals.
        plan: The plan.
        states: The states of all callbacks.
        timer: Times the epochs.
        epochs: Gathers what the record says about them.
        describe: Returns what else a checkpoint says about the run; called on every rank.
        start: Where this part of the run begins; what is there is saved already.
        every_steps: The steps between checkpoints, counted over epochs; 0: none by steps.
        passes: The steps between two updates of the weights; only then is anything saved.
        weights_only: Whether the optimizer's state is left out.
        allow_nan: Whether training goes on after an epoch whose loss is not a finite number. If it
            does not, nothing is saved from the step on in which the loss becomes one.

    Attributes:
        position: Where training is.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        policy: SavePolicy,
        pulse: Pulse,
        plan: ScalingPlan,
        states: CallbackStates,
        timer: EpochTimer,
        epochs: GatheredEpochs,
        describe: Callable[[], Mapping[str, Any]],
        *,
        start: Position,
        every_steps: int = 0,
        passes: int = 1,
        weights_only: bool = False,
        allow_nan: bool = False,
    ) -> None:
        super().__init__()
        self._writer, self._policy, self._pulse, self._plan = writer, policy, pulse, plan
        self._states, self._timer, self._epochs, self._describe = states, timer, epochs, describe
        self._every_steps, self._passes, self._weights_only = every_steps, passes, weights_only
        self._allow_nan = allow_nan
        self._is_due = self._is_best = self._is_signalled = self._is_lost = False
        self.position = start
        self._steps_before = self._total_steps

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Remembers the epoch."""
        self.position, self._is_lost = Position(epoch, 0), False

    def before_step(self, step: int) -> None:
        """Saves before a step if that is due; collective.

        Raises:
            TrainingInterrupted: A signal has asked for it; the checkpoint is safe.
        """
        self.position = Position(self.position.epoch, step)
        if not step:  # it is due, if at all, since the end of the epoch before
            return
        agreed = self._pulse.step()
        self._is_signalled |= agreed.is_signalled
        if self._policy.allows(self.position.epoch):
            self._is_due |= agreed.is_due or self._is_due_by_steps
        self._save_if_due()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Saves after an epoch if that is due; collective.

        Raises:
            TrainingInterrupted: A signal has asked for it; the checkpoint is safe.
        """
        self.position = Position(epoch + 1, 0)
        if not self._allow_nan and not isfinite((logs or {}).get("loss", 0)):  # on every rank
            return  # training ends here, and the checkpoints before may be of use
        self._withdraw_lost_best()
        try:
            end = self._policy.after_epoch(epoch + 1, logs or {})
        except CandleError as error:
            raise error.on_all_ranks() from error
        agreed = self._pulse.agree()
        self._is_signalled |= agreed.is_signalled
        is_last = self.model.stop_training or epoch + 1 == self._plan.epochs_per_rank
        if self._policy.allows(self.position.epoch):
            self._is_due |= end.save or agreed.is_due or self._is_due_by_steps or is_last
        self._is_best |= end.best
        self._save_if_due(wait=is_last)

    @property
    def _total_steps(self) -> int:
        return self.position.epoch * self._plan.steps_per_epoch + self.position.step

    @property
    def _is_due_by_steps(self) -> bool:
        total = self._total_steps
        return (
            self._every_steps > 0 and total > self._steps_before and not total % self._every_steps
        )

    def _withdraw_lost_best(self) -> None:
        """Lets a later epoch be the best if the one so far could not be written; collective."""
        best = self._policy.best
        if best is not None and not self._is_best and self._writer.best_is_lost():
            best.withdraw()

    def _save_if_due(self, *, wait: bool = False) -> None:
        """Saves, unless gradients are being accumulated; what is due then stays so.

        Accumulation begins with this part of the run, whose ranks may have other steps than those
        of the part before.

        With `wait`, a checkpoint that is still being written does not prevent this one.
        """
        is_between = (self._total_steps - self._steps_before) % self._passes == 0
        if not is_between or not (self._is_due or self._is_signalled):
            return
        model = self.model  # with JAX, this also puts the state of the steps into the model
        within_epoch = self.position.step > 0
        if within_epoch and not self._allow_nan:
            # The loss may be lost on one rank only, but then the weights are lost on all.
            self._is_lost = self._is_lost or self._pulse.any_rank(not isfinite(loss_so_far(model)))
            if self._is_lost:  # the epoch's end tells; a signal leaves no time for the rest of it
                model.stop_training |= self._is_signalled
                return
        self._withdraw_lost_best()
        with part("checkpoint"):
            own = own_arrays(model, within_epoch=within_epoch)
            of_layers = average_state(model, self._pulse.comm) if within_epoch else {}
            if within_epoch:
                own |= epoch_arrays(self._timer.so_far()) | of_layers
            self._writer.save(
                self.position,
                replicated_arrays(model, with_optimizer=not self._weights_only),
                own,
                self._facts(),
                best=self._is_best,
                wait=wait or self._is_signalled,
            )
            restore_state(model, of_layers)  # training goes on as if nothing had been saved
        self._is_due = self._is_best = False
        self._pulse.saved()
        if self._is_signalled:
            raise TrainingInterrupted

    def _facts(self) -> dict[str, Any]:
        """Returns what is not an array; collective, and complete on rank 0 only."""
        optimizer = self.model.optimizer
        return {
            **self._describe(),
            "plan": self._plan.to_dict(),
            "learning_rate": float(keras.ops.convert_to_numpy(optimizer.learning_rate)),
            "stopped": bool(self.model.stop_training),
            "policy": encode(self._policy.checkpoint_state()),
            "callbacks": self._states.capture(),
            **self._epochs.to_facts(),
        }
