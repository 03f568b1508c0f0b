"""What a checkpoint must have in common with the run that goes on from it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from candle_p1.errors import CheckpointError
from candle_p1.parameters.parameter import Role

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from candle_p1.data.reader import Reader
    from candle_p1.parameters.parameter import Parameter
    from candle_p1.parameters.parameter_set import ParameterSet

MAY_DIFFER = {"timeout", "train_bool", "eval_bool"}
"""Parameters that decide when a run ends, but not what a step learns."""
MAX_SHOWN = 5
ADVICE = (
    "Repeat what the run was started with, name another --ckpt_directory, or begin anew with"
    " --ckpt_restart_mode off"
)


def changes_learning(parameter: Parameter) -> bool:
    """Whether what a step learns depends on a parameter."""
    return parameter.role in (Role.LEARNING, Role.SEED) and parameter.name not in MAY_DIFFER


def describe_identity(benchmark: str, params: ParameterSet) -> dict[str, Any]:
    """Returns what is known before anything is loaded: the benchmark, and what changes learning."""
    learned = {
        name: params[name]
        for name, parameter in params.declared.items()
        if changes_learning(parameter)
    }
    return {"benchmark": benchmark, "parameters": _as_json(learned)}


def describe_data(reader: Reader) -> dict[str, Any]:
    """Returns what tells the data of a run: the digests of the values, or names and sizes."""
    found: dict[str, Any] = {**reader.sizes, **reader.digests}
    return found


def check_identity(checkpoint: Path, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Checks that a checkpoint is one of the same benchmark and parameters.

    Args:
        checkpoint: Its directory.
        saved: As `describe_identity` returned it when the checkpoint was saved.
        here: The same of this run.

    Raises:
        CheckpointError: It is another; the message says in what they differ.
    """
    if saved["benchmark"] != here["benchmark"]:
        _refuse(checkpoint, [f"it is of {saved['benchmark']}, and this run of {here['benchmark']}"])
    there, ours = saved["parameters"], here["parameters"]
    _refuse(
        checkpoint,
        [
            f"{name} is {_shown(there, name)} there and {_shown(ours, name)} here"
            for name in sorted({*there, *ours} - MAY_DIFFER)
            if there.get(name) != ours.get(name) or (name in there) != (name in ours)
        ],
    )


def check_data(checkpoint: Path, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Checks that a checkpoint is one of the same data; see `describe_data` and `check_identity`.

    Raises:
        CheckpointError: The values of some file are others.
    """
    roles = [role for role in sorted({*saved, *here}) if saved.get(role) != here.get(role)]
    _refuse(checkpoint, [f"the data of the role {role} have other values here" for role in roles])


def check_plan(checkpoint: Path, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Checks that two plans for the same number of ranks are equal; see `check_identity`.

    Raises:
        CheckpointError: They differ.
    """
    names = [name for name in here if saved.get(name) != here[name]]
    _refuse(
        checkpoint,
        [f"{name} of the plan is {saved.get(name)} there and {here[name]} here" for name in names],
    )


def check_arrays(checkpoint: Path, differences: Sequence[str]) -> None:
    """Raises CheckpointError if the model's arrays differ from those of a checkpoint."""
    _refuse(checkpoint, [f"its model is another: {clause}" for clause in differences])


def _refuse(checkpoint: Path, clauses: Sequence[str]) -> None:
    if not clauses:
        return
    shown = "; ".join(clauses[:MAX_SHOWN])
    more = f"; and {len(clauses) - MAX_SHOWN} more" if len(clauses) > MAX_SHOWN else ""
    raise CheckpointError(f"{checkpoint}: this run cannot go on from it: {shown}{more}. {ADVICE}")


def _shown(values: Mapping[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "not known"


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))
