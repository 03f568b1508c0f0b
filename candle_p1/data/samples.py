"""Samples as a model takes them: cut into batches by index, never copied as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Rows(Protocol):
    """What gives a batch by the indices of its rows: an array, or an object that makes batches."""

    def __len__(self) -> int:
        """Returns the number of rows."""
        ...

    def __getitem__(self, which: Any) -> Any:
        """Returns the rows of an int64 array of indices, or of a slice, as the model takes them."""
        ...


@dataclass(frozen=True)
class Several:
    """Rows for a model of several inputs: a batch is a tuple, one array for each input."""

    inputs: tuple[Rows, ...]

    def __len__(self) -> int:
        return len(self.inputs[0])

    def __getitem__(self, which: Any) -> tuple[Any, ...]:
        return tuple(rows[which] for rows in self.inputs)


@dataclass(frozen=True)
class Selected:
    """Some rows of others, in an order of their own.

    Attributes:
        rows: All of them.
        indices: int64, shape (rows,): which of them these are.
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
        x: As the model takes them.
        y: As the loss takes them.
    """

    x: Rows
    y: Rows

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, which: Any) -> tuple[Any, Any]:
        """Returns the batch of an int64 array of indices, or of a slice: (x, y)."""
        return self.x[which], self.y[which]

    @property
    def x_shape(self) -> tuple[int, ...]:
        """The shape of the features of one sample, for a model of one input."""
        return tuple(self.x[0:0].shape[1:])

    def first(self, num_samples: int) -> Samples:
        """Returns the first samples; 0 is all."""
        if not 0 < num_samples < len(self):
            return self
        indices = np.arange(num_samples)
        return Samples(Selected(self.x, indices), Selected(self.y, indices))


@dataclass
class DataSet:
    """The samples of a run, ready for the model.

    Attributes:
        train: What it learns from.
        validation: What it is measured on after every epoch.
        test: What the trained model is judged on.
    """

    train: Samples
    validation: Samples
    test: Samples
