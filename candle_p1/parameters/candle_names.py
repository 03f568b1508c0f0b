"""Names of CANDLE's parameters: those that only CANDLE knows, and those that may be abbreviated."""

from __future__ import annotations

from typing import Any

from candle_p1.parameters.catalog import PARAMETERS

REGISTERED_ONLY: dict[str, Any] = {
    **{"clr_flag": False, "clr_mode": None, "clr_base_lr": None, "clr_max_lr": None},
    **{"clr_gamma": None, "lstm_size": None, "recurrent_dropout": 0},
}
_OF_BENCHMARKS: dict[str, Any] = {
    # NT3, and its variant that may abstain
    **{"add_noise": False, "classes": None, "feature_col": None, "feature_threshold": None},
    **{"label_noise": None, "noise_cluster": False, "noise_column": False, "std_dev": None},
    **{"noise_correlated": False, "noise_gaussian": False, "noise_type": None, "sample_ids": None},
    **{"abs_gain": None, "acc_gain": None, "add_class": None, "alpha": None, "max_abs": None},
    **{"alpha_scale_factor": None, "init_abs_epoch": None, "min_acc": None, "n_iters": None},
    **{"task_list": None, "task_names": None},
    # P1B1
    **{"alpha_dropout": False, "base_lr": None, "cp": False, "epsilon_std": None, "model": None},
    **{"latent_dim": None, "noise_factor": 0, "reduce_lr": False, "residual": False},
    **{"tsne": False, "use_landmark_genes": False, "warmup_lr": False},
    # P1B2
    **{"one_hot_dtrep": True, "reg_l2": 0, "saved_model": None, "saved_weights": None},
    # P1B3
    **{"category_cutoffs": None, "cell_features": None, "cell_noise_sigma": 0, "workers": 1},
    **{"drug_features": None, "max_logconc": None, "min_logconc": None, "scramble": False},
    **{"subsample": None, "test_cell_split": None},
}
KNOWN = REGISTERED_ONLY | _OF_BENCHMARKS
"""CANDLE's other parameters: those that it registers for all benchmarks, and those of its Pilot1
benchmarks, each with the value, besides None, that asks for nothing.

A benchmark without a parameter of that name accepts it nevertheless, and warns if it asks for
something.
"""
_GROUPS = ("general", "input and output", "preprocessing", "model", "training", "checkpoints")
_OWN = {"optimizer_formula", "patience", "timeline"}
CANDLES = frozenset(
    {
        *({parameter.name for parameter in PARAMETERS if parameter.group in _GROUPS} - _OWN),
        *("verbose", "profiling", *KNOWN),
    }
)
"""The names of CANDLE's parameters, which alone may be abbreviated as flags."""
