"""Evaluating a trained model: metrics, scores and predictions over all ranks.

The ranks share the samples, each taking a contiguous range; the results are those that one process
would compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from candle_p1.data.samples import DataSet, Samples, join_batches
from candle_p1.distributed.comm import Communicator
from candle_p1.models.scores import ConfusionScore, RegressionScore
from candle_p1.parameters.parameter_set import ParameterSet
from candle_p1.records.record import finite
from candle_p1.records.types import Failure
from candle_p1.scaling import share_bounds

Quality = dict[str, dict[str, "float | None"]]
"""Metrics by name: the value, and the naive predictor's if there is one."""

T = TypeVar("T")
AnyScore = TypeVar("AnyScore", RegressionScore, ConfusionScore)


def compare_with_naive(values: Mapping[str, float], naive: Mapping[str, float]) -> Quality:
    """Returns metrics together with the naive predictor's; None stands for NaN."""
    return {
        name: {"value": finite(value)} | ({"naive": finite(naive[name])} if name in naive else {})
        for name, value in values.items()
    }


def find_nan(history: Mapping[str, Sequence[float]], quality: Quality) -> list[Failure]:
    """Returns which losses, of every epoch and of the test, are not finite, as failures."""
    found = []
    for name, what in (("loss", "training"), ("val_loss", "validation")):
        bad = (i for i, value in enumerate(history.get(name, ()), start=1) if finite(value) is None)
        if epoch := next(bad, None):
            reason = f"the {what} loss of epoch {epoch} is not a number"
            found.append(Failure(reason=reason, rank=None, phase="train"))
    if "loss" in quality and quality["loss"]["value"] is None:
        reason = "the test loss is not a number"
        found.append(Failure(reason=reason, rank=None, phase="evaluate"))
    return found


def mean_target(samples: Samples, batch_size: int, comm: Communicator) -> NDArray[np.float64]:
    """Returns the mean target of samples; collective. There is one output."""
    start, stop = share_bounds(len(samples), comm.rank, comm.size)
    total = np.zeros(np.shape(samples.y[0:1])[1:] or 1)
    for first in range(start, stop, batch_size):
        targets = samples.y[first : min(first + batch_size, stop)]
        total += targets.sum(axis=0, dtype=np.float64)
    return comm.allreduce_sum(total) / len(samples)


@dataclass(frozen=True)
class Trained:
    """A trained model with what is needed to evaluate it. Its methods are collective.

    Attributes:
        model: The compiled ``keras.Model``; the same weights on every rank.
        data: The samples.
        params: The parameters of the run.
        comm: The ranks.
        directory: Where rank 0 writes figures and tables.
        synthetic: Whether the samples were generated.
    """

    model: Any
    data: DataSet
    params: ParameterSet
    comm: Communicator
    directory: Path
    synthetic: bool

    @property
    def writes(self) -> bool:
        """Whether this rank is the one that writes files."""
        return self.comm.rank == 0

    def title(self, text: str) -> str:
        """Returns the title of a figure, which says so if the data are synthetic."""
        return f"{text} (synthetic data)" if self.synthetic else text

    def metrics(self, samples: Samples, max_steps: int = 0) -> dict[str, float]:
        """Returns the compiled loss and metrics over the samples; the same on every rank.

        `max_steps` limits the number of steps, of all ranks together; 0 means no limit.
        """
        from candle_p1.distributed.callbacks import evaluate_shared

        batches = self._batches(samples, max_steps, self.model)
        return evaluate_shared(self.model, batches, self.comm)

    def score(self, samples: Samples, score: AnyScore, max_steps: int = 0) -> AnyScore:
        """Returns the score of the predictions for the samples, those of all ranks together.

        The score is updated with the targets and the predictions of each batch.
        """
        for y, predicted in self._predictions(samples, max_steps, self.model):
            score.update(y, predicted)
        score.sums = self.comm.allreduce_sum(score.sums)
        return score

    def scores(
        self, samples: Samples, scores: Mapping[Any, AnyScore], max_steps: int = 0
    ) -> Mapping[Any, AnyScore]:
        """Returns scores like `score`, for several outputs at once.

        They are given by output: its name if the model returns a dictionary, else its number.
        """
        for y, predicted in self._predictions(samples, max_steps, self.model):
            for output, score in scores.items():
                score.update(y[output], predicted[output])
        for score in scores.values():
            score.sums = self.comm.allreduce_sum(score.sums)
        return scores

    def predict(self, samples: Samples, max_steps: int = 0) -> tuple[Any, Any] | None:
        """Returns targets and predictions of all samples, in order, on rank 0; None elsewhere.

        For small outputs only, because rank 0 gathers all of them. Both are arrays or, with several
        outputs, structured as the targets of a batch and the model's outputs are.
        """
        batches = self._gathered(self._predictions(samples, max_steps, self.model))
        if batches is None:
            return None
        return join_batches([y for y, _ in batches]), join_batches([p for _, p in batches])

    def apply(self, model: Any, samples: Samples, max_steps: int = 0) -> Any:
        """Returns what a part of the model, such as its encoder, returns for all samples.

        They are in order, on rank 0, which gathers them; None elsewhere.
        """
        batches = self._gathered(p for _, p in self._predictions(samples, max_steps, model))
        return None if batches is None else join_batches(batches)

    def _gathered(self, mine: Iterable[T]) -> list[T] | None:
        everyone = self.comm.gather(list(mine))
        return None if everyone is None else list(chain.from_iterable(everyone))

    def mean_target(self, samples: Samples) -> NDArray[np.float64]:
        """Returns the mean target of the samples: what a naive regression always predicts."""
        return mean_target(samples, self.params["batch_size"], self.comm)

    def _predictions(
        self, samples: Samples, max_steps: int, model: Any
    ) -> Iterator[tuple[Any, Any]]:
        import keras

        batches = self._batches(samples, max_steps, model)
        for step in range(len(batches)):
            x, y = batches[step]
            yield y, keras.tree.map_structure(np.asarray, model.predict_on_batch(x))

    def _batches(self, samples: Samples, max_steps: int, model: Any) -> Any:
        from candle_p1.data.batches import EvaluationBatches
        from candle_p1.models.fast.batches import taken_by

        samples = taken_by(model, samples)
        return EvaluationBatches(samples, self.params["batch_size"], self.comm, max_steps)
