"""The files to which a run saves its model: before training, after the best epochs and at the end.

Beside a trained model or checkpoints, ``inputs.json`` says how the model's inputs were prepared,
and ``model.json`` has its layers, where only checkpoints have the weights. Rank 0 writes the files.
A file that cannot be written, for lack of space or of permission, causes a warning on the screen
and in the record, but does not end the run; what an earlier epoch or run has written there stays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from candle_p1.benchmark import Benchmark
from candle_p1.checkpoints.policy import Best, are_saved
from candle_p1.data.inputs import INPUTS_NAME, Inputs
from candle_p1.data.samples import DataSet, Several
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.errors import ParameterError
from candle_p1.files import content_sha256, write_atomically
from candle_p1.models.evaluation import mean_target
from candle_p1.models.saving import (
    FINAL_NAME,
    LAYERS_NAME,
    ModelFile,
    SavingError,
    describe,
    foreign_classes,
    save,
    with_inputs,
)
from candle_p1.parameters.parameter_set import ParameterSet
from candle_p1.records.environment import package_versions
from candle_p1.training.lifecycle import Run
from candle_p1.training.measured import num_samples

BEST_METRIC = "val_loss"
"""As in CANDLE, whose ModelCheckpoint has Keras's default."""
LAYERS = ModelFile(LAYERS_NAME, "begin")
SPLIT = (
    *("val_split", "shuffle", "rng_seed", "train_samples", "val_samples"),
    *("folds", "fold", "group_data", "val_data"),
)
"""The parameters that decide which samples are for what, as far as a benchmark has them."""


class ModelFiles:
    """The files of a run's model, in a directory; the benchmark says which there are."""

    def __init__(
        self, benchmark: Benchmark, params: ParameterSet, directory: Path, run: Run
    ) -> None:
        final = [ModelFile(FINAL_NAME)] if params["save_model"] else []
        self._files = [*benchmark.model_files(params), *final]
        self._keeps_weights = bool(params["save_model"]) or are_saved(params)
        self._inputs: Inputs | None = None
        self._params = params
        self._best = Best(BEST_METRIC)
        self.warnings: list[str] = []  # of what could not be saved, on rank 0
        self.final_sha256: str | None = None  # of the trained model's file, if saved, on rank 0
        self._directory, self._comm, self._screen = directory, run.comm, run.screen

    def check(self, model: Any, data: DataSet) -> None:
        """Raises ParameterError, before training, if Keras cannot describe what is to be saved."""
        if data.preparation and self._keeps_weights:
            split = {name: self._params[name] for name in SPLIT if name in self._params}
            known = {"split": num_samples(data) | split, "versions": package_versions()}
            mean = None
            if not self._comm.rank and not isinstance(data.train.y, Several):
                mean = mean_target(data.train, self._params["batch_size"], SerialCommunicator())
            self._inputs = data.preparation.model_copy(update=known | {"mean_target": mean})
            if self._params["save_model"] == "inference":
                self._files.remove(ModelFile(FINAL_NAME))
                part = partial(with_inputs, inputs=self._inputs)
                self._files.append(ModelFile(FINAL_NAME, part=part))
            if are_saved(self._params) and LAYERS.name not in {each.name for each in self._files}:
                self._files.insert(0, LAYERS)
        if self._params["save_model"] == "inference" and self._inputs is None:
            raise ParameterError(
                "save_model inference: the benchmark does not describe how it scales inputs"
                " (DataSet.preparation): use --save_model True"
            )
        for file in [*self._files]:
            try:
                describe(file.of(model))
            except SavingError as error:
                if file is LAYERS:
                    self._files.remove(file)
                    self._screen.warn(f"the checkpoints cannot be used for predictions: {error}")
                    continue
                asked_by = "--save_model" if file.name == FINAL_NAME else "model_files"
                raise ParameterError(
                    f"{file.name}, which {asked_by} requests: {error}. Give its classes get_config"
                    " (see Keras's guide to saving), or do not save it"
                ) from error

    def describe_inputs(self, data: DataSet) -> dict[str, Any] | None:
        """Returns what the record says of the model's inputs, and of their file if there is one."""
        if self._inputs is None:
            return data.preparation.describe() if data.preparation else None
        return self._inputs.describe() | {
            "path": str((self._directory / INPUTS_NAME).absolute()),
            "sha256": hashlib.sha256(self._inputs.text().encode()).hexdigest(),
        }

    def save_initial(self, model: Any) -> None:
        """Saves what is to be saved before training, on rank 0."""
        self._save_inputs()
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
        if self._save_inputs():
            path = self._directory / INPUTS_NAME
            self._screen.say(f"saved {path}: names and scaling of the model's inputs")
        for file in self._save_all("end", model):
            if file.name == FINAL_NAME:
                self.final_sha256 = content_sha256(self._path(file))
            self._screen.say(self._explain(file, model))
        self._comm.barrier()

    def _save_inputs(self) -> bool:
        """Writes, on rank 0, how the inputs were prepared; returns whether it has."""
        if self._inputs is None or self._comm.rank:
            return False
        path, text = self._directory / INPUTS_NAME, self._inputs.text()
        return self._written(path, lambda: write_atomically(path, text))

    def _save_all(self, when: str, model: Any) -> list[ModelFile]:
        """Saves, on rank 0, and returns the files that could be saved."""

        def write(file: ModelFile) -> None:
            save(file.of(model), self._path(file))

        files = self._at(when) if self._comm.rank == 0 else []
        return [file for file in files if self._written(self._path(file), partial(write, file))]

    def _written(self, path: Path, write: Callable[[], None]) -> bool:
        """Returns whether a file could be written; warns if not."""
        try:
            write()
        except (OSError, SavingError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            warning = f"{path} was not saved: {reason}"
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
