"""Resuming from a checkpoint: what a run must have in common with it, and what is put back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from candle_p1.checkpoints.policy import are_saved
from candle_p1.checkpoints.shards import ArraySpec
from candle_p1.distributed.replicas import seed_ranks
from candle_p1.errors import CheckpointError
from candle_p1.models import fast
from candle_p1.parameters.parameter import Parameter, Role
from candle_p1.parameters.parameter_set import ParameterSet
from candle_p1.records.segments import ResumePoint
from candle_p1.records.types import JobEnergy, ParameterValue, Position, RunRecord
from candle_p1.scaling import ScalingPlan, continued_learning_rate, remaining_epochs
from candle_p1.text import count

if TYPE_CHECKING:
    from candle_p1.checkpoints.checkpoint import Checkpoint
    from candle_p1.data.reader import Reader
    from candle_p1.distributed.comm import Communicator

MAY_DIFFER = {"timeout", "train_bool", "eval_bool"}
"""Parameters that decide when a run ends, but not what a step learns."""
MAX_SHOWN = 5
ADVICE = (
    "Repeat what the run was started with, name another --ckpt_directory, or begin anew with"
    " --ckpt_restart_mode off"
)


class SavedRun(BaseModel, extra="forbid"):
    """The run that saved a checkpoint, until then."""

    directory: str
    segment: int  # from 1
    steps: int  # that each rank had begun in that segment
    energy: JobEnergy | None = None  # of that segment

    def resume_point(self, checkpoint: Checkpoint) -> ResumePoint:
        """Returns what of the run its checkpoint keeps."""
        return ResumePoint(
            segment=self.segment,
            steps=self.steps,
            position=checkpoint.position,
            checkpoint=str(checkpoint.directory),
            energy=self.energy,
        )


class TrainingState(BaseModel, extra="forbid"):
    """The state of a training that is not an array: all that a checkpoint says as its facts."""

    benchmark: str
    parameters: dict[str, Any]  # that change what a step learns
    data: dict[str, Any]  # see `data_fingerprint`
    plan: dict[str, Any]
    run: SavedRun
    weights_only: bool  # the optimizer's state is left out
    learning_rate: float
    stopped: bool  # by a callback or the time
    policy: dict[str, Any]  # the best epoch so far
    callbacks: dict[str, Any]
    epochs: list[dict[str, Any]]  # what the record says about those that are complete
    num_samples: int  # that all ranks have trained in these

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> TrainingState:
        """Returns what a checkpoint says; raises CheckpointError if no training has saved it."""
        try:
            return cls.model_validate(checkpoint.facts)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            raise CheckpointError(
                f"{checkpoint.directory} is not a checkpoint of a run: {where}: {problem['msg']}"
            ) from None


def changes_learning(parameter: Parameter) -> bool:
    """Whether what a step learns depends on a parameter."""
    return parameter.role in (Role.LEARNING, Role.SEED) and parameter.name not in MAY_DIFFER


def run_fingerprint(benchmark: str, params: ParameterSet) -> dict[str, Any]:
    """Returns what is known before anything is loaded: the benchmark, and what changes learning."""
    learned = {name: params[name] for name in params if changes_learning(params.declared[name])}
    return {"benchmark": benchmark, "parameters": json.loads(json.dumps(learned))}


def data_fingerprint(reader: Reader) -> dict[str, Any]:
    """Returns what identifies the data: digests of values, or names and sizes of files, by role."""
    return {**reader.sizes, **reader.digests}


def differences(saved: Mapping[str, Any], here: Mapping[str, Any], whose: str) -> list[str]:
    """Returns in words what differs between this run and what it is to resume from."""

    def shown(values: Mapping[str, Any], name: str) -> str:
        return f"{name} = {values[name]!r}" if name in values else f"no {name}"

    return [
        f"{whose} has {shown(saved, name)}, this run {shown(here, name)}"
        for name in dict.fromkeys((*here, *saved))
        if (name in saved, saved.get(name)) != (name in here, here.get(name))
    ]


def run_differences(record: RunRecord, benchmark: str, params: ParameterSet) -> list[str]:
    """Returns in words how the run of a record differs from that of the parameters.

    Only what decides about results counts: not how fast they come, nor where they go.
    """
    decisive = [
        name
        for name, parameter in params.declared.items()
        if changes_learning(parameter) or (parameter.role is Role.PLACE and name.endswith("_data"))
    ]
    saved = {name: each.value for name, each in record.parameters.items() if name in decisive}
    here = {
        name: ParameterValue(value=params[name], origin="").model_dump(mode="json")["value"]
        for name in decisive
    }
    if record.benchmark != benchmark:  # whose parameters are others
        saved, here = {"benchmark": record.benchmark}, {"benchmark": benchmark}
    return differences(saved, here, "the run")


def check_equal(checkpoint: Path, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raises CheckpointError if a run does not have what a checkpoint has, both by name."""
    found = differences(saved, here, "the checkpoint")
    if not found:
        return
    shown = "; ".join(found[:MAX_SHOWN])
    more = f"; and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else ""
    raise CheckpointError(f"{checkpoint}: this run cannot resume from it: {shown}{more}. {ADVICE}")


def may_restart(params: ParameterSet) -> bool:
    """Returns whether a run with these parameters goes on from a checkpoint if there is one."""
    return are_saved(params) and params["ckpt_restart_mode"] != "off"


class Restart:
    """A restart from a checkpoint, which rank 0 reads. Every rank has one; `of` makes it."""

    def __init__(
        self,
        checkpoint: Checkpoint | None,
        comm: Communicator,
        directory: Path,
        position: Position,
        state: TrainingState,
        has_tables: bool,
    ) -> None:
        self._checkpoint, self._comm = checkpoint, comm
        self.has_tables = has_tables  # in its model; see candle_p1.models.fast.tables
        self._position = position
        self._best: list[NDArray[Any]] = []  # on rank 0
        self.directory, self.state = directory, state
        self.saved_plan = ScalingPlan(**state.plan)  # of the ranks that wrote it
        self.same_ranks = comm.size == self.saved_plan.num_ranks  # as many go on
        # Another number of ranks begins an incomplete epoch anew.
        self.start = position if self.same_ranks else Position(epoch=position.epoch, step=0)

    @classmethod
    def of(cls, checkpoint: Checkpoint | None, comm: Communicator) -> Restart | None:
        """Returns the restart from rank 0's checkpoint, None if it has none; collective."""
        mine = None
        if checkpoint is not None:
            state = TrainingState.of(checkpoint)
            has_tables = any(map(fast.BASIS.fullmatch, checkpoint.arrays))
            mine = (checkpoint.directory, checkpoint.position, state, has_tables)
        found = comm.broadcast(mine)
        return None if found is None else cls(checkpoint, comm, *found)

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
        """Raises CheckpointError if benchmark or parameters are others; see `run_fingerprint`."""
        saved, benchmark = self.state, {"benchmark": here["benchmark"]}
        check_equal(self.directory, {"benchmark": saved.benchmark}, benchmark)
        check_equal(self.directory, saved.parameters, here["parameters"])

    def check_plan(self, plan: ScalingPlan) -> None:
        """Raises CheckpointError if the plan is another, for the same number of ranks."""
        if self.same_ranks:
            check_equal(self.directory, self.state.plan, plan.model_dump())

    def check_data(self, here: Mapping[str, Any]) -> None:
        """Raises CheckpointError if the data are others; see `data_fingerprint`."""
        check_equal(self.directory, self.state.data, here)

    def restore_arrays(self, model: Any) -> None:
        """Puts weights and optimizer into the model on rank 0, from which they are broadcast.

        Raises CheckpointError there if the model has other arrays, or a file cannot be read.
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

        Returns what this rank had saved for itself; {} if it is one of another number of ranks.
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
