"""Where a run takes place: in a directory of its own, or in that of a run that it continues.

The same command continues a run that has not finished: one with the same benchmark and the same
values of all parameters on which results depend, which is not alive. Only rank 0 looks, before the
other ranks know where the run is, and it holds the lock of the directory from then on, so that of
two equal commands one gets it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from candle_p1.checkpoints.policy import are_saved
from candle_p1.errors import CheckpointError, ParameterError, RecordError
from candle_p1.parameters.parameter import Role
from candle_p1.records.parts import KeptWork, earlier_parts
from candle_p1.records.record import RECORD_NAME, read_record, read_so_far
from candle_p1.records.types import EnergyFacts, ParameterValue, PositionFacts
from candle_p1.training.identity import changes_learning
from candle_p1.training.run_directory import CHECKPOINTS, checkpoint_root, run_directories
from candle_p1.training.run_lock import LOCK_NAME, RunLock, take_lock

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from candle_p1.checkpoints.checkpoint import Checkpoint
    from candle_p1.parameters.parameter_set import ParameterSet
    from candle_p1.records.types import PartFacts, RunRecord

FAREWELL_S = 15.0
"""How long to wait for the watchdog of a run that has ended, which may still end its ranks."""
NOTICE_S = 5.0
"""How long to wait for the watchdog of a run whose record says "running" to notice its end."""


@dataclass
class RunPlace:
    """Where a run takes place.

    Attributes:
        directory: Its directory, which exists.
        lock: The lock of the directory.
        owner_lock: The lock of the directory from which the run has moved; None if it has not.
        continued: Whether the directory holds the record of the run, which goes on.
        parts: The parts of the run so far.
        kept: What is kept of these.
        restart: The checkpoint that the run goes on from; None if it begins at the beginning.
        notes: What to tell the user.
    """

    directory: Path
    lock: RunLock
    owner_lock: RunLock | None = None
    continued: bool = False
    parts: list[PartFacts] = field(default_factory=list)
    kept: KeptWork = field(default_factory=KeptWork)
    restart: Checkpoint | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def record_path(self) -> Path:
        """The path of the record."""
        return self.directory / RECORD_NAME

    @property
    def locks(self) -> list[RunLock]:
        """The locks that are held while the run lives."""
        return [self.lock, self.owner_lock] if self.owner_lock else [self.lock]

    def release(self) -> None:
        """Releases the locks."""
        for lock in self.locks:
            lock.release()


class NotContinued(Exception):  # noqa: N818
    """Why a run is not continued."""


def find_place(benchmark: str, params: ParameterSet) -> RunPlace:
    """Returns where a run takes place, with the lock held; rank 0 calls it.

    Raises:
        ParameterError: There is no such place, or a checkpoint is required and there is none, or it
            is that of another run.
    """
    candidates = run_directories(benchmark, params)
    try:
        return _find(benchmark, params, candidates)
    except OSError as error:
        raise ParameterError(
            f"output_dir ({params.origin('output_dir')}): cannot write to"
            f" {error.filename or candidates[0]}: {error.strerror}"
        ) from error


def free_place(candidates: Sequence[Path]) -> RunPlace:
    """Returns the first of the directories that neither has a record nor is about to get one.

    Raises:
        ParameterError: There is none.
        OSError: A directory cannot be made.
    """
    for directory in candidates:
        directory.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(directory / RECORD_NAME):
            continue
        lock = take_lock(directory)
        if lock is None:
            continue
        if not os.path.lexists(directory / RECORD_NAME):
            return RunPlace(directory, lock)
        lock.release()
    raise _occupied(candidates[-1])


def _find(benchmark: str, params: ParameterSet, candidates: Sequence[Path]) -> RunPlace:
    mode, root = params["ckpt_restart_mode"], params["ckpt_directory"]
    notes: list[str] = []
    place: RunPlace | None = None
    search = _Search(benchmark, params, candidates, notes)
    evaluates = params["eval_bool"] and not params["train_bool"]
    if evaluates:
        place = search.to_evaluate() if root is not None else None
    elif mode != "off" and (are_saved(params) or root is not None or mode == "required"):
        place = search.from_named_root() if root is not None else search.from_directories()
    if (evaluates or mode == "required") and (place is None or place.restart is None):
        if place:
            place.release()
        reasons = "".join(f"; {note}" for note in notes)
        cause, instead = "ckpt_restart_mode required", "begin by --ckpt_restart_mode auto"
        if evaluates:
            cause, instead = "train_bool False leaves random weights", "set --eval_bool False"
        raise ParameterError(
            f"{cause}: there is no checkpoint to continue from{reasons}. Name its directory by"
            f" --ckpt_directory, or {instead}"
        )
    place = place or free_place(candidates)
    place.notes = notes
    return place


@dataclass
class _Search:
    """Looks for a run to continue."""

    benchmark: str
    params: ParameterSet
    candidates: Sequence[Path]
    notes: list[str]

    @property
    def _is_fixed(self) -> bool:
        """Whether the user has chosen the run's directory."""
        return len(self.candidates) == 1

    def from_directories(self) -> RunPlace | None:
        """Continues the newest run, among those of the experiment, that can be continued."""
        parent = self.candidates[0].parent
        there = set(parent.iterdir()) if parent.is_dir() else set()
        existing = [
            each
            for each in self.candidates
            if each in there and os.path.lexists(each / RECORD_NAME)
        ]
        for directory in reversed(existing):
            try:
                return self._continue_in(directory, directory / CHECKPOINTS)
            except NotContinued as reason:
                if self._is_fixed:
                    raise _occupied(directory, str(reason)) from None
                if directory == existing[-1]:
                    self.notes.append(f"{directory} is not continued: {reason}")
        return None

    def from_named_root(self) -> RunPlace | None:
        """Continues the run that the newest checkpoint in a named directory belongs to."""
        root = checkpoint_root(self.params, self.candidates[0])
        owner = self._owner(root)
        if owner is None:
            self.notes.append(f"{root} holds no checkpoint")
            return self.from_directories() if self._is_fixed else None
        here = self.candidates[0] if self._is_fixed else owner
        has_record = here in self.candidates and os.path.lexists(here / RECORD_NAME)
        try:
            if has_record:
                return self._continue_in(here, root)
            return self._continue_elsewhere(owner, root)
        except NotContinued as reason:
            if self._is_fixed and has_record:
                raise _occupied(here, str(reason)) from None
            self.notes.append(f"{owner} is not continued: {reason}")
            return None

    def to_evaluate(self) -> RunPlace | None:
        """Takes the newest checkpoint in a named directory to a new run, without going on."""
        root = checkpoint_root(self.params, self.candidates[0])
        checkpoint = self._first(root)
        if checkpoint is None:
            self.notes.append(f"{root} holds no checkpoint")
            return None
        checkpoint.verify()
        place = free_place(self.candidates)
        place.restart, place.kept = checkpoint, _kept(checkpoint)
        return place

    def _owner(self, root: Path) -> Path | None:
        """Returns the directory of the run that saved the newest readable checkpoint, if any."""
        first = self._first(root)
        return Path(str(first.facts["run"]["directory"])) if first else None

    def _first(self, root: Path) -> Checkpoint | None:
        from candle_p1.checkpoints.checkpoint import Checkpoint
        from candle_p1.checkpoints.root import CheckpointRoot

        for directory in CheckpointRoot(root).candidates() if root.is_dir() else ():
            with suppress(CheckpointError):
                return Checkpoint(directory)
        return None

    def _continue_in(self, directory: Path, root: Path) -> RunPlace:
        """Claims the directory of a run that has not finished.

        Raises:
            NotContinued: It cannot be continued.
        """
        record = self._read(directory)
        wait_s = NOTICE_S if record.status == "running" else FAREWELL_S
        lock = take_lock(directory, wait_s)
        if lock is None:
            raise NotContinued("it is running")
        try:
            record = self._read(directory)  # it may have ended, or gone on, in the meantime
            if record.status == "running" and not lock.proves_end:
                raise NotContinued(
                    'its record says "running", and whether it is cannot be told on this file'
                    " system, which does not show locks to other nodes or has none"
                )
            checkpoint = self._newest(root)
            if checkpoint and not _belongs(checkpoint, root, record, directory):
                self.notes.append(
                    f"{checkpoint.directory} is not of the run in {directory}, and not taken"
                )
                checkpoint = None
            if checkpoint is None and not self._is_fixed:
                raise NotContinued("it has no checkpoint")
            place = RunPlace(directory, lock, continued=True, restart=checkpoint)
            self._describe(place, record, directory)
            if lock.descriptor is None:
                _mark(directory, len(place.parts) + 1)
        except BaseException:
            lock.release()
            raise
        where = f"from {_position(checkpoint)}" if checkpoint else "from the beginning"
        self.notes.append(
            f"continuing the run in {directory}, which {_ending(record)}, {where}: part"
            f" {len(place.parts) + 1}"
        )
        return place

    def _continue_elsewhere(self, owner: Path, root: Path) -> RunPlace:
        """Continues a run of another directory in a new one; its own is left as it is.

        Raises:
            NotContinued: It cannot be continued.
        """
        record = self._read(owner) if (owner / RECORD_NAME).exists() else None
        lock = take_lock(owner, FAREWELL_S) if record else None
        if record and lock is None:
            raise NotContinued("it is running")
        place: RunPlace | None = None
        try:
            place = free_place(self.candidates)
            place.owner_lock = lock  # so that an equal command does not continue it, too
            place.restart = self._newest(root)
            if record:
                self._describe(place, record, owner)
            elif place.restart:
                place.kept = _kept(place.restart)
        except BaseException:
            for each in (place.lock if place else None, lock):
                if each:
                    each.release()
            raise
        if place.restart:
            where = _position(place.restart)
            self.notes.append(f"continuing the run of {owner} in {place.directory}, from {where}")
        return place

    def _read(self, directory: Path) -> RunRecord:
        """Returns the record of a run that has not finished and has the same parameters."""
        try:
            record = read_record(directory / RECORD_NAME)
        except RecordError as error:
            raise NotContinued(str(error)) from error
        if record.status == "ok":
            raise NotContinued("it has finished")
        if different := differences(record, self.benchmark, self.params):
            raise NotContinued("; ".join(different))
        return record

    def _describe(self, place: RunPlace, record: RunRecord, directory: Path) -> None:
        """Adds the earlier parts of a run in a directory, and what of them is kept."""
        place.kept = _kept(place.restart) if place.restart else KeptWork()
        known = read_so_far(directory / RECORD_NAME)
        place.parts = earlier_parts(known, place.kept, _last_sign(directory))

    def _newest(self, root: Path) -> Checkpoint | None:
        """Returns the newest checkpoint that is not damaged; None if there is none."""
        from candle_p1.checkpoints.root import CheckpointRoot

        if not root.is_dir():
            return None
        # Only while no other run writes there: it removes what writers have left.
        return CheckpointRoot(root).newest_good(self.notes.append)


def differences(record: RunRecord, benchmark: str, params: ParameterSet) -> list[str]:
    """Describes how a run on whose results a record reports differs from that of the parameters.

    Only what decides about results counts: not how fast they come, nor where they go.
    """
    if record.benchmark != benchmark:
        return [f"its benchmark is {record.benchmark}"]
    found: Mapping[str, Any] = {name: each.value for name, each in record.parameters.items()}
    return [
        f"{name} is {found.get(name)!r} there and {value!r} here"
        for name, value in params.items()
        if _decides(name, params) and found.get(name) != _as_recorded(value)
    ]


def _decides(name: str, params: ParameterSet) -> bool:
    parameter = params.declared[name]
    return changes_learning(parameter) or (parameter.role is Role.PLACE and name.endswith("_data"))


def _as_recorded(value: Any) -> Any:
    """Returns the value of a parameter as it is read from a record."""
    return ParameterValue(value=value, origin="").model_dump(mode="json")["value"]


def _belongs(checkpoint: Checkpoint, root: Path, record: RunRecord, directory: Path) -> bool:
    """Whether a checkpoint is one of the run in a directory: several may share a --ckpt_directory.

    It is if the root is that of this run only, or if the run saved it, or last began from it.
    """
    if root.resolve() == (directory / CHECKPOINTS).resolve():
        return True
    saved_by = Path(str(checkpoint.facts.get("run", {}).get("directory", "")))
    begun_from = record.parts[-1].checkpoint if record.parts else None
    return saved_by.resolve() == directory.resolve() or begun_from == str(checkpoint.directory)


def _kept(checkpoint: Checkpoint) -> KeptWork:
    facts = checkpoint.facts.get("run", {})
    position = checkpoint.position
    return KeptWork(
        part=int(facts.get("part", 1)),
        steps=int(facts.get("steps", 0)),
        position=PositionFacts(epoch=position.epoch, step=position.step),
        checkpoint=str(checkpoint.directory),
        energy=EnergyFacts.model_validate(facts["energy"]) if "energy" in facts else None,
    )


def _position(checkpoint: Checkpoint) -> str:
    return f"epoch {checkpoint.position.epoch}, step {checkpoint.position.step}"


def _ending(record: RunRecord) -> str:
    return {"running": "was killed", "failed": "failed"}.get(record.status, "was interrupted")


def _last_sign(directory: Path) -> str:
    """Returns when a file in a run's directory was last written, as ISO 8601 in UTC."""
    files = [each for each in directory.iterdir() if each.is_file() and each.name != LOCK_NAME]
    # Links are not followed: what "latest" or "best" names may be missing.
    times = [each.lstat().st_mtime for each in (*files, *(directory / CHECKPOINTS).glob("*"))]
    last = datetime.fromtimestamp(max(times), timezone.utc)
    return last.isoformat(timespec="milliseconds")


def _mark(directory: Path, part: int) -> None:
    """Claims a part of a run where the file system has no locks.

    Raises:
        NotContinued: Another process has claimed it.
    """
    try:
        (directory / f".{RECORD_NAME}.part-{part}").open("x").close()
    except FileExistsError as error:
        raise NotContinued(
            f"another process continues it; if that is not so, remove {error.filename}"
        ) from error


def _occupied(directory: Path, reason: str = "") -> ParameterError:
    because = f", which is not continued ({reason})" if reason else ""
    return ParameterError(
        f"{directory} already holds the record of a run{because}: choose another --run_id,"
        " --experiment_id or --output_dir"
    )
