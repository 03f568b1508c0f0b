"""Rank 0's thread: it writes a part, waits for the others, and completes the checkpoint."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from candle_p1.checkpoints.job import (
    DONE,
    FAILED,
    GIVEN_UP,
    PartJob,
    PartTask,
    failure_marker,
    part_name,
    why,
)
from candle_p1.checkpoints.manifest import FileEntry
from candle_p1.checkpoints.part_file import WritingStoppedError
from candle_p1.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from candle_p1.checkpoints.publisher import Draft, Publisher, RankState
    from candle_p1.checkpoints.statistics import SaveRecord

FIRST_PAUSE_S, MAX_PAUSE_S = 0.001, 0.1


class CompletingJob(PartJob):
    """Rank 0's thread.

    Args:
        task: The part that rank 0 writes; None: it cannot, and `hand_over` says why.
        draft: The checkpoint.
        publisher: Completes it.
        record: Where what becomes of it is noted.
        begun: When the save began, by time.perf_counter.
        say: Receives a sentence about what goes wrong.
        end: Called when nothing is left to do but to remove checkpoints that are not kept; with the
            record, and whether the checkpoint was given up because the run ends.

    Attributes:
        reported: Parts that have failed, and why, beside those with a marker; the thread that
            trains adds to it.
    """

    def __init__(
        self,
        task: PartTask | None,
        draft: Draft,
        publisher: Publisher,
        record: SaveRecord,
        begun: float,
        say: Callable[[str], None],
        end: Callable[[SaveRecord, bool], None],
    ) -> None:
        super().__init__(task)
        self.reported: dict[int, str] = {}
        self._rank_states: Sequence[RankState] = ()
        self._has_states = threading.Event()
        self._draft, self._publisher = draft, publisher
        self._record, self._begun = record, begun
        self._say, self._end = say, end

    @property
    def has_work(self) -> bool:
        """Always: a checkpoint that cannot be written has to be ended, too."""
        return True

    def hand_over(self, rank_states: Sequence[RankState], problems: Mapping[int, str]) -> None:
        """Provides what is known only once all ranks have copied their shares.

        Args:
            rank_states: The arrays of every rank's own, by name.
            problems: The parts that cannot be written, and why.
        """
        self._rank_states = rank_states
        self.reported.update(problems)
        self._has_states.set()

    def work(self) -> None:
        """Writes and completes; removes what is unfinished if that fails."""
        draft, record, given_up = self._draft, self._record, False
        try:
            self._publisher.begin(draft)
            try:
                super().work()
            except (OSError, CheckpointError) as error:  # the other parts have to end, too
                self.reported[0] = why(error)
            while not self._has_states.wait(MAX_PAUSE_S):
                if self.stop.is_set():
                    raise WritingStoppedError
            files = self._await_parts()
            record.name = self._publisher.publish(draft, self._rank_states, files)
            record.num_bytes = sum(entry.bytes for entry in files.values())
            record.written_s = time.perf_counter() - self._begun
        except BaseException as error:
            given_up = isinstance(error, WritingStoppedError)
            record.error = f"the checkpoint of {draft.position} could not be written: {why(error)}"
            with suppress(OSError):  # removed when the writer is closed, or by the next one
                self._publisher.discard(draft)
            raise
        finally:
            self._end(record, given_up)
        try:
            self._publisher.remove_others()
        except OSError as error:
            self._say(f"a checkpoint that is not kept could not be removed: {why(error)}")

    def _await_parts(self) -> dict[str, FileEntry]:
        """Returns the parts' sizes and digests, by the names of their files, once all are there.

        Raises:
            CheckpointError: A part has failed, and all others have ended.
            WritingStoppedError: A rank has given up its part, or `stop` was set.
            OSError: The directory cannot be read.
        """
        directory, num_parts = self._draft.directory, len(self._draft.plan.ranks)
        pause_s = FIRST_PAUSE_S
        while True:
            names = [path.name for path in directory.iterdir()]
            done = {int(m["part"]): m for name in names if (m := DONE.fullmatch(name))}
            failed = {int(m["part"]) for name in names if (m := FAILED.fullmatch(name))}
            failed.update(self.reported)
            if len(done.keys() | failed) == num_parts:
                break
            if self.stop.wait(pause_s):
                raise WritingStoppedError
            pause_s = min(1.2 * pause_s, MAX_PAUSE_S)
        if failed:
            reasons = [self._why_failed(part) for part in sorted(failed)]
            if GIVEN_UP in reasons:
                raise WritingStoppedError
            raise CheckpointError(reasons[0])
        return {
            part_name(part): FileEntry(
                bytes=int(done[part]["bytes"]), xxh3_128=done[part]["digest"]
            )
            for part in range(num_parts)
        }

    def _why_failed(self, part: int) -> str:
        with suppress(OSError):
            if text := failure_marker(self._draft.directory, part).read_text("utf-8"):
                return text
        return self.reported.get(part, f"{part_name(part)} could not be written")
