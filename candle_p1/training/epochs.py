"""The epochs of all segments of a run: timed, and gathered once each for the record.

Rank 0 receives a summary of each rank's steps, not their times, of which there may be many.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from candle_p1.distributed.comm import Communicator
from candle_p1.instrument.epochs import Epoch, sum_of_known, summarize_epoch
from candle_p1.records.record import finite
from candle_p1.records.types import EpochRecord
from candle_p1.training.restart import TrainingState

EPOCH = "epoch/so_far"
"""The name of the array that holds what was measured of an epoch that is not complete."""


class EpochTimer:
    """Times the training part of every epoch, and its steps, in a run that began at `start_s`.

    For the steps since the last call, `take_allreduce_times` returns how long this rank waited for
    gradient allreduces and how long any was in progress, in s; None for both if that is not
    measured. An earlier segment of the run has trained the `earlier` steps of the first epoch.
    """

    def __init__(
        self,
        start_s: float,
        take_allreduce_times: Callable[[], tuple[float | None, float | None]],
        earlier: Epoch | None = None,
    ) -> None:
        self._start_s, self._take_allreduce_times = start_s, take_allreduce_times
        self._earlier = earlier
        self._first_step: int | None = 0

    def begin_epoch(self) -> None:
        """Starts timing an epoch."""
        self._blocks: list[tuple[float, int]] = []
        self._taken: list[tuple[float | None, float | None]] = []
        self._begin = time.perf_counter()

    def begin_steps(self, num: int) -> float:
        """Notes and returns when some steps begin; each of them is taken to last as long."""
        self._blocks.append((time.perf_counter(), num))
        return self._blocks[-1][0]

    def end_epoch(self) -> Epoch:
        """Returns the epoch, whose last step must have finished."""
        epoch = self.so_far()
        self._earlier = self._first_step = None
        return epoch

    def so_far(self) -> Epoch:
        """Returns the current epoch, as far as its steps have ended."""
        now = time.perf_counter()
        self._taken.append(self._take_allreduce_times())  # those since the last call
        exposed_s, allreduce_s = map(sum_of_known, zip(*self._taken, strict=True))
        steps_s: list[float] = []
        for (begin, num), (end, _) in pairwise([*self._blocks, (now, 0)]):
            steps_s += num * [(end - begin) / num]
        begin_s, train_s = self._begin - self._start_s, now - self._begin
        epoch = Epoch(begin_s, train_s, steps_s, exposed_s, allreduce_s, self._first_step)
        return epoch if self._earlier is None else epoch.after(self._earlier)


class GatheredEpochs:
    """The epochs so far, of each of which all ranks together train `num_samples` samples.

    `history` is a ``keras.callbacks.History`` with their metrics, and `saved` what the checkpoint
    says from which this segment of the run resumes. On rank 0, `facts` are all epochs, in order.
    """

    def __init__(
        self,
        comm: Communicator,
        history: Any,
        num_samples: int,
        segment: int = 1,
        saved: TrainingState | None = None,
    ) -> None:
        self._comm, self._history, self._num_samples = comm, history, num_samples
        self._segment = segment
        earlier = saved.epochs if saved else []
        self.facts = [EpochRecord.model_validate(epoch) for epoch in earlier]
        # On another number of ranks, an epoch may have had more or fewer samples.
        self._more_samples = (saved.num_samples if saved else 0) - len(earlier) * num_samples
        self._own: list[NDArray[np.float64]] = []  # of epochs that are not gathered yet
        self._own_facts: list[EpochRecord] = []  # of the first of these

    def add(self, epoch: Epoch, validation_s: float) -> None:
        """Adds an epoch that has ended on this rank, with the time of its validation."""
        self._own.append(epoch.summarize(validation_s))

    def gather(self) -> None:
        """Gathers the epochs that have ended since the last call; collective."""
        if not self._own:  # on all ranks
            return
        gathered = self._comm.gather(np.array(self._own))
        self._own, self._own_facts = [], []
        if gathered is not None:
            self.facts += self._summarize(np.stack(gathered, axis=1), len(self.facts))

    def so_far(self) -> list[EpochRecord]:
        """Returns the epochs so far, those that are not gathered yet with this rank's times."""
        num_known = len(self._own_facts)  # what is noted often must not cost more and more
        new = [rank[np.newaxis] for rank in self._own[num_known:]]
        self._own_facts += self._summarize(new, len(self.facts) + num_known)
        return [*self.facts, *self._own_facts]

    def _summarize(self, epochs: Iterable[NDArray[np.float64]], first: int) -> list[EpochRecord]:
        """Returns epochs, the first of this index, from what ranks measured in each."""
        segment, metrics = self._segment if self._segment > 1 else None, self._history.history
        found = []
        for number, ranks in enumerate(epochs, start=first):
            values = {name: finite(each[number]) for name, each in metrics.items()}
            found.append(summarize_epoch(number + 1, ranks, values, segment))
        return found

    def to_facts(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps, as JSON; collective, and complete on rank 0 only."""
        self.gather()
        epochs = [
            epoch.model_dump(mode="json") | {"segment": epoch.segment or self._segment}
            for epoch in self.facts
        ]
        return {"epochs": epochs, "num_samples": self.num_samples}

    @property
    def num_samples(self) -> int:
        """The samples that all ranks have trained in the complete epochs of all segments.

        Those that are gathered count; for rank 0.
        """
        return self._more_samples + len(self.facts) * self._num_samples

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
    times_s = (epoch.begin_s, epoch.seconds, epoch.exposed_s, epoch.allreduce_s)
    known = [np.nan if each is None else each for each in times_s]
    return {EPOCH: np.array([*known, epoch.num_steps])}


def epoch_from(arrays: Mapping[str, NDArray[Any]]) -> Epoch:
    """Returns the epoch that `epoch_arrays` was given, without the times of its steps."""
    begin_s, seconds, *maybe_s, num_steps = arrays[EPOCH].tolist()
    exposed_s, allreduce_s = map(finite, maybe_s)
    return Epoch(begin_s, seconds, [], exposed_s, allreduce_s, num_earlier=int(num_steps))
