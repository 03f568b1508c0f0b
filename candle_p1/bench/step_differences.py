"""How far two variants of a training step are apart, weight by weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from candle_p1.bench.task import Outcome
from candle_p1.errors import CandleError

MAX_COMPARED = 4096
"""The number of elements of a weight that are compared."""
TOLERANCES = {"loss": 1e-4, "update": 1e-2}
"""Of mean losses, relative; and of an update, relative to the norm of the other one. The steps of
Adam have the same size for gradients of any size, and small gradients have large errors."""
LEAST_UPDATE = 1e-6
"""Weights that change by less than this part of the largest change are compared with that part."""


def elements(weights: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.float64]]:
    """Returns some elements of every weight, evenly spaced."""
    return {
        name: values.reshape(-1)[:: -(-values.size // MAX_COMPARED)].astype(float)
        for name, values in weights.items()
    }


def difference(one: Outcome, other: Outcome) -> dict[str, Any]:
    """Returns the relative differences between two trainings on the same batches.

    Returns:
        ``loss`` and ``update``, the largest difference of a mean loss and of the update of a weight
        by the first steps; and ``weights``, for each weight the difference of its update and of its
        values at the end of all steps that both have done, or None for these if they have done
        different numbers. The difference of losses is relative to the loss, that of a weight to the
        norm of the elements compared; "largest" is that of one element.
    """
    num = min(len(one["losses"]), len(other["losses"]))
    losses = np.array(one["losses"][:num]), np.array(other["losses"][:num])
    least = LEAST_UPDATE * max(float(np.linalg.norm(e)) for e in other["updates"].values())
    has_values = len(one["steps_s"]) == len(other["steps_s"])
    weights = []
    for name, update in other["updates"].items():
        of_update = _relative(one["updates"][name], update, least)
        of_value: tuple[float | None, float | None] = (None, None)
        if has_values:
            of_value = _relative(one["values"][name], other["values"][name])
        weights.append(
            {
                "weight": name,
                "num_compared": len(update),
                "update": of_update[0],
                "largest_update": of_update[1],
                "value": of_value[0],
                "largest_value": of_value[1],
            }
        )
    return {
        "loss": float(np.max(np.abs(losses[0] - losses[1]) / np.abs(losses[1]))),
        # max() would pass over a NaN.
        "update": float(np.max([each["update"] for each in weights])),
        "weights": weights,
    }


def _relative(one: Any, other: Any, least: float = 0.0) -> tuple[float, float]:
    """Returns the norm and the largest element of a difference, relative to the norm of `other`."""
    apart = np.subtract(one, other)
    # Where the other one is nothing but zeros, the difference is whole.
    norm = max(float(np.linalg.norm(other)), least) or float(np.linalg.norm(apart)) or 1.0
    return float(np.linalg.norm(apart)) / norm, float(np.abs(apart).max()) / norm


def check(differences: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises CandleError if a variant trains another model than the first one."""
    for name, found in differences.items():
        for what, limit in TOLERANCES.items():
            if not found[what] <= limit:  # also NaN
                raise CandleError(
                    f"{name} trains a different model: after the first steps the {what} differs by"
                    f" {found[what]:.2g}, which is more than rounding explains ({limit:g})"
                )
