"""Runs that nobody kills: what the killed ones have to end like."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np

from candle_p1.checkpoints.checkpoint import Checkpoint
from candle_p1.checkpoints.root import CheckpointRoot
from tests.faults.killed_run import EVERY_S, EVERY_STEPS, Command
from tests.faults.processes import StartedRun

PULSE_S = 1.5
"""How long after its time the ranks agree on a checkpoint at the latest, in s."""
TRAINING_S = 900.0
"""How long a run may take until its first checkpoint, or until its end, on a busy machine."""


class Reference:
    """A run of a command that nobody kills: what the killed ones have to end like.

    Attributes:
        write_s: The mean time of writing a checkpoint, in s.
    """

    def __init__(self, command: Command, directory: Path) -> None:
        directory.mkdir(parents=True)
        self.run_directory, self._by_steps = directory / "run", command.interval == "steps"
        run = StartedRun(command.benchmark, "mpirun", command.num_ranks, command.flags, directory)
        try:
            if run.await_end(TRAINING_S) is None or run.launcher.returncode:
                raise RuntimeError(f"{command}, not killed, failed:\n{run.output()}")
        finally:
            run.clear()
        record = run.read_record()
        assert record is not None
        facts = record["checkpoints"]
        self.write_s = facts["write_s"] / facts["num_saved"]
        self._step_s = fastest_step_s(record)

    def intervals(self, num_steps: int, record: dict[str, Any]) -> float:
        """Returns how many intervals between checkpoints so many steps of a run are at least.

        Args:
            num_steps: The number of steps.
            record: The record of the run, which may have been faster than this one.
        """
        if self._by_steps:
            return num_steps / EVERY_STEPS
        step_s = min(self._step_s, fastest_step_s(record))
        return max(0.0, num_steps * step_s - PULSE_S) / EVERY_S

    def differences(self, run_directory: Path) -> list[str]:
        """Returns what is not equal, bit for bit, in another run of the same command."""
        found = []
        if history(self.run_directory) != history(run_directory):
            found.append("history.csv differs")
        expected, other = (newest(each / "ckpts") for each in (self.run_directory, run_directory))
        if expected is None or other is None or expected.position != other.position:
            return [*found, "the last checkpoint has another position"]
        if expected.arrays != other.arrays:
            return [*found, "other arrays are saved"]
        found += [
            f"{name} differs"
            for name in expected.arrays
            if not equal(expected.read(name), other.read(name))
        ]
        for rank in range(expected.num_ranks):
            one, another = expected.rank_state(rank), other.rank_state(rank)
            same = one.keys() == another.keys()
            if not same or not all(equal(one[name], another[name]) for name in one):
                found.append(f"the state of rank {rank} differs")
        return found


def fastest_step_s(record: dict[str, Any]) -> float:
    """Returns the mean time of a step in the fastest epoch of a run, in s."""
    epochs, num_steps = record["training"]["epochs"], record["plan"]["steps_per_epoch"]
    fastest_s: float = min(epoch["train"]["min_s"] for epoch in epochs)
    return fastest_s / num_steps


def equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Returns whether two arrays have the same bits."""
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


def history(run_directory: Path) -> str:
    """Returns the content of history.csv."""
    return (run_directory / "history.csv").read_text()


def newest(root: Path) -> Checkpoint | None:
    """Returns the checkpoint that "latest" names."""
    return CheckpointRoot(root).latest()


class References:
    """The references, each trained when it is first needed."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._lock = directory, threading.Lock()
        self._found: dict[Command, Reference] = {}

    def of(self, command: Command) -> Reference:
        """Returns the reference for a command."""
        with self._lock:
            if command not in self._found:
                directory = self._directory / f"reference-{len(self._found)}"
                self._found[command] = Reference(command, directory)
            return self._found[command]
