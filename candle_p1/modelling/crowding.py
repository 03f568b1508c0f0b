"""What runs with more threads than cores lose, beyond taking turns.

Ranks that take turns find the caches full of another rank's data, and in every step they wait until
the last rank has had its turn. No law tells how much that is, so it is known only where such runs
were measured: the model is fitted to the other runs, and the loss is what it predicts too little
for them. Elsewhere it is assumed: a share of the time from 0 to MOST_LOST, and a wait in each step
within ASSUMED_WAIT_S.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from candle_p1.modelling.phases import EXPOSED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from candle_p1.modelling.observation import Observation
    from candle_p1.modelling.shape import JobShape

    Array = NDArray[np.float64]

MOST_LOST = 0.3
"""The largest share that is assumed, relative to the time of turns and waits. It is a choice, made
with runs on a virtual machine with two cores; see docs/modelling.md."""

ASSUMED_WAIT_S = (0.002, 0.006)
"""How long a rank waits in each step for each other thread of its core, as is assumed: at least and
at most. It is a choice, too: some ms are what schedulers let a thread compute before another one
has its turn."""

POSSIBLE_WAITS_S = (0.0002, 0.03)
"""Between which waits it is looked for where such runs were measured."""


@dataclass(frozen=True)
class TurnLoss:
    """The loss of runs with more threads than cores.

    Attributes:
        num_runs: The runs from which it is known; 0: it is assumed, or a part of the laws.
        num_waiting: How many of these have several ranks, which wait for each other.
        shares: The share that is lost, relative to the time of taking turns and waiting, shape
            (samples,); the first one is what stands for all.
        waits_s: The wait of a step for each other thread of a core, in s, likewise.
    """

    num_runs: int
    num_waiting: int
    shares: Array = field(repr=False)
    waits_s: Array = field(repr=False)

    def turn_waits_s(self, shape: JobShape) -> Array:
        """Returns how long a rank waits in all steps, with the share, in s, shape (samples,)."""
        return (1 + self.shares) * self.waits_s * _num_waits(shape)

    def add_to(self, phases_s: Mapping[str, Array], shape: JobShape) -> dict[str, Array]:
        """Returns the times of phases with the loss; waiting is exposed communication.

        Args:
            phases_s: The times of taking turns, in s, shape (samples,) each.
            shape: The shape of the run.
        """
        if not shape.is_crowded:
            return dict(phases_s)
        times = {phase: (1 + self.shares) * each for phase, each in phases_s.items()}
        waits_s = self.turn_waits_s(shape)
        if waits_s.any():
            times[EXPOSED] = times.get(EXPOSED, 0.0) + waits_s
        return times


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
    crowded: Sequence[Observation],
    turns_s: Sequence[float],
    num_samples: int,
    random: np.random.Generator,
) -> TurnLoss:
    """Returns the loss that a model has.

    Where it is measured, waits are drawn from POSSIBLE_WAITS_S, uniform in their logarithms, and
    resampled by their likelihood: that of normal deviations of unknown size, where the middle of
    what is assumed counts like one of the runs. For each wait, the share is a geometric mean over
    runs, so that no sample of it makes a time negative. Its deviation is that of the runs and of
    what is assumed, so that few runs do not make it certain.

    Args:
        observations: The runs that the laws are fitted to. If some of these have more threads than
            cores, the loss is a part of the laws, and is 0.
        crowded: Further runs with more threads than cores.
        turns_s: What the laws predict for each of them, which is the time of taking turns, in s.
        num_samples: How many samples to return.
        random: For the samples.
    """
    if any(each.shape.is_crowded for each in observations):
        return TurnLoss(0, 0, np.zeros(num_samples), np.zeros(num_samples))
    if not crowded:
        shares = _uniform(0.0, MOST_LOST, num_samples, random)
        return TurnLoss(0, 0, shares, _uniform(*ASSUMED_WAIT_S, num_samples, random))
    least_s, most_s = POSSIBLE_WAITS_S
    waits_s = np.exp(_uniform(np.log(least_s), np.log(most_s), num_samples, random))
    totals_s = np.array([each.total_s for each in crowded])
    num_waits = np.array([_num_waits(each.shape) for each in crowded])
    logs = np.log(totals_s / (np.array(turns_s) + waits_s[:, None] * num_waits))
    means = logs.mean(axis=1)
    # The middle and the deviation of what is assumed, if it were uniform in its logarithms.
    middle, deviation = np.log1p(MOST_LOST) / 2, np.log1p(MOST_LOST) / np.sqrt(12)
    squares = deviation**2 + np.square(logs - means[:, None]).sum(axis=1)
    unlikely = squares + np.square(means - middle)
    likelihoods = (unlikely / unlikely.min()) ** (-(len(crowded) + 1) / 2)
    kept = random.choice(num_samples, num_samples, p=likelihoods / likelihoods.sum())
    kept[0] = kept[np.argsort(waits_s[kept])[num_samples // 2]]  # the median stands for all
    deviations = np.sqrt(squares[kept] / len(crowded)) * random.standard_normal(num_samples)
    deviations[0] = 0.0
    shares = np.expm1(means[kept] + deviations)
    return TurnLoss(len(crowded), np.count_nonzero(num_waits), shares, waits_s[kept])


def _num_waits(shape: JobShape) -> float:
    """Returns how often a rank waits while another thread of its core computes."""
    return shape.steps * (shape.crowding - 1) if shape.num_ranks > 1 else 0.0


def _uniform(low: float, high: float, num: int, random: np.random.Generator) -> Array:
    """Returns samples between two ends, of which the first one is in the middle."""
    samples = low + (high - low) * random.random(num)
    samples[0] = (low + high) / 2
    return samples
