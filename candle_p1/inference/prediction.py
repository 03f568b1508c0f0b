"""Predictions for new samples, block by block, and their table."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from candle_p1.data.samples import join_batches
from candle_p1.errors import DataError
from candle_p1.inference.tables import Block, NewSamples
from candle_p1.inference.trained import TrainedRun


def predict(
    trained: TrainedRun,
    samples: NewSamples,
    batch_size: int | None = None,
    by: Callable[[Any], Any] | None = None,
) -> Iterator[tuple[Block, Any]]:
    """Yields the blocks of some samples, with what the model returns for each.

    Args:
        trained: The run whose network is applied.
        samples: The samples.
        batch_size: How many are computed at a time; None: as in training.
        by: What to apply instead of the model.

    Raises:
        DataError: The table cannot be read.
    """
    import keras

    size, apply = batch_size or trained.params["batch_size"], by or trained.model.predict_on_batch
    for block in samples.blocks():
        outputs = []
        for start in range(0, len(block), size):
            rows = slice(start, start + size)
            batch = keras.tree.map_structure(lambda each, rows=rows: each[rows], block.x)
            outputs.append(keras.tree.map_structure(np.asarray, apply(batch)))
        yield block, join_batches(outputs)


def write_predictions(
    trained: TrainedRun, samples: NewSamples, path: Path, batch_size: int | None = None
) -> int:
    """Writes the table of predictions, complete or not at all; returns the number of samples.

    It has what tells the samples apart, then the columns of `Benchmark.predictor`, numbers with as
    many digits as float32 needs.

    Raises:
        DataError: The samples cannot be read.
        OSError: The file cannot be written.
    """
    predictor = trained.benchmark.predictor(trained.model, trained.params, trained.inputs)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    num_samples = 0
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            for block, columns in predict(trained, samples, batch_size, by=predictor):
                if not num_samples:
                    table.writerow([*block.columns, *columns])
                cells = [*block.columns.values(), *map(_cells, columns.values())]
                table.writerows(zip(*cells, strict=True))
                num_samples += len(block)
            file.flush()
            os.fsync(file.fileno())
        if not num_samples:
            raise DataError("the table has no samples", samples.path)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return num_samples


def _cells(values: np.ndarray[Any, Any]) -> list[str]:
    if values.dtype.kind == "f":
        return [np.format_float_positional(x, trim="-") for x in values]
    return [*map(str, values)]
