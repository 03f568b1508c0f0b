"""Opening a run: its directory, and its record, which begins or goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from candle_p1.errors import ParameterError
from candle_p1.files import release, write_atomically
from candle_p1.records.parts import next_part
from candle_p1.records.record import begin_record, continue_record, extend_record
from candle_p1.training.place import RunPlace, find_place, free_place
from candle_p1.training.run_directory import run_directories

if TYPE_CHECKING:
    from pathlib import Path

    from candle_p1.checkpoints.checkpoint import Checkpoint
    from candle_p1.distributed.watchdog.reporter import Reporter
    from candle_p1.parameters.parameter_set import ParameterSet
    from candle_p1.records.types import RunRecord


class RunOpening:
    """Finds the run's directory, and begins or continues the record in it; for rank 0.

    Args:
        name: The benchmark's name.
        params: The parameters of the run.

    Attributes:
        record: The record, which is still "running"; None on the other ranks.
    """

    def __init__(self, name: str, params: ParameterSet) -> None:
        self._name, self._params = name, params
        self._place: RunPlace | None = None
        self.record: RunRecord | None = None

    def find(self) -> Path:
        """Returns the directory in which the run is expected, and locks it.

        Raises:
            ParameterError: There is no place for the run.
        """
        self._place = find_place(self._name, self._params)
        return self._place.directory

    @property
    def kept_open(self) -> list[int]:
        """The file descriptors that the watchdog server keeps open, too: those of the locks."""
        descriptors = [lock.descriptor for lock in self._place.locks] if self._place else []
        return [each for each in descriptors if each is not None]

    @property
    def restart(self) -> Checkpoint | None:
        """The checkpoint that the run goes on from."""
        return self._place.restart if self._place else None

    @property
    def notes(self) -> list[str]:
        """What to tell the user about it."""
        return self._place.notes if self._place else []

    def open(self, record: RunRecord, watchdog: Reporter) -> tuple[Path, int]:
        """Writes the parameters and the record; returns the directory and the part's number.

        Raises:
            ParameterError: They cannot be written.
        """
        assert self._place is not None
        place = self._place
        try:
            if place.parts or place.restart:
                parts = [*place.parts, next_part(record, place.kept)]
                record = extend_record(record, parts=parts)
            while not place.continued:
                try:
                    begin_record(place.record_path, record)  # two jobs never share one
                    break
                except FileExistsError:  # without locks, another job may have been faster
                    place.release()
                    place = self._place = free_place(run_directories(self._name, self._params))
            watchdog.report_record(place.record_path)
            self._write_parameters(place, record)
        except OSError as error:
            raise ParameterError(
                f"output_dir ({self._params.origin('output_dir')}): cannot write to"
                f" {error.filename or place.directory}: {error.strerror}"
            ) from error
        self.record = record
        return place.directory, len(record.parts or [record])

    def _write_parameters(self, place: RunPlace, record: RunRecord) -> None:
        try:
            write_atomically(place.directory / "final_params.txt", self._params.to_text())
            if place.continued:
                continue_record(place.record_path, record)
        except OSError:
            if not place.continued:
                place.record_path.unlink()
            release(place.record_path)
            raise

    def close(self) -> None:
        """Releases what is locked."""
        if self._place:
            self._place.release()
