"""Writing checkpoints beside training: what training calls, on every rank."""

from __future__ import annotations

import errno
import json
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from candle_p1.checkpoints.checkpoint import Checkpoint, OwnCheckpoints
from candle_p1.checkpoints.commit import CommitThread, PendingCheckpoint, why, write_shard
from candle_p1.checkpoints.lock import Lock, clean, lock_name, take_lock, temporary_name
from candle_p1.checkpoints.manifest import name_of
from candle_p1.checkpoints.shards import (
    ArraySource,
    ArraySpec,
    CopyMemory,
    ShardLayout,
    ShardPlan,
    ShardPlanner,
    WritingStoppedError,
)
from candle_p1.distributed.comm import Communicator
from candle_p1.errors import CheckpointError
from candle_p1.records.types import Position

LOCK_S = 10.0
ADVICE = "Make room or give permission, or name another directory with --ckpt_directory"


@dataclass
class SaveRecord:
    """One checkpoint that was begun."""

    position: Position
    num_bytes: int
    wait_s: float = 0.0  # of training on this rank: to agree, to copy and, if asked, until safe
    written_s: float | None = None  # until it was safe; None if it failed
    name: str | None = None  # of its directory; None if it failed
    error: str | None = None


@dataclass
class CheckpointStatistics:
    """What a writer has done."""

    directory: Path
    saves: list[SaveRecord] = field(default_factory=list)  # those that were begun, in order
    num_not_taken: int = 0  # because the one before was still being written

    @property
    def written(self) -> list[SaveRecord]:
        """The checkpoints that were completed."""
        return [save for save in self.saves if save.name is not None]

    @property
    def errors(self) -> list[str]:
        """Why checkpoints failed."""
        return [save.error for save in self.saves if save.error is not None]


class CheckpointWriter:
    """Writes checkpoints of the state that the ranks train together.

    Every rank makes one. Making it, `save`, `best_is_lost` and `close` are collective; the rest
    is not.

    Args:
        comm: The communicator. It is used on the thread that calls, never on others.
        root: The directory of the checkpoints; it is made.
        keep: Chooses, by the numbers of all checkpoints of this run, those that are kept; see
            candle_p1.checkpoints.policy. The newest and the best are kept in any case.
        checksum: Also read back from the disk what was written, and compare.
        required: Whether a checkpoint that cannot be written ends the run.
        say: Receives a sentence about what goes wrong; called on rank 0, also on a thread.
        after: The checkpoint that this run resumes from, on rank 0. Those that the run had then
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
        keep: Callable[[Collection[int]], set[int]] = set,
        checksum: bool = False,
        required: bool = False,
        say: Callable[[str], None] = print,
        after: Checkpoint | None = None,
    ) -> None:
        self._comm, self._root = comm, root.absolute()
        self._checksum, self._required = checksum, required
        self._say = say if comm.rank == 0 else lambda text: None
        self._token: str = comm.broadcast(uuid.uuid4().hex[:12])
        self._lock: Lock | None = None
        self._lock_path = self._root / lock_name(self._token)
        problem = comm.broadcast(self._begin() if comm.rank == 0 else None)
        if problem is not None and required:
            raise CheckpointError(problem).on_all_ranks()
        if problem is not None:
            self._say(problem)
        self._planner = ShardPlanner(comm, self._lock_path if problem is None else None)
        self._own = OwnCheckpoints(self._root, self._token, keep, after)
        self._statistics = CheckpointStatistics(self._root)
        self._plan: ShardPlan | None = None
        self._layout: ShardLayout | None = None  # of the shard that this rank writes, if any
        self._memory: CopyMemory | None = None
        self._thread: CommitThread | None = None
        self._pending: PendingCheckpoint | None = None
        self._serial = 0
        self._best: SaveRecord | None = None  # of the last best epoch, until its end is known
        self._closed = self._has_raised = False

    @property
    def writing(self) -> bool:
        """Whether this rank is still writing; on rank 0, whether the last save is not yet safe."""
        return self._thread is not None and self._thread.running

    def prepare(self, arrays: Mapping[str, ArraySource]) -> None:
        """Has the memory for the copy provided, which makes the first copy faster; not collective.

        What it cannot get, `save` reports.
        """
        self._planned(_specs(arrays))
        if self._layout is not None:
            with suppress(OSError, MemoryError):
                self._allocate(self._layout.num_bytes).touch()

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
        specs = _specs(arrays)
        snapshot = json.loads(json.dumps(dict(facts))) if self._comm.rank == 0 else {}
        if not self._is_free(wait=wait or best):
            self._statistics.num_not_taken += 1
            if self._statistics.num_not_taken == 1:
                self._say(
                    f"no checkpoint was made of {position}, because the one before is still being"
                    " written; from now on, such checkpoints are only counted"
                )
            return False
        plan = self._planned(specs)
        self._serial += 1
        record = SaveRecord(position, plan.num_bytes)
        self._statistics.saves.append(record)
        if best:
            self._best = record
        write = self._copied(arrays, position)
        own = {name: np.array(array) for name, array in mine.items()}
        rank_states = self._comm.gather(own)
        self._thread = None
        if rank_states is not None:
            pending = PendingCheckpoint(
                self._root,
                self._token,
                self._serial,
                position,
                datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
                best,
                snapshot,
                plan,
                rank_states,
            )
            self._pending = pending
            self._thread = CommitThread(partial(self._commit, pending, write, record, begun))
        elif write is not None:
            self._thread = CommitThread(write)
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
        self._closed = True
        try:
            self._wait_until_safe()
        finally:
            self._memory = None
            if self._comm.rank == 0:
                self._unlock()
                clean(self._root, self._say)
        first = self._comm.broadcast(self._statistics)
        for own, known in zip(self._statistics.saves, first.saves, strict=True):
            own.num_bytes, own.written_s = known.num_bytes, known.written_s
            own.name, own.error = known.name, known.error
        return self._statistics

    def abandon(self) -> None:
        """Ends the writer of a run that fails: gives up what is being written, within a moment.

        Not collective: other ranks may have died.
        """
        self._closed = True
        if self._thread is not None:
            self._thread.stop(limit_s=1.0)
        if self._comm.rank == 0:
            self._unlock()

    def _begin(self) -> str | None:
        """Locks the directory and removes what dead writers have left; returns what fails."""
        try:
            self._take_lock()
        except OSError as error:
            return f"checkpoints cannot be written: {why(error)}. {ADVICE}"
        clean(self._root, self._say)
        return None

    def _take_lock(self) -> None:
        """Makes and locks the directory, if that has not been possible before; for rank 0."""
        if self._lock is not None:
            return
        self._root.mkdir(parents=True, exist_ok=True)
        lock = take_lock(self._lock_path, LOCK_S)  # somebody who cleans up may just look at it
        if lock is None:
            raise BlockingIOError(errno.EWOULDBLOCK, "it is locked", str(self._lock_path))
        try:
            lock.sign()
        except OSError:  # without a signature, nobody could tell that its writer is dead
            with suppress(OSError):
                self._lock_path.unlink()
            raise
        self._lock = lock

    def _unlock(self) -> None:
        if self._lock is not None:
            with suppress(OSError):
                self._lock_path.unlink(missing_ok=True)
            self._lock.release()

    def _is_free(self, *, wait: bool) -> bool:
        """Returns whether the checkpoint before is finished, maybe after waiting; collective."""
        if wait:
            self._wait_until_safe()
        busy = self._comm.broadcast(self.writing)
        self._check()
        if busy:
            self._report()
        else:
            self._join()
        return not busy

    def _wait_until_safe(self) -> bool:
        """Waits for the last save on all ranks; returns whether it is safe. Collective."""
        if not self._statistics.saves:
            return True
        if self._comm.rank != 0:
            self._join()
        self._report()
        self._join()
        return self._check()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _report(self) -> None:
        """Tells rank 0 who has failed, in case they could not leave a marker; collective."""
        own = self._thread.error if self._thread is not None and self._comm.rank != 0 else None
        problems = self._comm.gather_any(own)
        if self._pending is not None and problems is not None:
            for shard, rank in enumerate(self._pending.plan.ranks):
                if (problem := problems[rank]) is not None:
                    self._pending.failed[shard] = problem

    def _check(self) -> bool:
        """Returns whether the last save has not failed, as far as rank 0 knows; collective.

        If it has, and checkpoints are required, it raises CheckpointError, once.
        """
        saves = self._statistics.saves
        failure = self._comm.broadcast(saves[-1].error if saves else None)
        if failure is not None and self._required and not self._has_raised:
            self._has_raised = True
            raise CheckpointError(f"{failure}. {ADVICE}").on_all_ranks()
        return failure is None

    def _planned(self, specs: dict[str, ArraySpec]) -> ShardPlan:
        """Returns who writes what; the last plan if nothing has changed."""
        if self._plan is None or self._plan.specs != specs:
            self._plan = self._planner.plan(specs)
            self._layout = self._plan.layout_of(self._comm.rank)
        return self._plan

    def _allocate(self, num_bytes: int) -> CopyMemory:
        if self._memory is None or self._memory.num_bytes != num_bytes:
            self._memory = None  # before there is another
            self._memory = CopyMemory(num_bytes)
        return self._memory

    def _copied(
        self, arrays: Mapping[str, ArraySource], position: Position
    ) -> Callable[[threading.Event], None] | None:
        """Copies this rank's share of the state; returns what writes it, None if it has none."""
        if self._layout is None or self._plan is None:
            return None
        memory = None
        with suppress(OSError, MemoryError):
            memory = self._allocate(self._layout.num_bytes)
        for rows, out in self._layout.fill(memory.bytes) if memory else ():
            arrays[rows.array].copy_into(slice(rows.start, rows.stop), out)
        directory = self._root / temporary_name(name_of(position), self._token, self._serial)
        shard = self._plan.ranks.index(self._comm.rank)
        return partial(write_shard, directory, shard, memory, self._checksum)

    def _commit(
        self,
        pending: PendingCheckpoint,
        write: Callable[[threading.Event], None] | None,
        record: SaveRecord,
        begun: float,
        stop: threading.Event,
    ) -> None:
        """Writes rank 0's shard and commits, or removes what is unfinished; on a thread."""
        try:
            self._take_lock()
            pending.directory.mkdir(exist_ok=True)
            try:
                if write is not None:
                    write(stop)
            except (OSError, MemoryError, CheckpointError) as error:
                # The other shards have to end, too.
                pending.failed[0] = why(error)
            shards = pending.await_shards(stop)
            earlier = self._own.entries()
            name, num_bytes = pending.commit(shards, self._own.last_number + 1, earlier)
            self._own.add(name, best=pending.best)
            record.name, record.num_bytes = name, num_bytes
            record.written_s = time.perf_counter() - begun
        except BaseException as error:
            problem = f"the checkpoint of {record.position} could not be written: {why(error)}"
            with suppress(OSError):  # removed when the writer is closed, or by the next one
                pending.discard()
            record.error = problem
            if not isinstance(error, WritingStoppedError) and not self._required:
                newest = self._own.newest
                left = f"the newest checkpoint is {newest}" if newest else "there is none yet"
                self._say(f"{problem}; {left}. {ADVICE}")
            raise
        try:
            self._own.remove_others()
        except OSError as error:
            self._say(f"a checkpoint that is not kept could not be removed: {why(error)}")


def _specs(arrays: Mapping[str, ArraySource]) -> dict[str, ArraySpec]:
    return {name: ArraySpec.of(name, array) for name, array in arrays.items()}
