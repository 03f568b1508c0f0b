"""What a checkpoint says about its run, and what a run that resumes must have in common with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from candle_p1.errors import CheckpointError
from candle_p1.parameters.parameter import Parameter, Role
from candle_p1.parameters.parameter_set import ParameterSet
from candle_p1.records.segments import ResumePoint
from candle_p1.records.types import JobEnergy, ParameterValue, RunRecord

if TYPE_CHECKING:
    from candle_p1.checkpoints.checkpoint import Checkpoint
    from candle_p1.data.reader import Reader

MAY_DIFFER = {"timeout", "train_bool", "eval_bool"}
"""Parameters that decide when a run ends, but not what a step learns."""
MAX_SHOWN = 5
ADVICE = (
    "Repeat what the run was started with, name another --ckpt_directory, or begin anew with"
    " --ckpt_restart_mode off"
)


class _Facts(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SavedRun(_Facts):
    """The run that saved a checkpoint."""

    directory: str
    segment: int
    """The segment of the run, from 1."""
    steps: int
    """The steps that each rank had begun in that segment."""
    energy: JobEnergy | None = None
    """The energy of that segment until then."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> SavedRun:
        """Returns what a checkpoint says about its run; see `TrainingState`."""
        return TrainingState.of(checkpoint).run

    def resume_point(self, checkpoint: Checkpoint) -> ResumePoint:
        """Returns what of the run its checkpoint keeps."""
        return ResumePoint(
            segment=self.segment,
            steps=self.steps,
            position=checkpoint.position,
            checkpoint=str(checkpoint.directory),
            energy=self.energy,
        )


class TrainingState(_Facts):
    """The state of a training that is not an array: all that a checkpoint says as its facts."""

    benchmark: str
    parameters: dict[str, Any]
    """Those that change what a step learns."""
    data: dict[str, Any]
    """The digests of the values, or names and sizes of files, by the role of the data."""
    plan: dict[str, Any]
    run: SavedRun
    weights_only: bool
    """Whether the optimizer's state is left out."""
    learning_rate: float
    stopped: bool
    """Whether a callback or the time has ended training."""
    policy: dict[str, Any]
    """The best epoch so far."""
    callbacks: dict[str, Any]
    epochs: list[dict[str, Any]]
    """What the record says about the complete epochs."""
    num_samples: int
    """The samples that all ranks have trained in these."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> TrainingState:
        """Returns what a checkpoint says.

        Raises:
            CheckpointError: It was not saved by a training.
        """
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
    learned = {
        name: params[name]
        for name, parameter in params.declared.items()
        if changes_learning(parameter)
    }
    return {"benchmark": benchmark, "parameters": _as_json(learned)}


def data_fingerprint(reader: Reader) -> dict[str, Any]:
    """Returns what tells the data of a run: the digests of the values, or names and sizes."""
    return {**reader.sizes, **reader.digests}


def differences(saved: Mapping[str, Any], here: Mapping[str, Any], whose: str) -> list[str]:
    """Returns in words what differs between this run and what it is to resume from.

    Args:
        saved: What is known of that, by name.
        here: The same of this run.
        whose: Names what it is to resume from.
    """
    return [
        f"{whose} has {_shown(saved, name)}, this run {_shown(here, name)}"
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
    here = {name: _as_recorded(params[name]) for name in decisive}
    if record.benchmark != benchmark:  # whose parameters are others
        saved, here = {"benchmark": record.benchmark}, {"benchmark": benchmark}
    return differences(saved, here, "the run")


def check_equal(checkpoint: Path, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Checks that a run has in common with a checkpoint what it must have to resume from it.

    Args:
        checkpoint: Its directory.
        saved: What the checkpoint says, by name.
        here: The same of this run.

    Raises:
        CheckpointError: They differ; the message says in what.
    """
    found = differences(saved, here, "the checkpoint")
    if not found:
        return
    shown = "; ".join(found[:MAX_SHOWN])
    more = f"; and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else ""
    raise CheckpointError(f"{checkpoint}: this run cannot resume from it: {shown}{more}. {ADVICE}")


def _shown(values: Mapping[str, Any], name: str) -> str:
    return f"{name} = {values[name]!r}" if name in values else f"no {name}"


def _as_recorded(value: Any) -> Any:
    """Returns the value of a parameter as it is read from a record."""
    return ParameterValue(value=value, origin="").model_dump(mode="json")["value"]


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))
