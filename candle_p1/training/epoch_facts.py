"""What the record says about the epochs of all parts of a run, gathered once each.

Rank 0 receives a summary of each rank's steps, not their times, of which there may be many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.instrument.epochs import Epoch, summarize_epoch
from candle_p1.records.record import finite
from candle_p1.records.types import EpochFacts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from candle_p1.distributed.callbacks import SharedValidation
    from candle_p1.distributed.comm import Communicator
    from candle_p1.training.callbacks import EpochTimer

EPOCH = "epoch/so_far"
"""The name of the array that holds what was measured of an epoch that is not complete."""


class GatheredEpochs:
    """The epochs so far. Every rank must call its methods.

    Args:
        comm: The ranks.
        timer: Has the epochs of this part of the run.
        validation: Has the times of their validations.
        history: The ``keras.callbacks.History``, with the metrics of all epochs.
        num_samples: The samples that all ranks together train in an epoch.
        part: The number of this part of the run, from 1.
        saved: What `to_facts` returned in an earlier part; None: there is none.

    Attributes:
        facts: The epochs, in order; complete on rank 0 only.
    """

    def __init__(
        self,
        comm: Communicator,
        timer: EpochTimer,
        validation: SharedValidation,
        history: Any,
        num_samples: int,
        part: int = 1,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        self._comm, self._timer, self._validation = comm, timer, validation
        self._history, self._num_samples, self._part = history, num_samples, part
        self._num_gathered = 0
        saved = saved or {"epochs": [], "num_samples": 0}
        self._earlier_samples: int = saved["num_samples"]
        self.facts = [EpochFacts.model_validate(epoch) for epoch in saved["epochs"]]
        self._num_earlier = len(self.facts)
        self._own: list[EpochFacts] = []

    def gather(self) -> None:
        """Gathers the epochs that have ended since the last call; collective."""
        first, self._num_gathered = self._num_gathered, len(self._timer.epochs)
        if first == self._num_gathered:  # on all ranks
            return
        mine = [
            epoch.summarize(validation_s)
            for epoch, validation_s in zip(
                self._timer.epochs[first:], self._validation.seconds[first:], strict=True
            )
        ]
        gathered = self._comm.gather(np.array(mine))
        if gathered is None:
            return
        for of_ranks in np.stack(gathered, axis=1):
            self.facts.append(self._summarize(len(self.facts), of_ranks))

    def so_far(self) -> list[EpochFacts]:
        """Returns the epochs so far, those that are not gathered yet with this rank's times."""
        for i in range(len(self._own), len(self._timer.epochs)):
            mine = self._timer.epochs[i].summarize(self._validation.seconds[i])
            self._own.append(self._summarize(self._num_earlier + i, mine[np.newaxis]))
        return [*self.facts, *self._own[self._num_gathered :]]

    def _summarize(self, number: int, of_ranks: NDArray[np.float64]) -> EpochFacts:
        metrics = self._history.history.items()
        return summarize_epoch(
            number + 1,
            of_ranks,
            {name: finite(values[number]) for name, values in metrics},
            part=self._part if self._part > 1 else None,
        )

    def to_facts(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps, as JSON; collective, and complete on rank 0 only."""
        self.gather()
        return {
            "epochs": [
                epoch.model_copy(update={"part": epoch.part or self._part}).model_dump(mode="json")
                for epoch in self.facts
            ],
            "num_samples": self.num_samples,
        }

    @property
    def num_samples(self) -> int:
        """The samples that all ranks have trained in the complete epochs of all parts."""
        return self._earlier_samples + self._num_gathered * self._num_samples

    @property
    def samples_per_s(self) -> float | None:
        """The throughput of all ranks together; None if there is no epoch; for rank 0."""
        slowest_s = sum(epoch.train.max_s for epoch in self.facts)
        return self.num_samples / slowest_s if slowest_s else None


def epoch_arrays(epoch: Epoch) -> dict[str, NDArray[Any]]:
    """Returns what was measured of an epoch that is not complete, as arrays by name.

    The times of its steps are not among it: a rank may have trained thousands, and rank 0 gathers
    the arrays of all ranks.
    """
    measured = (
        epoch.begin_s,
        epoch.seconds,
        epoch.exposed_s,
        epoch.allreduce_s,
        float(epoch.num_steps),
    )
    return {EPOCH: np.array([np.nan if each is None else each for each in measured])}


def epoch_from(arrays: Mapping[str, NDArray[Any]]) -> Epoch:
    """Returns the epoch that `epoch_arrays` was given, without the times of its steps."""
    begin_s, seconds, exposed_s, allreduce_s, num_steps = arrays[EPOCH].tolist()
    return Epoch(
        begin_s,
        seconds,
        [],
        None if np.isnan(exposed_s) else exposed_s,
        None if np.isnan(allreduce_s) else allreduce_s,
        num_earlier=int(num_steps),
    )
