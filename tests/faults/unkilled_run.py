"""Commands that train with checkpoints, and how they end if nobody kills them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import mean

import numpy as np

from candle_p1.checkpoints.checkpoint import Checkpoint
from candle_p1.checkpoints.root import CheckpointRoot
from tests.faults.processes import StartedRun

MODELS = {
    "nt3": "--conv 4 20 1 --pool 10 --dense 4000 600",
    "p1b1": "--dense 1000 400 2 400 1000",
}
EPOCHS_PER_KILL = {"nt3": 24, "p1b1": 30}
"""Enough for checkpoints before each kill."""
EVERY_STEPS, EVERY_S = 40, 2.0
INTERVALS = {"steps": f"--ckpt_every_steps {EVERY_STEPS}", "seconds": f"--ckpt_every_s {EVERY_S}"}
TRAINING_S = 900.0
"""How long a run may take until its first checkpoint, or until its end, on a busy machine."""


@dataclass(frozen=True)
class Command:
    """A benchmark with flags, on some ranks, which trains long enough for some kills."""

    benchmark: str
    interval: str
    num_ranks: int
    num_kills: int
    engine: str = "auto"

    @property
    def flags(self) -> str:
        """The benchmark's flags."""
        epochs = self.num_kills * EPOCHS_PER_KILL[self.benchmark]
        return (
            f"--size small {MODELS[self.benchmark]} {INTERVALS[self.interval]} --epochs {epochs}"
            f" --epochs_scaling weak --engine {self.engine} --ckpt_save_best False"
            " --ckpt_keep_limit 3"
        )


class Reference:
    """A run of a command that nobody kills: what the killed ones have to end like.

    Attributes:
        write_s: The mean time of writing a checkpoint, in s.
    """

    def __init__(self, command: Command, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._directory = directory / "run"
        run = StartedRun(command.benchmark, "mpirun", command.num_ranks, command.flags, directory)
        try:
            if run.await_end(TRAINING_S) is None or run.launcher.returncode:
                raise RuntimeError(f"{command}, not killed, failed:\n{run.output()}")
        finally:
            run.clear()
        self.write_s = mean(map(write_s, self._directory.glob("ckpts/epoch-*")))

    def differences(self, directory: Path) -> list[str]:
        """Returns what is not equal, bit for bit, in another run of the same command."""
        histories = [(each / "history.csv").read_bytes() for each in (self._directory, directory)]
        found = ["history.csv differs"] if histories[0] != histories[1] else []
        expected, other = (
            CheckpointRoot(each / "ckpts").newest() for each in (self._directory, directory)
        )
        if expected is None or other is None or expected.position != other.position:
            return [*found, "the last checkpoint has another position"]
        if expected.arrays != other.arrays:
            return [*found, "other arrays are saved"]
        found += [
            f"{name} differs"
            for name in expected.arrays
            if not equal(expected.read(name), other.read(name))
        ]
        states = zip(expected.rank_states(), other.rank_states(), strict=True)
        for rank, (one, another) in enumerate(states):
            same = one.keys() == another.keys()
            if not same or not all(equal(one[name], another[name]) for name in one):
                found.append(f"the state of rank {rank} differs")
        return found


def write_s(checkpoint: Path) -> float:
    """Returns the time from saving a checkpoint until its directory was complete, in s."""
    created = datetime.fromisoformat(Checkpoint(checkpoint).manifest.created.replace("Z", "+00:00"))
    return checkpoint.stat().st_mtime - created.timestamp()


def equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Returns whether two arrays have the same bits."""
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()
