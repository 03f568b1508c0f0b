"""What runs lose that have more threads than cores, beyond taking turns.

Ranks that take turns find the caches full of another rank's data, and wait in every step for ranks
whose turn has not come. No law tells how much that is. It is known where such runs were measured:
the model is fitted to the other runs, and the loss is what it predicts too little for them.
Elsewhere it is assumed to be anything from 0 to MOST_LOST.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from candle_p1.modelling.observation import Observation

    Array = NDArray[np.float64]

MOST_LOST = 0.3
"""The largest loss that is assumed, relative to the time of taking turns. It is a choice: on a
virtual machine with two cores, most losses on four and eight ranks were between 0 and 0.3."""


@dataclass(frozen=True)
class TurnLoss:
    """The loss of runs with more threads than cores, relative to the time of taking turns.

    Attributes:
        num_runs: The runs from which it is known; 0: it is assumed, or a part of the laws.
        samples: Shape (samples,); the first one is what stands for all.
    """

    num_runs: int
    samples: Array = field(repr=False)


def separate(
    observations: Sequence[Observation],
) -> tuple[Sequence[Observation], Sequence[Observation]]:
    """Returns the runs that laws are fitted to, and those that tell only what crowding costs.

    The latter are the runs with more threads than cores, as long as the others are on at least two
    numbers of ranks; else there are none.
    """
    alone = [each for each in observations if not each.shape.is_crowded]
    if len({each.shape.num_ranks for each in alone}) < 2:
        return observations, []
    return alone, [each for each in observations if each.shape.is_crowded]


def turn_loss(
    observations: Sequence[Observation],
    ratios: Array,
    num_samples: int,
    random: np.random.Generator,
) -> TurnLoss:
    """Returns the loss that a model has.

    If it is measured, it is a geometric mean, so that no sample of it makes a time negative. Its
    deviation is that of the runs, among which what is assumed counts like one of them, so that few
    runs do not make it certain.

    Args:
        observations: The runs that the laws are fitted to. If some of these have more threads than
            cores, the loss is a part of the laws, and is 0.
        ratios: The times of further runs with more threads than cores, divided by those of taking
            turns, shape (runs,). If there are none, the loss is assumed: any from 0 to MOST_LOST
            is as probable as another.
        num_samples: How many samples to return.
        random: For the samples.
    """
    if any(each.shape.is_crowded for each in observations):
        samples = np.zeros(num_samples)
    elif not len(ratios):
        samples = MOST_LOST * random.random(num_samples)
        samples[0] = MOST_LOST / 2
    else:
        logs = np.log(ratios)
        mean = float(np.mean(logs))
        assumed = np.log1p(MOST_LOST) / np.sqrt(12)  # as of a uniform distribution
        deviation = np.sqrt(np.mean(np.square([assumed, *(logs - mean)])))
        samples = np.expm1(mean + deviation * random.standard_normal(num_samples))
        samples[0] = np.expm1(mean)
    return TurnLoss(len(ratios), samples)
