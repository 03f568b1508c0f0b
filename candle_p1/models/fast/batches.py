"""Batches for ``fit``, in the form that suits the backend."""

from __future__ import annotations

from typing import Any

import keras

NUM_PREFETCHED = 2
"""The number of batches made ahead of the step that uses them."""


def for_fit(batches: keras.utils.PyDataset) -> Any:
    """Returns what ``model.fit`` takes for these batches.

    With TensorFlow this is a ``tf.data.Dataset``. Keras would make one, too, but one that tunes
    itself in a background thread, which sleeps twice as long each time. The end of an epoch
    sometimes waits for that thread, for up to as long as the epoch took.

    Args:
        batches: The batches, of known length: arrays, or tuples, lists or dictionaries of arrays.
            All have the same structure, dtypes and, except for the first dimension, shapes.
    """
    if keras.backend.backend() != "tensorflow":
        return batches
    import tensorflow as tf

    def generate() -> Any:
        for step in range(len(batches)):
            yield _without_lists(batches[step])

    def describe(array: Any) -> Any:
        return tf.TensorSpec((None, *array.shape[1:]), array.dtype)

    options = tf.data.Options()
    options.autotune.enabled = False
    dataset = tf.data.Dataset.from_generator(
        generate, output_signature=tf.nest.map_structure(describe, _without_lists(batches[0]))
    )
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(len(batches)))
    return dataset.prefetch(NUM_PREFETCHED).with_options(options)


def _without_lists(batch: Any) -> Any:
    """Returns a batch with tuples instead of lists, which tf.data takes for arrays."""
    if isinstance(batch, list | tuple):
        return tuple(_without_lists(part) for part in batch)
    if isinstance(batch, dict):
        return {name: _without_lists(part) for name, part in batch.items()}
    return batch
