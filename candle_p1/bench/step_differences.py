"""How far two variants of a training step are apart, weight by weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from candle_p1.errors import CandleError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

LOSS_TOLERANCE = 1e-4
"""Relative tolerance of mean losses."""
UPDATE_TOLERANCE = 1e-2
"""Tolerance of an update, relative to the norm of the other one. The steps of Adam have the same
size for gradients of any size, and small gradients have large rounding errors."""
LEAST_UPDATE = 1e-6
"""Weights that change by less than this part of the largest change are compared with that part."""


class TrainedSteps(Protocol):
    """The steps that a rank has trained; see candle_p1.bench.step.StepOutcome."""

    @property
    def steps_s(self) -> list[float]: ...

    @property
    def losses(self) -> list[float]: ...

    @property
    def updates(self) -> dict[str, list[float]]: ...

    @property
    def values(self) -> dict[str, list[float]]: ...


@dataclass(frozen=True)
class RelativeDifference:
    """The difference of an array from another one, relative to the norm of the other one.

    Attributes:
        norm: The norm of the difference.
        largest: The largest difference of an element.
    """

    norm: float
    largest: float

    @classmethod
    def of(cls, one: Any, other: NDArray[np.float64], least: float = 0.0) -> RelativeDifference:
        """Returns the difference; 0 of equal arrays.

        Args:
            one: An array.
            other: The one it is compared with.
            least: The norm that the other one has at least.
        """
        apart = np.subtract(one, other)
        if not apart.any():
            return cls(0.0, 0.0)
        # Where the other one is nothing but zeros, the difference is whole.
        norm = max(float(np.linalg.norm(other)), least) or float(np.linalg.norm(apart))
        return cls(float(np.linalg.norm(apart)) / norm, float(np.abs(apart).max()) / norm)


def difference(one: TrainedSteps, other: TrainedSteps) -> dict[str, Any]:
    """Returns the relative differences between two trainings on the same batches.

    Returns:
        ``loss`` and ``update``, the largest difference of a mean loss and of the update of a weight
        by the first steps; and ``weights``, for each weight the difference of its update and of its
        values at the end of all steps that both have done, or None for these if they have done
        different numbers. The difference of losses is relative to the loss, that of a weight to the
        norm of the elements compared; see RelativeDifference.
    """
    losses = np.array(one.losses), np.array(other.losses)
    num = min(map(len, losses))
    loss = np.max(np.abs(losses[0][:num] - losses[1][:num]) / np.abs(losses[1][:num]))
    updates = _arrays(other.updates)
    values = _arrays(other.values) if len(one.steps_s) == len(other.steps_s) else {}
    least = LEAST_UPDATE * max(float(np.linalg.norm(update)) for update in updates.values())
    weights = []
    for name, update in updates.items():
        of_update = RelativeDifference.of(one.updates[name], update, least)
        of_value = RelativeDifference.of(one.values[name], values[name]) if values else None
        weights.append(
            {
                "weight": name,
                "num_compared": len(update),
                "update": of_update.norm,
                "largest_update": of_update.largest,
                "value": of_value and of_value.norm,
                "largest_value": of_value and of_value.largest,
            }
        )
    return {
        "loss": float(loss),
        # max() would pass over a NaN.
        "update": float(np.max([each["update"] for each in weights])),
        "weights": weights,
    }


def check(differences: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises CandleError if a variant trains another model than the first one."""
    for name, found in differences.items():
        for what, limit in {"loss": LOSS_TOLERANCE, "update": UPDATE_TOLERANCE}.items():
            if not found[what] <= limit:  # also NaN
                raise CandleError(
                    f"{name} trains a different model: after the first steps the {what} differs by"
                    f" {found[what]:.2g}, which is more than rounding explains ({limit:g})"
                )


def _arrays(elements: Mapping[str, list[float]]) -> dict[str, NDArray[np.float64]]:
    return {name: np.array(values, np.float64) for name, values in elements.items()}
