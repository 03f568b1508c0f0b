"""Arrays that a checkpoint takes its values from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ArraySource(Protocol):
    """An array of the state that training changes, such as a variable of a model.

    Attributes:
        shape: Its shape; () has one row.
        dtype: The type of its elements; see candle_p1.checkpoints.layout.TYPE_NAMES.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def dtype(self) -> Any: ...  # noqa: D102

    def copy_into(self, rows: slice, out: NDArray[Any]) -> None:
        """Copies the present values of some rows; called on the thread that saves.

        Args:
            rows: Which, with start and stop; slice(0, 1) if the shape is ().
            out: Where to, of the same type and of the shape of these rows.
        """


class ArrayInMemory:
    """A NumPy array as a source."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return self._array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of its elements."""
        return self._array.dtype

    def copy_into(self, rows: slice, out: NDArray[Any]) -> None:
        """Copies some rows."""
        np.copyto(out, self._array[rows] if self._array.ndim else self._array)
