"""Chains: jobs that continue one run, each after the one before, until its record is ok.

The file ``job.chain`` beside the record has a line for each thing that happened: "jobs N" when N
jobs were submitted, "begun" when one starts, and "ended CODE" when its script ends. A job that was
killed together with its script, as with its node, does not write the last.

A job asks before it starts ranks (``job_look_back`` in common/job_env.sh)::

    python -m candle_p1.cluster.chain DIRECTORY

where DIRECTORY holds the record. The exit code is 0 if the job has to continue the run, 3 if the
run is complete, and 2 if the job would fail as the one before it did. Only the standard library is
imported, because scripts may run on other nodes than ranks.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHAIN_NAME = "job.chain"
"""The file of a chain, in the directory of the record."""
RECORD_NAME = "run.json"
"""As in candle_p1.records.record, which imports other libraries."""
CONTINUE, STOP, COMPLETE = 0, 2, 3
"""What a job has to do; the exit codes of this program."""
USER_ERROR = 2
"""The exit code of a run or a script that the user has to correct."""


@dataclass(frozen=True)
class Chain:
    """The jobs of a chain so far.

    Attributes:
        directory: The directory of the record.
        num_jobs: How many were submitted; 0 if there is no chain.
        codes: For each job that has begun, its exit code, or None if its script has not ended.
    """

    directory: Path
    num_jobs: int
    codes: tuple[int | None, ...]

    @classmethod
    def read(cls, directory: Path) -> Chain:
        """Returns the chain whose file is in a directory."""
        num_jobs, codes = 0, list[int | None]()
        try:
            lines = (directory / CHAIN_NAME).read_text(encoding="utf-8").splitlines()
        except OSError:
            lines = []
        for word, _, number in (line.partition(" ") for line in lines):
            if word == "jobs" and number.isdigit():
                num_jobs = int(number)
            elif word == "begun":
                codes.append(None)
            elif word == "ended" and codes and number.isdigit():
                codes[-1] = int(number)
        return cls(directory, num_jobs, tuple(codes))

    def decide(self) -> tuple[int, str]:
        """Decides what a job has to do that comes after all that have begun.

        A run that was interrupted by its time limit, a lost node or the death of a rank is
        continued. One that the user has to correct is not, as long as jobs come that were submitted
        before: its exit code is 2, and it has no record, or one that names no rank.

        Returns:
            CONTINUE, STOP or COMPLETE, and a note for the user.
        """
        record = self._record()
        if record.get("status") == "ok":
            return COMPLETE, f"the run in {self.directory} is complete; there is nothing left to do"
        failure = record.get("failure") or {}
        is_users = not record or (record.get("status") == "failed" and failure.get("rank") is None)
        if self._last_code == USER_ERROR and is_users and len(self.codes) < self.num_jobs:
            reason = failure.get("reason") or "see its output"
            return STOP, (
                "the job before this one failed in a way that would repeat itself, so this one does"
                f" not start: {reason}. Correct the cause, and submit the script in"
                f" {self.directory} again once no job of this chain is left"
            )
        return CONTINUE, ""

    @property
    def has_jobs_left(self) -> bool:
        """Whether the scheduler has a job that will continue the run, or one that is running."""
        if not self.num_jobs or self.decide()[0] != CONTINUE:
            return False
        return len(self.codes) < self.num_jobs or self._last_code is None

    @property
    def _last_code(self) -> int | None:
        return self.codes[-1] if self.codes else None

    def _record(self) -> dict[str, Any]:
        """Returns the record; {} if there is none that can be read."""
        try:
            record = json.loads((self.directory / RECORD_NAME).read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return record if isinstance(record, dict) else {}


def begin_chain(directory: Path, num_jobs: int) -> None:
    """Notes that a chain has so many jobs.

    Raises:
        OSError: The file cannot be written.
    """
    with (directory / CHAIN_NAME).open("a", encoding="utf-8") as file:
        file.write(f"jobs {num_jobs}\n")


def main(argv: list[str]) -> int:
    """Tells a job that has begun whether it has to continue the run; returns the exit code."""
    chain = Chain.read(Path(argv[0]))
    *codes, _ = chain.codes or (None,)  # the last is this job
    code, note = Chain(chain.directory, chain.num_jobs, tuple(codes)).decide()
    if note:
        print(f"job: {note}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
