"""One run of a study: its parameters, its directory, and the command line that starts it.

Whoever executes a run, on this machine or in a job, starts the benchmark's script with
`command_flags` on `num_ranks` ranks, with `variables` in their environment.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from candle_p1.records.record import RECORD_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

THREADS_VARIABLE = "OMP_NUM_THREADS"
TIMELINE_NAME = "timeline.json"
"""The file of a traced run, beside its record."""


@dataclass(frozen=True)
class PlannedRun:
    """A run of a study.

    Attributes:
        series: Names what is varied, except for the ranks; "" if nothing is.
        repeat: Which run of its point this is, from 0.
        benchmark: As `find_benchmark` takes it.
        num_ranks: Number of ranks.
        threads: OMP_NUM_THREADS of each rank; None leaves the number to the rank.
        environment: Further environment variables.
        flags: The parameters that the study sets, by name, including the repeat's own rng_seed.
        settings: All effective parameters, as a record holds them, except for where results go.
        epochs_per_rank: The epochs that each rank trains.
        minutes: Time limit.
        study_directory: The directory of the study.
        timeline: Whether Horovod traces it.
    """

    series: str
    repeat: int
    benchmark: str
    num_ranks: int
    threads: int | None
    environment: Mapping[str, str]
    flags: Mapping[str, Any]
    settings: Mapping[str, Any]
    epochs_per_rank: int
    minutes: int
    study_directory: Path
    timeline: bool = False

    @property
    def point(self) -> str:
        """The name that all repeats of this run share."""
        return "-".join(part for part in (self.series, f"np{self.num_ranks}") if part)

    @property
    def name(self) -> str:
        """The run's name within its study."""
        return f"{self.point}-r{self.repeat}"

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that its ranks need, including the number of threads."""
        threads = {} if self.threads is None else {THREADS_VARIABLE: str(self.threads)}
        return dict(self.environment) | threads

    def directory(self, attempt: int = 1) -> Path:
        """Returns the directory of an attempt at this run; attempts count from 1."""
        suffix = "" if attempt == 1 else f"-attempt{attempt}"
        return self.study_directory / (self.name + suffix)

    def attempts(self) -> list[Path]:
        """Returns the directories that hold a record of this run, in the order of the attempts."""
        directories = map(self.directory, self._attempt_numbers())
        return [each for each in directories if (each / RECORD_NAME).exists()]

    def next_directory(self) -> Path:
        """Returns the directory of the next attempt, which follows all that hold a record."""
        last = max(self._attempt_numbers(), default=0)
        if last and not (self.directory(last) / RECORD_NAME).exists():
            return self.directory(last)
        return self.directory(last + 1)

    def _attempt_numbers(self) -> list[int]:
        """Returns the numbers of the attempts that have a directory; any may have been removed."""
        names = [path.name for path in self.study_directory.glob(f"{self.name}-attempt*")]
        found = [re.fullmatch(r".*-attempt(\d+)", name) for name in names]
        first = [1] if self.directory().exists() else []
        return first + sorted(int(match[1]) for match in found if match)

    def command_flags(self, directory: Path | None = None) -> list[str]:
        """Returns the flags for the benchmark's script.

        Args:
            directory: Where the record goes; it holds none, unless the run is continued there.
                None selects `next_directory`.
        """
        directory = directory or self.next_directory()
        place = {
            "output_dir": str(directory.parent),
            "experiment_id": ".",
            "run_id": directory.name,
        }
        trace = {"timeline": str(directory / TIMELINE_NAME)} if self.timeline else {}
        return to_argv({**self.flags, **place, **trace})


def to_argv(flags: Mapping[str, Any]) -> list[str]:
    """Returns parameters as command-line arguments."""
    return [
        argument
        for name, value in flags.items()
        for argument in (f"--{name}", *map(str, value if isinstance(value, list) else [value]))
    ]
