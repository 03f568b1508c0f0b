"""Chains: jobs that continue one run, each after the one before, until its record is ok.

The file ``job.chain`` beside the record has a line for each thing that happened: "jobs N" when N
jobs were submitted, "begun TIME" when one starts, and "ended CODE" when its script ends. TIME is
when the record was changed last, in seconds since 1970; it is missing if there is no record yet. A
job that was killed together with its script, as with its node, does not write the last line.

A job asks before it starts ranks (``job_check_previous`` in common/job_env.sh)::

    python -m candle_p1.cluster.chain DIRECTORY

where DIRECTORY holds the record. The exit code is 0 if the job has to continue the run, 3 if the
run is complete, and 2 if the job would fail as the one before it did. Only the standard library is
imported, because scripts may run on other nodes than ranks.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
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
    """The jobs of a chain so far."""

    directory: Path  # The directory of the record
    num_jobs: int  # How many were submitted; 0 if there is no chain
    # For each job that has begun, its exit code, or None if its script has not ended.
    codes: tuple[int | None, ...]
    # For each of them, when the record that it found had been changed, in seconds since 1970;
    # None if there was none.
    times: tuple[int | None, ...]

    @classmethod
    def read(cls, directory: Path) -> Chain:
        """Returns the chain whose file is in a directory."""
        num_jobs, codes, times = 0, list[int | None](), list[int | None]()
        try:
            lines = (directory / CHAIN_NAME).read_text(encoding="utf-8").splitlines()
        except OSError:
            lines = []
        for word, _, text in (line.partition(" ") for line in lines):
            number = int(text) if text.isdecimal() else None
            if word == "jobs" and number is not None:
                num_jobs = number
            elif word == "begun":
                codes.append(None)
                times.append(number)
            elif word == "ended" and codes and number is not None:
                codes[-1] = number
        return cls(directory, num_jobs, tuple(codes), tuple(times))

    def decide(self) -> tuple[int, str]:
        """Decides what a job has to do that comes after all that have begun.

        A run that was interrupted by its time limit, a lost node or the death of a rank is
        continued. One that the user has to correct is not, as long as jobs come that were submitted
        before: the exit code is 2, and the job did not come as far as to be interrupted. Its record
        then has another status than "interrupted", or is as the job found it.

        Returns:
            CONTINUE, STOP or COMPLETE, and a note for the user.
        """
        path, record, changed = self.directory / RECORD_NAME, dict[str, Any](), None
        try:
            changed = int(path.stat().st_mtime)
            found = json.loads(path.read_bytes())
            record = found if isinstance(found, dict) else {}
        except (OSError, ValueError, RecursionError):
            pass
        status = record.get("status")
        if status == "ok":
            return COMPLETE, f"the run in {self.directory} is complete; there is nothing left to do"
        if not self.codes or self.codes[-1] != USER_ERROR or len(self.codes) >= self.num_jobs:
            return CONTINUE, ""
        if status == "interrupted" and changed != self.times[-1]:
            return CONTINUE, ""
        failure = (status == "failed" and record.get("failure")) or {}
        return STOP, (
            "the job before this one failed in a way that would repeat itself, so this one does"
            f" not start: {failure.get('reason') or 'see its output'}. Correct the cause, and"
            f" submit the script in {self.directory} again once no job of this chain is left"
        )

    @property
    def has_jobs_left(self) -> bool:
        """Whether the scheduler has a job that will continue the run, or one that is running."""
        if not self.num_jobs or self.decide()[0] != CONTINUE:
            return False
        return len(self.codes) < self.num_jobs or self.codes[-1] is None


def begin_chain(directory: Path, num_jobs: int) -> None:
    """Notes that a chain has so many jobs; raises OSError if it cannot be written."""
    with (directory / CHAIN_NAME).open("a", encoding="utf-8") as file:
        file.write(f"jobs {num_jobs}\n")


def main(argv: list[str]) -> int:
    """Tells a job that has begun whether it has to continue the run; returns the exit code."""
    chain = Chain.read(Path(argv[0]))
    before = replace(chain, codes=chain.codes[:-1], times=chain.times[:-1])  # without this job
    code, note = before.decide()
    if note:
        print(f"job: {note}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
