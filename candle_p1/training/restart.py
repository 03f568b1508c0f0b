"""Resuming from a checkpoint: what is checked, what is left to train, and what is put back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from candle_p1.checkpoints.arrays import ArraySpec
from candle_p1.checkpoints.policy import are_saved
from candle_p1.distributed.replicas import seed_ranks
from candle_p1.records.types import Position
from candle_p1.scaling import ScalingPlan, continued_learning_rate, remaining_epochs
from candle_p1.text import count
from candle_p1.training.fingerprint import TrainingState, check_equal

if TYPE_CHECKING:
    from candle_p1.checkpoints.checkpoint import Checkpoint
    from candle_p1.distributed.comm import Communicator
    from candle_p1.parameters.parameter_set import ParameterSet


def may_restart(params: ParameterSet) -> bool:
    """Returns whether a run with these parameters goes on from a checkpoint if there is one."""
    return are_saved(params) and params["ckpt_restart_mode"] != "off"


class Restart:
    """A restart from a checkpoint, which rank 0 reads. Every rank has one.

    Use `of` to make one.

    Attributes:
        directory: The checkpoint's directory.
        state: What the checkpoint says besides its arrays.
        saved_plan: The plan of the ranks that wrote it.
    """

    def __init__(
        self,
        checkpoint: Checkpoint | None,
        comm: Communicator,
        directory: Path,
        position: Position,
        state: TrainingState,
    ) -> None:
        self._checkpoint, self._comm = checkpoint, comm
        self._position = position
        self._best: list[NDArray[Any]] = []  # on rank 0
        self.directory, self.state = directory, state
        self.saved_plan = ScalingPlan(**state.plan)

    @classmethod
    def of(cls, checkpoint: Checkpoint | None, comm: Communicator) -> Restart | None:
        """Returns the restart from rank 0's checkpoint, None if it has none; collective."""
        mine = None
        if checkpoint is not None:
            mine = (checkpoint.directory, checkpoint.position, TrainingState.of(checkpoint))
        found = comm.broadcast(mine)
        return None if found is None else cls(checkpoint, comm, *found)

    @property
    def same_ranks(self) -> bool:
        """Whether as many ranks go on as have written the checkpoint."""
        return self._comm.size == self.saved_plan.num_ranks

    @property
    def start(self) -> Position:
        """Where training goes on. Other ranks begin an incomplete epoch anew."""
        step = self._position.step if self.same_ranks else 0
        return Position(epoch=self._position.epoch, step=step)

    @property
    def is_over(self) -> bool:
        """Whether training has ended already, so that only the evaluation is left."""
        return self.state.stopped or self._position.epoch >= self.epochs_per_rank

    @property
    def epochs_per_rank(self) -> int:
        """The number of epochs of a rank, with those that are complete."""
        if self.same_ranks:
            return self.saved_plan.epochs_per_rank
        epoch, step = self._position.epoch, self._position.step
        return epoch + remaining_epochs(self.saved_plan, self._comm.size, epoch, step)

    def explain(self) -> str:
        """Returns a sentence on what another number of ranks has to train."""
        left = count(self.epochs_per_rank - self._position.epoch, "epoch")
        before, ranks = count(self.saved_plan.num_ranks, "rank"), count(self._comm.size, "rank")
        return f"the checkpoint is one of {before}, and leaves {left} to each of {ranks}"

    def check_run(self, here: Mapping[str, Any]) -> None:
        """Checks the benchmark and its parameters; see `fingerprint.run_fingerprint`.

        Raises:
            CheckpointError: They are others; the same on every rank.
        """
        benchmark = {"benchmark": self.state.benchmark}
        check_equal(self.directory, benchmark, {"benchmark": here["benchmark"]})
        check_equal(self.directory, self.state.parameters, here["parameters"])

    def check_plan(self, plan: ScalingPlan) -> None:
        """Checks the plan, if the number of ranks is the same.

        Raises:
            CheckpointError: It is another; the same on every rank.
        """
        if self.same_ranks:
            check_equal(self.directory, self.state.plan, plan.model_dump())

    def check_data(self, here: Mapping[str, Any]) -> None:
        """Checks the data; see `fingerprint.data_fingerprint`.

        Raises:
            CheckpointError: They are others; the same on every rank.
        """
        check_equal(self.directory, self.state.data, here)

    def restore_arrays(self, model: Any) -> None:
        """Puts weights and optimizer into the model on rank 0, from which they are broadcast.

        Raises:
            CheckpointError: The model has other arrays, or a file cannot be read; on rank 0.
        """
        from candle_p1.training import state

        if self._checkpoint is None:
            return
        saved = self._checkpoint.arrays
        with_optimizer = any(name.startswith(state.OPTIMIZER) for name in saved)
        best = model.weights if self.state.parameters["early_stop"] else ()
        arrays = state.replicated_arrays(model, with_optimizer=with_optimizer, best=best)
        here = {name: str(ArraySpec.of(name, array)) for name, array in arrays.items()}
        check_equal(self.directory, {name: str(spec) for name, spec in saved.items()}, here)
        state.restore_replicated(model, self._checkpoint.read, saved)
        names = [name for name in arrays if name.startswith(state.BEST)]
        self._best = [np.array(self._checkpoint.read(name)) for name in names]

    def best_weights(self) -> list[NDArray[Any]]:
        """Returns the best epoch's weights; [] if early_stop is not set; collective."""
        num = self._comm.broadcast(len(self._best))
        mine: list[Any] = self._best or num * [None]
        return [self._comm.broadcast(array) for array in mine]

    def restore_ranks(self, model: Any, plan: ScalingPlan, seed: int) -> Mapping[str, NDArray[Any]]:
        """Puts random states back and sets the learning rate; collective, after the broadcast.

        Other ranks than those of the checkpoint draw new random states, which follow from the seed,
        the rank and the epoch, and have a learning rate of their own plan.

        Args:
            model: The model, with weights and optimizer restored.
            plan: The plan of this segment of the run.
            seed: The seed of the run.

        Returns:
            What this rank had saved for itself; {} if it is one of another number of ranks.
        """
        from candle_p1.training import state

        rate = self.state.learning_rate
        if self.same_ranks:
            own = self._hand_out()
            state.restore_own(model, own, within_epoch=False)
            if self.state.weights_only:
                model.optimizer.learning_rate = rate
            return own
        seed_ranks(model, seed, self._comm.rank, self._position.epoch, self._position.step)
        model.optimizer.learning_rate = continued_learning_rate(rate, self.saved_plan, plan)
        return {}

    def _hand_out(self) -> dict[str, NDArray[Any]]:
        """Returns this rank's own arrays, which rank 0 sends to each in turn; collective."""
        if self._checkpoint is None:
            received: dict[str, NDArray[Any]] = self._comm.receive(0)
            return received
        states = self._checkpoint.rank_states()
        for rank in range(1, self._comm.size):
            self._comm.send(states[rank], rank)
        return states[0]
