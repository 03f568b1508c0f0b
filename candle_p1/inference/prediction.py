"""Predictions for new samples, block by block, and their table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from candle_p1.data.samples import join_batches
from candle_p1.inference.tables import Block, NewSamples
from candle_p1.inference.trained import TrainedRun


def predict(
    trained: TrainedRun, samples: NewSamples, batch_size: int | None = None
) -> Iterator[tuple[Block, Any]]:
    """Yields the blocks of some samples, with what the model returns for each.

    Args:
        trained: The run whose network is applied.
        samples: The samples.
        batch_size: How many are computed at a time; None: as in training.
    """
    import keras

    size = batch_size or trained.params["batch_size"]
    for block in samples.blocks():
        outputs = []
        for start in range(0, len(block.ids), size):
            rows = slice(start, start + size)
            batch = keras.tree.map_structure(lambda each, rows=rows: each[rows], block.x)
            outputs.append(trained.model.predict_on_batch(batch))
        yield block, join_batches(outputs)
