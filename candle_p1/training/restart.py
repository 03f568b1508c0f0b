"""Going on from a checkpoint: what is checked, what is left to train, and what is put back."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from candle_p1.checkpoints.policy import are_saved
from candle_p1.distributed.seeds import seed_ranks
from candle_p1.scaling import ScalingPlan, continued_learning_rate, remaining_epochs
from candle_p1.text import count
from candle_p1.training import identity

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from candle_p1.checkpoints.checkpoint import Checkpoint
    from candle_p1.distributed.comm import Communicator
    from candle_p1.parameters.parameter_set import ParameterSet


def may_restart(params: ParameterSet) -> bool:
    """Returns whether a run with these parameters goes on from a checkpoint if there is one."""
    return are_saved(params) and params["ckpt_restart_mode"] != "off"


class Start(NamedTuple):
    """Where training begins.

    Attributes:
        epoch: The first epoch, from 0.
        step: Its first step, from 0.
        is_over: Whether training has ended already, so that only the evaluation is left.
    """

    epoch: int = 0
    step: int = 0
    is_over: bool = False


class Restart:
    """A restart from a checkpoint, which rank 0 reads. Every rank has one.

    Use `of` to make one.

    Attributes:
        directory: The checkpoint's directory.
        facts: What the checkpoint says besides its arrays.
        saved_plan: The plan of the ranks that wrote it.
    """

    def __init__(
        self,
        checkpoint: Checkpoint | None,
        comm: Communicator,
        directory: Path,
        position: tuple[int, int],
        facts: Mapping[str, Any],
    ) -> None:
        self._checkpoint, self._comm = checkpoint, comm
        self._epoch, self._step = position
        self.directory, self.facts = directory, facts
        self.saved_plan = ScalingPlan(**facts["plan"])

    @classmethod
    def of(cls, checkpoint: Checkpoint | None, comm: Communicator) -> Restart | None:
        """Returns the restart from rank 0's checkpoint, None if it has none; collective."""
        mine = None
        if checkpoint is not None:
            position = (checkpoint.position.epoch, checkpoint.position.step)
            mine = (checkpoint.directory, position, checkpoint.facts)
        found = comm.broadcast(mine)
        return None if found is None else cls(checkpoint, comm, *found)

    @property
    def same_ranks(self) -> bool:
        """Whether as many ranks go on as have written the checkpoint."""
        return self._comm.size == self.saved_plan.num_ranks

    @cached_property
    def start(self) -> Start:
        """Where training goes on. Other ranks begin an incomplete epoch anew."""
        is_over = self.facts["stopped"] or self._epoch >= self.epochs_per_rank
        return Start(self._epoch, self._step if self.same_ranks else 0, is_over)

    @property
    def epochs_per_rank(self) -> int:
        """The number of epochs of a rank, with those that are complete."""
        if self.same_ranks:
            return self.saved_plan.epochs_per_rank
        left = remaining_epochs(self.saved_plan, self._comm.size, self._epoch, self._step)
        return self._epoch + left

    def explain(self) -> str:
        """Returns a sentence on what another number of ranks has to train."""
        left = count(self.epochs_per_rank - self._epoch, "epoch")
        before, ranks = count(self.saved_plan.num_ranks, "rank"), count(self._comm.size, "rank")
        return f"the checkpoint is one of {before}, and leaves {left} to each of {ranks}"

    def check_run(self, here: Mapping[str, Any]) -> None:
        """Checks the benchmark and its parameters; see `identity.describe_identity`.

        Raises:
            CheckpointError: They are others; the same on every rank.
        """
        identity.check_identity(self.directory, self.facts["identity"], here)

    def check_plan(self, plan: ScalingPlan) -> None:
        """Checks the plan, if the number of ranks is the same.

        Raises:
            CheckpointError: It is another; the same on every rank.
        """
        if self.same_ranks:
            identity.check_plan(self.directory, self.facts["plan"], plan.to_dict())

    def check_data(self, here: Mapping[str, Any]) -> None:
        """Checks the data; see `identity.describe_data`.

        Raises:
            CheckpointError: They are others; the same on every rank.
        """
        identity.check_data(self.directory, self.facts["data"], here)

    def restore_arrays(self, model: Any) -> None:
        """Puts weights and optimizer into the model on rank 0, from which they are broadcast.

        Raises:
            CheckpointError: The model has other arrays, or a file cannot be read; on rank 0.
        """
        from candle_p1.training import state

        if self._checkpoint is None:
            return
        saved = {name: (spec.shape, spec.dtype) for name, spec in self._checkpoint.arrays.items()}
        identity.check_arrays(self.directory, state.differences(model, saved))
        state.restore_replicated(model, self._checkpoint.read, saved)

    def restore_ranks(self, model: Any, plan: ScalingPlan, seed: int) -> Mapping[str, NDArray[Any]]:
        """Puts random states back and sets the learning rate; collective, after the broadcast.

        Nothing is read from the checkpoint after this, and rank 0 lets go of its files.

        Other ranks than those of the checkpoint draw new random states, which follow from the seed,
        the rank and the epoch, and have a learning rate of their own plan.

        Args:
            model: The model, with weights and optimizer restored.
            plan: The plan of this part of the run.
            seed: The seed of the run.

        Returns:
            What this rank had saved for itself; {} if it is one of another number of ranks.
        """
        from candle_p1.training import state

        rate = self.facts["learning_rate"]
        if self.same_ranks:
            own = self._hand_out()
            self.release()
            state.restore_own(model, own, within_epoch=False)
            if self.facts["weights_only"]:
                model.optimizer.learning_rate = rate
            return own
        self.release()
        seed_ranks(model, seed, self._comm.rank, self._epoch, self._step)
        model.optimizer.learning_rate = continued_learning_rate(rate, self.saved_plan, plan)
        return {}

    def release(self) -> None:
        """Lets go of the files of the checkpoint, on rank 0."""
        if self._checkpoint is not None:
            self._checkpoint.release()

    def _hand_out(self) -> dict[str, NDArray[Any]]:
        """Returns this rank's own arrays, which rank 0 sends to each in turn; collective."""
        if self._checkpoint is None:
            received: dict[str, NDArray[Any]] = self._comm.receive(0)
            return received
        for rank in range(1, self._comm.size):
            self._comm.send(self._checkpoint.rank_state(rank), rank)
        return self._checkpoint.rank_state(0)
