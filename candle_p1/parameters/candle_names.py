"""Names of CANDLE's parameters: those that only CANDLE knows, and those that may be abbreviated."""

from __future__ import annotations

from typing import Any

from candle_p1.parameters.catalog import PARAMETERS

REGISTERED_ONLY: dict[str, Any] = {
    "clr_flag": False,
    "clr_mode": None,
    "clr_base_lr": None,
    "clr_max_lr": None,
    "clr_gamma": None,
    "lstm_size": None,
    "recurrent_dropout": 0,
}
_OF_BENCHMARKS: tuple[tuple[Any, str], ...] = (
    (
        False,
        "add_noise alpha_dropout cp noise_cluster noise_column noise_correlated "
        "noise_gaussian reduce_lr residual scramble tsne use_landmark_genes warmup_lr",
    ),
    (
        None,
        "abs_gain acc_gain add_class alpha alpha_scale_factor base_lr category_cutoffs "
        "cell_features classes drug_features epsilon_std feature_col feature_threshold "
        "init_abs_epoch label_noise latent_dim max_abs max_logconc min_acc min_logconc model "
        "n_iters noise_type sample_ids saved_model saved_weights std_dev subsample task_list "
        "task_names test_cell_split",
    ),
    (0, "cell_noise_sigma noise_factor reg_l2"),
    (True, "one_hot_dtrep"),
    (1, "workers"),
)
"""Names by the value that asks for nothing."""
KNOWN = REGISTERED_ONLY | {name: value for value, names in _OF_BENCHMARKS for name in names.split()}
"""CANDLE's other parameters: those that it registers for all benchmarks, and those of its Pilot1
benchmarks, each with the value, besides None, that asks for nothing.

A benchmark without a parameter of that name accepts it nevertheless, and warns if it asks for
something.
"""
_GROUPS = ("general", "input and output", "preprocessing", "model", "training", "checkpoints")
_OWN = {
    *("optimizer_formula", "patience", "timeline", "save_model"),
    *("ckpt_every_s", "ckpt_every_steps", "ckpt_required"),
}
CANDLES = frozenset(
    {
        *({parameter.name for parameter in PARAMETERS if parameter.group in _GROUPS} - _OWN),
        *("verbose", "profiling", *KNOWN),
    }
)
"""The names of CANDLE's parameters, which alone may be abbreviated as flags."""
