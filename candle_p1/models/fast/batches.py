"""Batches for ``fit``, in the form that suits the backend."""

from __future__ import annotations

from typing import Any

import keras

from candle_p1.data.samples import join_batches

NUM_PREFETCHED = 2
"""The number of batches made ahead of the step that uses them."""
GROUP_BYTES = 1 << 20
"""As many small batches as have this size are made at once: a call of Python for each of them would
take a noticeable part of a step that takes some milliseconds."""


def for_fit(batches: keras.utils.PyDataset) -> Any:
    """Returns what ``model.fit`` takes for these batches.

    With TensorFlow this is a ``tf.data.Dataset``. Keras would make one, too, but one that tunes
    itself in a background thread, which sleeps twice as long each time. The end of an epoch
    sometimes waits for that thread, for up to as long as the epoch took.

    Args:
        batches: The batches, of known length: arrays, or tuples, lists or dictionaries of arrays.
            All have the same structure, dtypes and shapes; the last may have fewer samples.
    """
    if keras.backend.backend() != "tensorflow":
        return batches
    import tensorflow as tf

    first = _without_lists(batches[0])
    arrays = tf.nest.flatten(first)
    size = max(1, GROUP_BYTES // max(1, sum(array.nbytes for array in arrays)))

    def generate() -> Any:
        for start in range(0, len(batches), size):
            group = range(start, min(start + size, len(batches)))
            made = [_without_lists(batches[step]) for step in group]
            yield join_batches(made) if len(made) > 1 else made[0]

    def describe(array: Any) -> Any:
        return tf.TensorSpec((None, *array.shape[1:]), array.dtype)

    options = tf.data.Options()
    options.autotune.enabled = False
    dataset = tf.data.Dataset.from_generator(
        generate, output_signature=tf.nest.map_structure(describe, first)
    )
    if size > 1:
        dataset = dataset.rebatch(len(arrays[0]))
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(len(batches)))
    return dataset.prefetch(NUM_PREFETCHED).with_options(options)


def _without_lists(batch: Any) -> Any:
    """Returns a batch with tuples instead of lists, which tf.data takes for arrays."""
    if isinstance(batch, list | tuple):
        return tuple(_without_lists(part) for part in batch)
    if isinstance(batch, dict):
        return {name: _without_lists(part) for name, part in batch.items()}
    return batch
