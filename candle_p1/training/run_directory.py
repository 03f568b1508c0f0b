"""Where the files of a run go: <output_dir>/<experiment_id>/<run_id>, as in CANDLE.

Its checkpoints go to a directory within it, unless --ckpt_directory names another one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from candle_p1.parameters.parameter_set import ParameterSet

DEFAULT_RUN_ID = "RUN000"
MAX_NUMBERED = 1000
CHECKPOINTS = "ckpts"


def run_directories(benchmark: str, params: ParameterSet, prefix: str = "RUN") -> list[Path]:
    """Returns the candidate directories of a run, which uses the first one that is free.

    A run whose run_id has not been chosen is numbered. An output_dir of "." is used as it is.

    Args:
        benchmark: The benchmark's name.
        params: The parameters of the run.
        prefix: What the names of numbered directories begin with.
    """
    output_dir = params["output_dir"] or f"output/{benchmark}"
    base = Path(output_dir).expanduser().absolute()
    if output_dir == ".":
        return [base]
    experiment = base / params["experiment_id"]
    if params["run_id"] != DEFAULT_RUN_ID or params.origin("run_id").is_explicit:
        return [experiment / params["run_id"]]
    return [experiment / f"{prefix}{number:03d}" for number in range(MAX_NUMBERED)]


def checkpoint_root(params: ParameterSet, directory: Path) -> Path:
    """Returns the directory of the checkpoints of a run with this directory."""
    named = params["ckpt_directory"]
    return directory / CHECKPOINTS if named is None else Path(named).expanduser().absolute()
