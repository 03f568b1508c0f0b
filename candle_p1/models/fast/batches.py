"""Batches for training, in the form that suits the backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from candle_p1.data.batches import TrainBatches
from candle_p1.data.samples import Samples, join_batches
from candle_p1.models.fast.sparse import SparseBatches, sparse_layer
from candle_p1.models.fast.tables import table_layer

NUM_PREFETCHED = 2
"""The number of batches made ahead of the step that uses them."""
GROUP_BYTES = 1 << 20
"""As many small batches as have this size are made at once: a call of Python for each of them would
take a noticeable part of a step that takes some milliseconds."""


def taken_by(model: Any, samples: Samples) -> Samples:
    """Returns samples in the form of which a model takes batches."""
    if layer := table_layer(model):
        return Samples(layer.taken(samples.x), samples.y)
    return Samples(SparseBatches(samples.x), samples.y) if sparse_layer(model) else samples


def stream(batches: TrainBatches, epochs: range, first_step: int = 0) -> Iterator[Any]:
    """Returns the batches of some epochs, one after the other, for Keras's training function.

    The first ones of an epoch are made while the epoch before is validated. Epochs count from 0;
    the first of them begins with `first_step`.
    """
    in_order = (
        batches.epoch_batches(epoch, first_step * (epoch == epochs.start)) for epoch in epochs
    )
    if keras.backend.backend() == "tensorflow":
        dataset: Iterator[Any] = iter(_dataset(batches[0], lambda: in_order))
        return dataset
    each = (epoch[step] for epoch in in_order for step in range(len(epoch)))
    return _on_device(each)


def _on_device(batches: Iterator[Any]) -> Iterator[Any]:
    """Yields batches that JAX copies to a device while the step before is computed."""
    import jax

    if jax.default_backend() == "cpu":
        yield from batches
        return
    ahead = jax.device_put(next(batches))
    for batch in batches:
        current, ahead = ahead, jax.device_put(batch)
        yield current
    yield ahead


def for_fit(batches: keras.utils.PyDataset) -> Any:
    """Returns what ``model.fit`` takes for these batches in each epoch.

    With TensorFlow this is a ``tf.data.Dataset``. Keras would make one, too, but one that tunes
    itself in a background thread, which sleeps twice as long each time. The end of an epoch
    sometimes waits for that thread, for up to as long as the epoch took.
    """
    if keras.backend.backend() != "tensorflow":
        return batches
    import tensorflow as tf

    dataset = _dataset(batches[0], lambda: [batches])
    return dataset.apply(tf.data.experimental.assert_cardinality(len(batches)))


def _dataset(batch: Any, epochs: Callable[[], Iterable[keras.utils.PyDataset]]) -> Any:
    """Returns a ``tf.data.Dataset`` of the batches of each epoch, one after the other.

    All have the structure, dtypes and shapes of `batch`, but the last may have fewer samples.
    """
    import tensorflow as tf

    first = _without_lists(batch)
    arrays = tf.nest.flatten(first)
    is_sparse = any(isinstance(array, tf.SparseTensor) for array in arrays)  # and so not small
    num_bytes = GROUP_BYTES if is_sparse else sum(array.nbytes for array in arrays)
    size = max(1, GROUP_BYTES // max(1, num_bytes))

    def generate() -> Any:
        for batches in epochs():
            for start in range(0, len(batches), size):
                group = range(start, min(start + size, len(batches)))
                made = [_without_lists(batches[step]) for step in group]
                yield join_batches(made) if len(made) > 1 else made[0]

    def describe(array: Any) -> Any:
        kind = tf.SparseTensorSpec if isinstance(array, tf.SparseTensor) else tf.TensorSpec
        return kind((None, *array.shape[1:]), array.dtype)

    options = tf.data.Options()
    options.autotune.enabled = False
    dataset = tf.data.Dataset.from_generator(
        generate, output_signature=tf.nest.map_structure(describe, first)
    )
    if size > 1:  # each group by itself: the last batch of an epoch may be smaller
        num = len(arrays[0])
        dataset = dataset.flat_map(
            lambda *group: tf.data.Dataset.from_tensors(
                group if isinstance(first, tuple) else group[0]
            ).rebatch(num)
        )
    return dataset.prefetch(NUM_PREFETCHED).with_options(options)


def _without_lists(batch: Any) -> Any:
    """Returns a batch with tuples instead of lists, which tf.data takes for arrays."""
    if isinstance(batch, list | tuple):
        return tuple(_without_lists(part) for part in batch)
    if isinstance(batch, dict):
        return {name: _without_lists(part) for name, part in batch.items()}
    return batch
