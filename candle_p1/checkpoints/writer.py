"""Writing checkpoints beside training: what training calls, on every rank."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.checkpoints.completing import CompletingJob
from candle_p1.checkpoints.job import PartJob, PartTask, why
from candle_p1.checkpoints.layout import ArraySpec
from candle_p1.checkpoints.leftovers import WriterClaim, settle, temporary_name
from candle_p1.checkpoints.memory import CopyMemory
from candle_p1.checkpoints.publisher import Draft, Publisher
from candle_p1.checkpoints.root import timestamp
from candle_p1.checkpoints.sharing import Sharing
from candle_p1.checkpoints.statistics import CheckpointStatistics, SaveRecord
from candle_p1.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from candle_p1.checkpoints.checkpoint import Checkpoint
    from candle_p1.checkpoints.layout import PartLayout
    from candle_p1.checkpoints.manifest import Position
    from candle_p1.checkpoints.root import StoredCheckpoint
    from candle_p1.checkpoints.sharing import WritePlan
    from candle_p1.checkpoints.source import ArraySource
    from candle_p1.distributed.comm import Communicator

MOMENT_S = 1.0
ADVICE = "Make room or give permission, or name another directory with --ckpt_directory"


class CheckpointWriter:
    """Writes checkpoints of the state that the ranks train together.

    Every rank makes one. Making it, `save`, `best_is_lost` and `close` are collective; the rest
    is not.

    Args:
        comm: The communicator. It is used on the thread that calls, never on others.
        root: The directory of the checkpoints; it is made.
        keep: Chooses, of all checkpoints of this run, those that are kept; see
            candle_p1.checkpoints.policy. The latest and the best are kept in any case.
        checksum: Also read back from the disk what was written, and compare.
        writers: Which ranks write: those of rank 0's "node", "all" that see the directory, or
            "auto", whichever are faster.
        required: Whether a checkpoint that cannot be written ends the run.
        say: Receives a sentence about what goes wrong; called on rank 0, also on a thread.
        after: The checkpoint that this run goes on from, on rank 0. Those that the run had then
            count as this run's.

    Raises:
        CheckpointError: The directory cannot be made or written, and `required` is true; the same
            on all ranks.
    """

    def __init__(
        self,
        comm: Communicator,
        root: Path,
        *,
        keep: Callable[[Collection[StoredCheckpoint]], set[StoredCheckpoint]] = set,
        checksum: bool = False,
        writers: str = "auto",
        required: bool = False,
        say: Callable[[str], None] = print,
        after: Checkpoint | None = None,
    ) -> None:
        self._comm, self._root = comm, root.absolute()
        self._checksum, self._required, self._say = checksum, required, say
        claim = WriterClaim()
        claim.token = comm.broadcast(claim.token)
        self._claim, self._token = claim, claim.token
        problem = comm.broadcast(self._begin() if comm.rank == 0 else None)
        if problem is not None and required:
            raise CheckpointError(problem).on_all_ranks()
        if problem is not None:
            self._say_on_first(problem)
        self._sharing = Sharing(
            comm, claim.path(self._root) if problem is None else None, writers, say
        )
        self._publisher = Publisher(self._root, claim, keep, after)
        self._statistics = CheckpointStatistics(self._root)
        self._plan: WritePlan | None = None
        self._layout: PartLayout | None = None  # of the part that this rank writes, if any
        self._memory: CopyMemory | None = None
        self._job: PartJob | None = None
        self._serial = 0
        self._best: SaveRecord | None = None  # of the last best epoch, until its end is known
        self._failure: str | None = None  # of the last save; known on rank 0
        self._goes_on = True  # training, beside the last save
        self._closed = False

    @property
    def writing(self) -> bool:
        """Whether this rank is still writing; on rank 0, whether the last save is not yet safe."""
        return self._job is not None and self._job.running

    def prepare(self, arrays: Mapping[str, ArraySource]) -> None:
        """Has the memory for the first copy provided beside training, which makes that copy faster.

        Not collective; before the first save. What it cannot get, `save` reports.
        """
        self._planned(_specs(arrays), self._sharing.first)
        with suppress(OSError, MemoryError):
            memory = self._allocate()
            if memory is not None:
                memory.touch()

    def save(
        self,
        position: Position,
        arrays: Mapping[str, ArraySource],
        mine: Mapping[str, NDArray[Any]],
        facts: Mapping[str, Any],
        *,
        best: bool = False,
        wait: bool = False,
    ) -> bool:
        """Begins a checkpoint: copies the state into memory and returns; threads write the copy.

        Collective, on the thread that trains. Memory for the copy is that of this rank's share of
        the arrays, and is used again by the next save.

        Args:
            position: How far training has come.
            arrays: The state that is the same on all ranks, by name; in the same order on all.
            mine: The small arrays of this rank's own.
            facts: The rest of the state, as JSON; rank 0's is saved.
            best: Whether this is the best so far, to which the link "best" is moved. It is always
                taken: the one before is waited for.
            wait: Return when the checkpoint is safe; also waits for the one before.

        Returns:
            False if the one before is still being written, so that this one is not taken, or if it
            was to be waited for and has failed; else True.

        Raises:
            CheckpointError: A checkpoint could not be written, and they are required; the same on
                all ranks. Or an array has a type that checkpoints cannot hold.
        """
        begun = time.perf_counter()
        self._goes_on = not wait
        specs = _specs(arrays)
        own = {name: np.array(array) for name, array in mine.items()}
        snapshot = json.loads(json.dumps(dict(facts))) if self._comm.rank == 0 else {}
        mode = self._agree(wait or best)
        if mode is None:
            self._statistics.num_not_taken += 1
            if self._statistics.num_not_taken == 1:
                self._say_on_first(
                    f"no checkpoint was made of {position}, because the one before is still being"
                    " written; from now on, such checkpoints are only counted"
                )
            return False
        plan = self._planned(specs, mode)
        self._serial += 1
        directory = self._root / temporary_name(position.name, self._token, self._serial)
        record = SaveRecord(position, plan.num_bytes, len(plan.ranks))
        self._statistics.saves.append(record)
        if best:
            self._best = record
        task, problem = self._task(plan, directory)
        if self._comm.rank == 0:
            created = timestamp(datetime.now(timezone.utc))
            draft = Draft(directory, self._serial, position, created, best, snapshot, plan)
            self._job = CompletingJob(
                task, draft, self._publisher, record, begun, self._say, self._note_end
            )
        else:
            self._job = PartJob(task, problem)
        self._copy(self._job, arrays)
        gathered = self._comm.gather((problem, own))
        if isinstance(self._job, CompletingJob) and gathered is not None:
            self._job.hand_over(
                [state for _, state in gathered],
                {
                    part: problem
                    for part, rank in enumerate(plan.ranks)
                    if (problem := gathered[rank][0]) is not None
                },
            )
        record.wait_s = time.perf_counter() - begun
        if not wait:
            return True
        try:
            return self._wait_until_safe()
        finally:
            record.wait_s = time.perf_counter() - begun

    def best_is_lost(self) -> bool:
        """Returns whether the last save of a best epoch has failed, once if so; collective."""
        if self._best is None:  # on all ranks
            return False
        saved = self._best  # only rank 0 knows what becomes of it
        is_lost, is_safe = self._comm.broadcast(
            (saved.error is not None, saved.written_s is not None)
        )
        if is_lost or is_safe:
            self._best = None
        return is_lost

    def close(self) -> CheckpointStatistics:
        """Waits for the checkpoint that is being written, and ends the writer; collective.

        Called again, it only returns what was done. If another rank has died, this waits until the
        job is ended, as every collective call does.

        Returns:
            What was done; on every rank with its own waiting times.

        Raises:
            CheckpointError: The last checkpoint could not be written, and they are required; the
                same on all ranks.
        """
        if self._closed:
            return self._statistics
        self._closed, self._goes_on = True, False
        failure = None
        try:
            self._wait_until_safe()
        except CheckpointError as error:
            failure = error
        self._memory = None
        if self._comm.rank == 0:
            self._claim.release(self._root)
            settle(self._root, self._say)
        first = self._comm.broadcast(self._statistics)
        for mine, known in zip(self._statistics.saves, first.saves, strict=True):
            mine.take(known)
        if failure is not None:
            raise failure
        return self._statistics

    def abandon(self) -> None:
        """Ends the writer of a run that fails: gives up what is being written, within a moment.

        Not collective: other ranks may have died.
        """
        self._closed, self._goes_on = True, False
        if self._job is not None:
            self._job.give_up(MOMENT_S)
        if self._comm.rank == 0:
            self._claim.release(self._root)

    def _begin(self) -> str | None:
        """Claims the directory and removes what dead writers have left; returns what fails."""
        try:
            self._claim.acquire(self._root)
        except OSError as error:
            return f"checkpoints cannot be written: {why(error)}. {ADVICE}"
        settle(self._root, self._say)
        return None

    def _agree(self, wait: bool) -> str | None:
        """Returns who writes the next checkpoint; None if the one before is not finished."""
        if wait:
            self._wait_until_safe()
        busy, mode, failure = self._comm.broadcast(
            (self.writing, self._sharing.choose(), self._failure)
        )
        self._check(failure)
        if busy:
            self._report()
            return None
        if self._job is not None:
            self._job.join()
        return mode

    def _wait_until_safe(self) -> bool:
        """Waits for the last save on all ranks; returns whether it is safe. Collective."""
        if self._job is None:
            return True
        if self._comm.rank != 0:
            self._job.join()
        self._report()
        self._job.join()
        failure = self._comm.broadcast(self._failure)
        self._check(failure)
        return failure is None

    def _report(self) -> None:
        """Tells rank 0 who has failed, in case they could not leave a marker; collective."""
        job, plan = self._job, self._plan
        own = job.error if job is not None and self._comm.rank != 0 else None
        problems = self._comm.gather_any(own)
        if isinstance(job, CompletingJob) and plan is not None and problems:
            for part, rank in enumerate(plan.ranks):
                if (problem := problems[rank]) is not None:
                    job.reported[part] = problem

    def _check(self, failure: str | None) -> None:
        """Raises the error of a checkpoint that failed if checkpoints are required."""
        if failure is not None and self._required:
            self._failure = None
            raise CheckpointError(f"{failure}. {ADVICE}").on_all_ranks()

    def _planned(self, specs: dict[str, ArraySpec], mode: str) -> WritePlan:
        """Returns who writes what; the last plan if nothing has changed."""
        if self._plan is None or (self._plan.specs, self._plan.mode) != (specs, mode):
            self._plan = self._sharing.plan(specs, mode)
            part = self._plan.part_of(self._comm.rank)
            self._layout = None if part is None else self._plan.layout(part)
        return self._plan

    def _allocate(self) -> CopyMemory | None:
        """Returns the memory for this rank's part; None if it writes none."""
        num_bytes = None if self._layout is None else self._layout.num_bytes
        if self._memory is None or self._memory.num_bytes != num_bytes:
            self._memory = None  # before there is another
            self._memory = None if num_bytes is None else CopyMemory(num_bytes)
            self._statistics.copy_bytes = max(self._statistics.copy_bytes, num_bytes or 0)
        return self._memory

    def _task(self, plan: WritePlan, directory: Path) -> tuple[PartTask | None, str | None]:
        """Returns the part that this rank writes, if any, or why it cannot."""
        try:
            memory = self._allocate()
        except (OSError, MemoryError) as error:
            return None, f"no memory for a copy of the state: {why(error)}"
        part = plan.part_of(self._comm.rank)
        if memory is None or part is None:
            return None, None
        memory.begin()
        return PartTask(directory, part, memory, self._checksum), None

    def _copy(self, job: PartJob, arrays: Mapping[str, ArraySource]) -> None:
        """Copies this rank's share of the state, and has a thread write what is there already."""
        job.start()
        try:
            if job.task is not None and self._layout is not None:
                for piece, out in self._layout.fill(job.task.memory):
                    arrays[piece.array].copy_into(slice(piece.start, piece.stop), out)
        except BaseException:
            job.stop.set()
            raise

    def _note_end(self, record: SaveRecord, given_up: bool) -> None:
        """Notes what became of a save; called on rank 0's thread."""
        self._failure = record.error
        if record.written_s is not None and self._plan is not None:
            self._sharing.measured(self._plan.mode, record.num_bytes / record.written_s)
        elif self._plan is not None:
            self._sharing.failed(self._plan.mode)
        if record.error is not None and not given_up and not self._required:
            newest = self._publisher.newest
            self._say(
                record.error
                + (". Training goes on; " if self._goes_on else "; ")
                + (f"the newest checkpoint is {newest}" if newest else "there is no checkpoint yet")
                + f". {ADVICE}"
            )

    def _say_on_first(self, text: str) -> None:
        if self._comm.rank == 0:
            self._say(text)


def _specs(arrays: Mapping[str, ArraySource]) -> dict[str, ArraySpec]:
    return {name: ArraySpec.of(name, array) for name, array in arrays.items()}
