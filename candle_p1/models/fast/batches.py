"""Batches for ``fit``, in the form that suits the backend."""

from __future__ import annotations

from typing import Any

import keras

PREFETCHED = 2
"""Batches that are made ahead of the step which takes them."""


def for_fit(feed: keras.utils.PyDataset) -> Any:
    """Returns what ``model.fit`` takes for the batches of a feed.

    With TensorFlow this is a ``tf.data.Dataset``. Keras makes one of a feed too, but one that is
    tuned while it runs, by a thread that sleeps twice as long each time. The end of an epoch at
    times waits for it: up to as long as the epoch took.

    Args:
        feed: Of a known length; its batches have arrays of one structure, of the same dtypes and,
            but for the first dimension, of the same shapes.
    """
    if keras.backend.backend() != "tensorflow":
        return feed
    import tensorflow as tf

    def batches() -> Any:
        for step in range(len(feed)):
            yield feed[step]

    def describe(array: Any) -> Any:
        return tf.TensorSpec((None, *array.shape[1:]), array.dtype)

    options = tf.data.Options()
    options.autotune.enabled = False
    dataset = tf.data.Dataset.from_generator(
        batches, output_signature=tf.nest.map_structure(describe, feed[0])
    )
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(len(feed)))
    return dataset.prefetch(PREFETCHED).with_options(options)
