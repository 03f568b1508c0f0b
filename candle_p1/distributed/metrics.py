"""Metrics over the samples of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from candle_p1.distributed.comm import Communicator


def reduce_metrics(model: Any, comm: Communicator) -> dict[str, float]:
    """Returns the model's metrics over the samples of all ranks; collective.

    The state of a Keras metric consists of sums (of values and of weights, or of counts), so adding
    up the ranks' states gives the state over all samples, with the right weights for shares of
    unequal size. The metrics of `model` take on that state. Ranks without samples must call too.
    """
    if comm.size == 1:
        return _results(model)
    variables = [variable for metric in model.metrics for variable in metric.variables]
    has_seen = any(np.any(variable.numpy()) for variable in variables)
    # A rank that has never seen a sample has not built its metrics: it adds zeros, whose number it
    # learns here, and needs the result of another, the last that has seen one.
    num = sum(int(np.prod(variable.shape)) for variable in variables) if has_seen else 0
    num, last = map(int, comm.allreduce_max(np.array([num, comm.rank if has_seen else -1])))
    if last < 0:
        return {}
    mine = np.zeros(num)
    if has_seen:
        np.concatenate([variable.numpy().ravel() for variable in variables], out=mine)
    total = comm.allreduce_sum(mine)
    if has_seen:
        ends = np.cumsum([int(np.prod(variable.shape)) for variable in variables])
        for variable, state in zip(variables, np.split(total, ends[:-1]), strict=True):
            variable.assign(state.reshape(variable.shape))
    return comm.broadcast(_results(model) if has_seen else {}, root=last)


def _results(model: Any) -> dict[str, float]:
    return {name: float(value) for name, value in model.get_metrics_result().items()}
