"""The files to which a run saves its model: before training, after the best epochs and at the end.

Rank 0 writes them. A file that cannot be written, for lack of space or of permission, causes a
warning on the screen and in the record, but does not end the run; what an earlier epoch or run has
written there stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from candle_p1.benchmark import Benchmark
from candle_p1.checkpoints.best import Best
from candle_p1.errors import ParameterError
from candle_p1.models.saving import (
    FINAL_NAME,
    ModelFile,
    SavingError,
    describe,
    foreign_classes,
    save,
)
from candle_p1.parameters.parameter_set import ParameterSet
from candle_p1.training.lifecycle import Run

BEST_METRIC = "val_loss"
"""As in CANDLE, whose ModelCheckpoint has Keras's default."""


class ModelFiles:
    """The files of a run's model, in a directory; the benchmark says which there are.

    Attributes:
        warnings: What could not be saved, on rank 0.
    """

    def __init__(
        self, benchmark: Benchmark, params: ParameterSet, directory: Path, run: Run
    ) -> None:
        final = [ModelFile(FINAL_NAME)] if params["save_model"] else []
        self._files = [*benchmark.model_files(params), *final]
        self._best = Best(BEST_METRIC)
        self.warnings: list[str] = []
        self._directory, self._comm, self._screen = directory, run.comm, run.screen

    def check(self, model: Any) -> None:
        """Checks, before training, that Keras can describe what is to be saved.

        Raises:
            ParameterError: It cannot.
        """
        for file in self._files:
            try:
                describe(file.of(model))
            except SavingError as error:
                asked_by = "--save_model" if file.name == FINAL_NAME else "model_files"
                raise ParameterError(
                    f"{file.name}, which {asked_by} requests: {error}. Give its classes get_config"
                    " (see Keras's guide to saving), or do not save it"
                ) from error

    def save_initial(self, model: Any) -> None:
        """Saves what is to be saved before training, on rank 0."""
        self._save_all("begin", model)

    def save_best(self, model: Any, logs: Mapping[str, float]) -> None:
        """Saves, on rank 0, what is to be saved after an epoch with the lowest loss so far."""
        if self._at("best") and self._best.improves(logs):
            self._save_all("best", model)

    def checkpoint_state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps, for JSON: the lowest validation loss so far."""
        return self._best.checkpoint_state()

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Goes on, on rank 0, from that state, if the best epoch's files are there."""
        if self._comm.rank == 0 and all(self._path(file).exists() for file in self._at("best")):
            self._best.restore_state(state)

    @property
    def are_final(self) -> bool:
        """Whether `save_final` saves anything."""
        return bool(self._at("end"))

    def save_final(self, model: Any) -> None:
        """Saves what is to be saved after training, on rank 0; the others wait. Collective."""
        for file in self._save_all("end", model):
            self._screen.say(self._explain(file, model))
        self._comm.barrier()

    def _save_all(self, when: str, model: Any) -> list[ModelFile]:
        """Saves, on rank 0, and returns the files that could be saved."""
        files = self._at(when) if self._comm.rank == 0 else []
        return [file for file in files if self._save(file, model)]

    def _save(self, file: ModelFile, model: Any) -> bool:
        path = self._path(file)
        try:
            save(file.of(model), path)
        except (OSError, SavingError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            warning = f"{path}: the model was not saved: {reason}"
            if warning not in self.warnings:
                self.warnings.append(warning)
                self._screen.warn(warning)
            return False
        return True

    def _path(self, file: ModelFile) -> Path:
        return self._directory / file.name

    def _at(self, when: str) -> list[ModelFile]:
        return [file for file in self._files if file.when == when]

    def _explain(self, file: ModelFile, model: Any) -> str:
        """Returns where a file is, and what Keras needs to load it."""
        classes = foreign_classes(describe(file.of(model)))
        if not classes:
            return f"saved {self._path(file)}"
        modules = sorted({each.rpartition(".")[0] for each in classes})
        names = ", ".join(each.rpartition(".")[2] for each in classes)
        return (
            f"saved {self._path(file)}; it contains {names}, which Keras does not have: to load it,"
            f" import {', '.join(modules)} first"
        )
