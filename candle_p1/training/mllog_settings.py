"""What the log in MLPerf's format says of a run's settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from candle_p1.data.samples import DataSet
    from candle_p1.parameters.parameter_set import ParameterSet
    from candle_p1.scaling import ScalingPlan


def settings(
    params: ParameterSet, plan: ScalingPlan, data: DataSet, model: Any
) -> dict[str, int | float | str]:
    """Returns hyperparameters and numbers of samples under MLPerf's keys.

    Args:
        params: Of the run.
        plan: Its scaling.
        data: Its samples.
        model: The compiled ``keras.Model``, before training.
    """
    passes = params["backward_passes_per_step"]
    rate = plan.learning_rate
    return {
        "seed": params["rng_seed"],
        "global_batch_size": plan.global_batch_size * passes,
        "gradient_accumulation_steps": passes,
        "train_samples": len(data.train),
        "eval_samples": len(data.validation),
        "opt_name": params["optimizer"],
        "opt_base_learning_rate": float(model.optimizer.learning_rate) if rate is None else rate,
        "opt_learning_rate_warmup_epochs": plan.warmup_epochs,
    }
