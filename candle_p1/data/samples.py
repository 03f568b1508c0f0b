"""Samples in the form a model takes: batches are selected by index, without copying the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Rows(Protocol):
    """An array, or anything else that gives a batch for the indices of its rows."""

    def __len__(self) -> int:
        """Returns the number of rows."""
        ...

    def __getitem__(self, which: Any) -> Any:
        """Returns the rows for an int64 array of indices, or a slice, as the model takes them."""
        ...


@dataclass(frozen=True)
class Several:
    """Rows for a model with several inputs: a batch is a tuple with one array per input."""

    inputs: tuple[Rows, ...]

    def __len__(self) -> int:
        return len(self.inputs[0])

    def __getitem__(self, which: Any) -> tuple[Any, ...]:
        return tuple(rows[which] for rows in self.inputs)


@dataclass(frozen=True)
class Selected:
    """A selection of rows, in any order.

    Attributes:
        rows: The rows to select from.
        indices: The selected ones, int64, shape (selected rows,).
    """

    rows: Rows
    indices: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, which: Any) -> Any:
        return self.rows[self.indices[which]]


@dataclass
class Samples:
    """Features and targets of one set of samples.

    Attributes:
        x: The features, in the form the model takes.
        y: The targets, in the form the loss takes.
    """

    x: Rows
    y: Rows

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, which: Any) -> tuple[Any, Any]:
        """Returns the batch (x, y) for an int64 array of indices, or for a slice."""
        return self.x[which], self.y[which]

    @property
    def x_shape(self) -> tuple[int, ...]:
        """The shape of one sample's features, for a model with one input."""
        return tuple(self.x[0:0].shape[1:])

    def first(self, num_samples: int) -> Samples:
        """Returns the first samples; 0 means all."""
        if not 0 < num_samples < len(self):
            return self
        indices = np.arange(num_samples)
        return Samples(Selected(self.x, indices), Selected(self.y, indices))


@dataclass
class DataSet:
    """The samples of a run, ready for the model.

    Attributes:
        train: The samples for training.
        validation: The samples for the metrics after every epoch.
        test: The samples for evaluating the trained model.
    """

    train: Samples
    validation: Samples
    test: Samples
