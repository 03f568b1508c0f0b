"""The files to which a run saves its model: before training, after the best epochs and at the end.

Rank 0 writes them. A file that cannot be written, for lack of space or of permission, causes a
warning on the screen and in the record, but does not end the run; what an earlier epoch or run has
written there stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

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

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from candle_p1.benchmark import Benchmark
    from candle_p1.parameters.parameter_set import ParameterSet
    from candle_p1.training.lifecycle import Run

BEST_METRIC = "val_loss"
"""As in CANDLE, whose ModelCheckpoint has Keras's default."""


class ModelFiles:
    """The files of a run's model.

    Args:
        benchmark: Says which there are besides that of ``--save_model``.
        params: The parameters of the run.
        directory: Where they go.
        this: The run.

    Attributes:
        warnings: What could not be saved, on rank 0.
    """

    def __init__(
        self, benchmark: Benchmark, params: ParameterSet, directory: Path, this: Run
    ) -> None:
        final = [ModelFile(FINAL_NAME)] if params["save_model"] else []
        self._files = [*benchmark.model_files(params), *final]
        self.warnings: list[str] = []
        self._directory, self._comm, self._screen = directory, this.comm, this.screen

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

    def callbacks(self) -> list[Any]:
        """Returns the callback that saves before training and after the best epochs, on rank 0.

        It must come after those that write metrics into the logs.
        """
        begin, best = (self._at(when) for when in ("begin", "best"))
        return [SaveModel(self, begin, best)] if self._comm.rank == 0 and begin + best else []

    @property
    def are_final(self) -> bool:
        """Whether `save_final` saves anything."""
        return bool(self._at("end"))

    def save_final(self, model: Any) -> None:
        """Saves what is to be saved after training, on rank 0; the others wait. Collective."""
        if self._comm.rank == 0:
            for file in self._at("end"):
                if self.save(file, model):
                    self._screen.say(self._explain(file, model))
        self._comm.barrier()

    def save(self, file: ModelFile, model: Any) -> bool:
        """Saves a file on this rank; returns whether that succeeded, and otherwise warns."""
        path = self.path(file)
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

    def path(self, file: ModelFile) -> Path:
        """Returns where a file is."""
        return self._directory / file.name

    def _at(self, when: str) -> list[ModelFile]:
        return [file for file in self._files if file.when == when]

    def _explain(self, file: ModelFile, model: Any) -> str:
        """Returns where a file is, and what Keras needs to load it."""
        classes = foreign_classes(describe(file.of(model)))
        if not classes:
            return f"saved {self.path(file)}"
        modules = sorted({each.rpartition(".")[0] for each in classes})
        names = ", ".join(each.rpartition(".")[2] for each in classes)
        return (
            f"saved {self.path(file)}; it contains {names}, which Keras does not have: to load it,"
            f" import {', '.join(modules)} first"
        )


class SaveModel(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves a model before training, and after every epoch with the lowest validation loss so far.

    Args:
        files: Saves files.
        begin: The files to save before training.
        best: The files to save after the best epochs.
    """

    def __init__(self, files: ModelFiles, begin: list[ModelFile], best: list[ModelFile]) -> None:
        super().__init__()
        self._files, self._at_begin, self._at_best = files, begin, best
        self._best = Best(BEST_METRIC)

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Saves the model as it is before training."""
        self._save(self._at_begin)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Saves the model if the epoch is the best so far."""
        if self._at_best and self._best.improves(logs or {}):
            self._save(self._at_best)

    def checkpoint_state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of it, for JSON: the lowest validation loss so far."""
        return self._best.checkpoint_state()

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `checkpoint_state` returned, if the best epoch's files are there."""
        if all(self._files.path(file).exists() for file in self._at_best):
            self._best.restore_state(state)

    def _save(self, files: list[ModelFile]) -> None:
        for file in files:
            self._files.save(file, self.model)
