"""Whether a run has the metric that tells which epoch is the best."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from candle_p1.checkpoints.best import check_metric
from candle_p1.checkpoints.policy import are_saved

if TYPE_CHECKING:
    from candle_p1.benchmark import Benchmark
    from candle_p1.parameters.parameter_set import ParameterSet

NAME = "ckpt_save_best_metric"


def check_best_metric(benchmark: Benchmark, params: ParameterSet, model: Any) -> None:
    """Checks, before training, that the metric of the best epoch will be in the logs.

    The names of several outputs' metrics, and of those that a model's own training step adds, are
    known only after the first epoch, when the policy itself checks them.

    Raises:
        ParameterError: It will not; the message names the metrics that will.
    """
    import keras

    if not are_saved(params) or not params["ckpt_save_best"]:
        return
    metrics = benchmark.metrics(params)
    has_own_step = type(model).train_step is not keras.Model.train_step
    if has_own_step or len(getattr(model, "outputs", [0])) > 1 or isinstance(metrics, dict):
        return
    names = ["loss", *map(_name, keras.tree.flatten(metrics))]
    known = [*names, *(f"val_{name}" for name in names), "learning_rate"]
    check_metric(params[NAME], known, f"{NAME} ({params.origin(NAME)})")


def _name(metric: Any) -> str:
    """Returns the name that Keras uses in the logs for a metric, given by name or as an object."""
    if isinstance(metric, str):
        return metric
    return str(getattr(metric, "name", None) or metric.__name__)
