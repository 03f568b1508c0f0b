"""The directory of a run: a new one, or that of a run that goes on; its lock; the record in it.

Files go to <output_dir>/<experiment_id>/<run_id>, as in CANDLE, and checkpoints to a directory
within it, unless --ckpt_directory names another one.

The same command continues a run that has not finished: one with the same benchmark and the same
values of all parameters on which results depend, which is not alive. Only rank 0 looks, before the
other ranks know where the run is, and it holds the lock of the directory from then on, so that of
two equal commands one gets it. The watchdog server inherits the lock, and may still write the
record after rank 0 has died; the kernel releases it when both have ended, however they end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from candle_p1.checkpoints.lock import Lock, take_lock
from candle_p1.checkpoints.policy import are_saved
from candle_p1.errors import ParameterError, RecordError
from candle_p1.files import release, write_atomically
from candle_p1.parameters.parameter_set import ParameterSet
from candle_p1.records.record import (
    RECORD_NAME,
    begin_record,
    continue_record,
    extend_record,
    read_record,
    read_so_far,
)
from candle_p1.records.segments import ResumePoint, earlier_segments, next_segment
from candle_p1.records.types import RunRecord, Segment
from candle_p1.training.restart import TrainingState, run_differences

if TYPE_CHECKING:
    from candle_p1.checkpoints.checkpoint import Checkpoint
    from candle_p1.failure.agent import RankAgent

DEFAULT_RUN_ID = "RUN000"
MAX_NUMBERED = 1000
CHECKPOINTS = "ckpts"
LOCK_NAME = f".{RECORD_NAME}.lock"
WATCHDOG_EXIT_S, NOTICE_S = 15.0, 5.0
"""How long to wait for the watchdog of a run that has ended, which may still end its ranks, and for
that of a run whose record says "running" to notice its end."""


def run_directories(benchmark: str, params: ParameterSet, prefix: str = "RUN") -> list[Path]:
    """Returns the candidate directories of a run, which uses the first one that is free.

    A run whose run_id has not been chosen is numbered, after the prefix. An output_dir of "." is
    used as it is.
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


class RunDirectory:
    """Finds the run's directory, and begins or continues the record in it; for rank 0."""

    def __init__(self, benchmark: str, params: ParameterSet) -> None:
        self._benchmark, self._params = benchmark, params
        self._candidates = run_directories(benchmark, params)
        self._is_chosen = len(self._candidates) == 1  # by the user
        self._path: Path | None = None
        self._locks: list[Lock] = []
        self._segments: list[Segment] = []
        self._resume_point = ResumePoint()
        self.notes: list[str] = []  # for the user
        self.checkpoint: Checkpoint | None = None  # None: the run begins at the beginning
        self.continues_record = False  # the directory holds the record of the run, which goes on
        self.record: RunRecord | None = None  # still "running"; None before `open`

    @property
    def path(self) -> Path:
        """The directory, which exists once `find` has returned."""
        assert self._path is not None
        return self._path

    @property
    def lock_descriptors(self) -> list[int]:
        """The file descriptors of the locks, which the watchdog server keeps open, too."""
        return [lock.descriptor for lock in self._locks if lock.descriptor is not None]

    def find(self) -> Path:
        """Returns the directory in which the run is expected, and locks it.

        Raises:
            ParameterError: There is no directory for the run, or a checkpoint is required and there
                is none.
            OtherVersionError: The checkpoint to resume from has another version of the format.
        """
        with self._told_if_not_writable():
            self._find()
        return self.path

    def open(self, record: RunRecord, watchdog: RankAgent) -> tuple[Path, int]:
        """Writes the parameters and the record; returns the directory and the segment's number."""
        with self._told_if_not_writable():
            if self._segments or self.checkpoint:
                segments = [*self._segments, next_segment(record, self._resume_point)]
                record = extend_record(record, segments=segments)
            while not self.continues_record:
                try:
                    begin_record(self.path / RECORD_NAME, record)  # two jobs never share one
                    break
                except FileExistsError:  # without locks, another job may have been faster
                    self._locks.pop().release()
                    self._begin()
            path = self.path / RECORD_NAME
            watchdog.report_record(path)
            try:
                write_atomically(self.path / "final_params.txt", self._params.to_text())
                if self.continues_record:
                    continue_record(path, record)
            except OSError:
                if not self.continues_record:
                    path.unlink()
                release(path)
                raise
        self.record = record
        return self.path, len(record.segments or [record])

    def close(self) -> None:
        """Releases the locks, as far as this process holds them."""
        while self._locks:
            self._locks.pop().release()

    def _find(self) -> None:
        params, mode = self._params, self._params["ckpt_restart_mode"]
        named = params["ckpt_directory"] is not None
        evaluates = params["eval_bool"] and not params["train_bool"]
        if evaluates:
            newest = self._named_root()[1] if named else None
            if newest is not None:  # a new run takes it, without training
                newest.verify()
                self._begin()
                self._resume(newest)
        elif mode != "off" and (are_saved(params) or named or mode == "required"):
            if named:
                self._continue_by_checkpoint()
            else:
                self._continue_newest()
        if self.checkpoint is None and (evaluates or mode == "required"):
            self.close()
            reasons = "".join(f"; {note}" for note in self.notes)
            cause, instead = "ckpt_restart_mode required", "begin by --ckpt_restart_mode auto"
            if evaluates:
                cause, instead = "train_bool False leaves random weights", "set --eval_bool False"
            raise ParameterError(
                f"{cause}: there is no checkpoint to continue from{reasons}. Name its directory"
                f" with --ckpt_directory, or {instead}"
            )
        if self._path is None:
            self._begin()

    def _begin(self) -> None:
        """Takes the first of the directories that has no record and is not about to get one."""
        for directory in self._candidates:
            directory.mkdir(parents=True, exist_ok=True)
            if _has_record(directory) or (lock := take_lock(directory / LOCK_NAME)) is None:
                continue
            if not _has_record(directory):
                lock.sign()
                self._path = directory
                self._locks.append(lock)
                return
            lock.release()
        raise _occupied(self._candidates[-1])

    def _continue_newest(self) -> None:
        """Continues the newest run, among those of the experiment, that can be continued."""
        parent = self._candidates[0].parent
        there = set(parent.iterdir()) if parent.is_dir() else set()
        existing = [each for each in self._candidates if each in there and _has_record(each)]
        for directory in reversed(existing):
            try:
                self._continue_in(directory, directory / CHECKPOINTS)
                return
            except NotContinued as reason:
                if self._is_chosen:
                    raise _occupied(directory, str(reason)) from None
                if directory == existing[-1]:
                    self.notes.append(f"{directory} is not continued: {reason}")

    def _continue_by_checkpoint(self) -> None:
        """Continues the run that the newest checkpoint in a named directory belongs to."""
        root, newest = self._named_root()
        if newest is None:
            if self._is_chosen:
                self._continue_newest()
            return
        owner = Path(TrainingState.of(newest).run.directory)
        here = self._candidates[0] if self._is_chosen else owner
        has_record = here in self._candidates and _has_record(here)
        try:
            if has_record:
                self._continue_in(here, root)
            else:
                self._continue_elsewhere(owner, root)
        except NotContinued as reason:
            if self._is_chosen and has_record:
                raise _occupied(here, str(reason)) from None
            self.notes.append(f"{owner} is not continued: {reason}")

    def _named_root(self) -> tuple[Path, Checkpoint | None]:
        """Returns the named directory, and the newest checkpoint in it, which may be damaged."""
        from candle_p1.checkpoints.checkpoint import CheckpointRoot

        root = checkpoint_root(self._params, self._candidates[0])
        newest = CheckpointRoot(root).newest() if root.is_dir() else None
        if newest is None:
            self.notes.append(f"{root} holds no checkpoint")
        return root, newest

    def _continue_in(self, directory: Path, root: Path) -> None:
        """Claims the directory of a run that has not finished, or raises NotContinued."""
        with self._locked(directory) as record:
            checkpoint = self._newest_good(root)
            if checkpoint and not _belongs(checkpoint, root, record, directory):
                self.notes.append(
                    f"{checkpoint.directory} is not of the run in {directory}, and not taken"
                )
                checkpoint = None
            if checkpoint is None and not self._is_chosen:
                raise NotContinued("it has no checkpoint")
            if not self.lock_descriptors:  # without locks, the first to make a file continues it
                number = len(record.segments or [record]) + 1
                claim = directory / f".{RECORD_NAME}.segment-{number}"
                try:
                    claim.open("x").close()
                except FileExistsError:
                    other = "another process continues it; if that is not so, remove"
                    raise NotContinued(f"{other} {claim}") from None
            self._resume(checkpoint, directory)
        self._path, self.continues_record = directory, True
        ending = {"running": "was killed", "failed": "failed"}.get(record.status, "was interrupted")
        where = f"from {checkpoint.position}" if checkpoint else "from the beginning"
        self.notes.append(
            f"continuing the run in {directory}, which {ending}, {where}: segment"
            f" {len(self._segments) + 1}"
        )

    def _continue_elsewhere(self, owner: Path, root: Path) -> None:
        """Continues a run of another directory in a new one; its own is left as it is.

        Its lock is held, too, so that an equal command does not continue it once more. Raises
        NotContinued if it cannot be continued.
        """
        has_record = (owner / RECORD_NAME).exists()
        with self._locked(owner) if has_record else nullcontext():
            self._begin()
            checkpoint = self._newest_good(root)
            self._resume(checkpoint, owner if has_record else None)
        if checkpoint:
            self.notes.append(
                f"continuing the run of {owner} in {self.path}, from {checkpoint.position}"
            )

    @contextmanager
    def _locked(self, directory: Path) -> Iterator[RunRecord]:
        """Yields the record of a run that has ended, and holds its lock unless the body fails.

        Raises NotContinued if it has finished or may be alive, or is another run.
        """
        record = self._read(directory)
        wait_s = NOTICE_S if record.status == "running" else WATCHDOG_EXIT_S
        lock = take_lock(directory / LOCK_NAME, wait_s)
        if lock is None:
            raise NotContinued("it is running")
        self._locks.append(lock)
        try:
            record = self._read(directory)  # meanwhile it may have ended, or gone on
            if record.status == "running" and not lock.proves_end:
                raise NotContinued(
                    'its record says "running", and whether it is cannot be told on this file'
                    " system, which does not show locks to other nodes or has none"
                )
            yield record
            lock.sign()
        except BaseException:
            self.close()
            raise

    def _resume(self, checkpoint: Checkpoint | None, directory: Path | None = None) -> None:
        """Resumes from a checkpoint, if there is one, the run with the record in a directory."""
        self.checkpoint = checkpoint
        if checkpoint:
            self._resume_point = TrainingState.of(checkpoint).run.resume_point(checkpoint)
        if directory is not None:
            known = read_so_far(directory / RECORD_NAME)
            self._segments = earlier_segments(known, self._resume_point, _last_sign(directory))

    def _read(self, directory: Path) -> RunRecord:
        """Returns the record of a run that has not finished and has the same parameters."""
        try:
            record = read_record(directory / RECORD_NAME)
        except RecordError as error:
            raise NotContinued(str(error)) from error
        if record.status == "ok":
            raise NotContinued("it has finished")
        if different := run_differences(record, self._benchmark, self._params):
            raise NotContinued("; ".join(different))
        return record

    def _newest_good(self, root: Path) -> Checkpoint | None:
        """Returns the newest checkpoint that is not damaged; None if there is none."""
        from candle_p1.checkpoints.checkpoint import CheckpointRoot

        # Only while no other run writes there: it removes what writers have left.
        return CheckpointRoot(root).newest_good(self.notes.append) if root.is_dir() else None

    @contextmanager
    def _told_if_not_writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = error.filename or self._path or self._candidates[0]
            told = f"cannot write to {where}: {error.strerror}"
            raise ParameterError(
                f"output_dir ({self._params.origin('output_dir')}): {told}"
            ) from error


class NotContinued(Exception):  # noqa: N818
    """Why a run is not continued."""


def _has_record(directory: Path) -> bool:
    return os.path.lexists(directory / RECORD_NAME)


def _belongs(checkpoint: Checkpoint, root: Path, record: RunRecord, directory: Path) -> bool:
    """Whether a checkpoint is one of the run in a directory: several may share a --ckpt_directory.

    It is if the root is that of this run only, or if the run saved it, or last began from it.
    """
    if root.resolve() == (directory / CHECKPOINTS).resolve():
        return True
    saved_by = Path(TrainingState.of(checkpoint).run.directory)
    begun_from = record.segments[-1].checkpoint if record.segments else None
    return saved_by.resolve() == directory.resolve() or begun_from == str(checkpoint.directory)


def _last_sign(directory: Path) -> str:
    """Returns when a file in a run's directory was last written, as ISO 8601 in UTC."""
    files = [each for each in directory.iterdir() if each.is_file() and each.name != LOCK_NAME]
    # Links are not followed: what "latest" or "best" names may be missing.
    times = [each.lstat().st_mtime for each in (*files, *(directory / CHECKPOINTS).glob("*"))]
    last = datetime.fromtimestamp(max(times), timezone.utc)
    return last.isoformat(timespec="milliseconds")


def _occupied(directory: Path, reason: str = "") -> ParameterError:
    because = f", which is not continued ({reason})" if reason else ""
    return ParameterError(
        f"{directory} already holds the record of a run{because}: choose another --run_id,"
        " --experiment_id or --output_dir"
    )
