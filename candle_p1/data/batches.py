"""Batches for Keras, taken from samples in memory, and the order of samples on each rank."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from candle_p1.data.samples import Samples, random_stream
from candle_p1.distributed.comm import Communicator
from candle_p1.scaling import ScalingPlan, share_bounds


def epoch_order(
    plan: ScalingPlan, num_samples: int, *, seed: int, epoch: int, rank: int, shuffle: bool = True
) -> NDArray[np.int64]:
    """Returns the samples of one epoch on one rank, in order: int64, shape (samples_per_epoch,).

    At the epoch level each rank takes all samples, in its own order; at the batch-step level it
    takes its own contiguous shard, and shards are disjoint. The order depends only on (seed, epoch,
    rank). Where an epoch does not take all samples, the next one omits others; without `shuffle` it
    continues where the last one stopped, as CANDLE's generators do.
    """
    if plan.data_parallel == "epoch":
        samples = np.arange(num_samples)
    else:
        samples = np.arange(*share_bounds(num_samples, rank, plan.num_ranks))
    if shuffle:
        random_stream(seed, epoch, rank).shuffle(samples)
        return samples[: plan.samples_per_epoch]
    first = epoch * plan.samples_per_epoch
    return samples.take(np.arange(first, first + plan.samples_per_epoch), mode="wrap")


class TrainBatches(keras.utils.PyDataset):  # type: ignore[misc]
    """The training batches of one rank, epoch after epoch.

    The plan gives batch size, steps and level of data parallelism. Without `shuffle`, samples keep
    the order of the file.

    Attributes:
        samples: The samples.
        batch_size: The size of a batch; the last one of an epoch may be smaller.
        order_of: Returns the order of an ``epoch``, as `epoch_order` does.
    """

    def __init__(
        self, samples: Samples, plan: ScalingPlan, *, seed: int, rank: int, shuffle: bool
    ) -> None:
        super().__init__()
        self.samples, self.batch_size = samples, plan.batch_size
        self._plan, self._first_step = plan, 0
        self.order_of = partial(
            epoch_order, plan, len(samples), seed=seed, rank=rank, shuffle=shuffle
        )
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of an epoch, counted from 0; must be called before the epoch begins."""
        self._order = self.order_of(epoch=epoch)

    def epoch_batches(self, epoch: int, first_step: int = 0) -> TrainBatches:
        """Returns the batches of an epoch from a step on, counted from 0; these ones remain."""
        batches = copy.copy(self)
        batches.set_epoch(epoch)
        batches._first_step = first_step
        return batches

    def __len__(self) -> int:
        return self._plan.steps_per_epoch - self._first_step

    def __getitem__(self, item: int) -> tuple[Any, Any]:
        step, size = self._first_step + item, self.batch_size
        return self.samples[self._order[step * size : (step + 1) * size]]


class EvaluationBatches(keras.utils.PyDataset):  # type: ignore[misc]
    """One rank's share of the samples, once and in order.

    `max_steps` limits the number of steps, of all ranks together; 0 means no limit.

    Attributes:
        samples: All samples.
        batch_size: The size of a batch; the last one may be smaller.
        bounds: The first sample of the share, and the one after its last.
    """

    def __init__(
        self, samples: Samples, batch_size: int, comm: Communicator, max_steps: int = 0
    ) -> None:
        super().__init__()
        num_samples = min(len(samples), max_steps * batch_size) if max_steps else len(samples)
        self.bounds = share_bounds(num_samples, comm.rank, comm.size)
        self.samples, self.batch_size = samples, batch_size

    def __len__(self) -> int:
        start, stop = self.bounds
        return -(-(stop - start) // self.batch_size)

    def __getitem__(self, step: int) -> tuple[Any, Any]:
        start, stop = self.bounds
        first = start + step * self.batch_size
        return self.samples[first : min(first + self.batch_size, stop)]
