"""Samples in the form a model takes: batches are selected by index, without copying the whole.

Random choices, too: those of CANDLE's code reproduced, and independent random streams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from candle_p1.data.inputs import Inputs

SCANNED_ROWS = 64
"""The rows of a matrix that are compared with zero at once."""


class Rows(Protocol):
    """An array, or anything else that gives a batch for the indices of its rows."""

    def __len__(self) -> int:
        """Returns the number of rows."""
        ...

    def __getitem__(self, which: Any) -> Any:
        """Returns the rows for an int64 array of indices, or a slice, as the model takes them."""
        ...


class Gather(NamedTuple):
    """How rows are taken from arrays alone, so that a compiled step can do it on its device.

    Attributes:
        arrays: NumPy arrays, or nested tuples or dictionaries of them.
        take: Called with ``numpy`` or ``jax.numpy``, such arrays of its kind, and an integer array
            of indices; it returns what the rows themselves do.
    """

    arrays: Any
    take: Callable[[Any, Any, Any], Any]


def gather_of(rows: Rows) -> Gather | None:
    """Returns how rows are taken from arrays; None if they have no method ``as_gather``, or cannot.

    An array whose rows are most of those of a larger one is taken from that, which is contiguous.
    """
    if not isinstance(rows, np.ndarray):
        as_gather: Callable[[], Gather | None] | None = getattr(rows, "as_gather", None)
        return as_gather() if as_gather else None
    if rows.dtype.kind not in "biuf":
        return None
    whole, shape, width = rows.base, rows.shape[1:], int(np.prod(rows.shape[1:]))
    per_row = rows.strides[0] // rows.itemsize if len(rows) > 1 else 0
    if (
        not rows.flags.c_contiguous
        and isinstance(whole, np.ndarray)
        and whole.flags.c_contiguous
        and whole.dtype == rows.dtype
        and rows[:1].flags.c_contiguous
        and width <= per_row < 2 * width
    ):
        offset = (rows.ctypes.data - whole.ctypes.data) // rows.itemsize
        column = min(per_row - width, offset)  # what is left out comes first, as labels do
        matrix = whole.reshape(-1)[offset - column :][: len(rows) * per_row]
        if matrix.size == len(rows) * per_row:
            columns = slice(column, column + width)
            return Gather(
                matrix.reshape(len(rows), per_row),
                lambda xp, matrix, which: matrix[which][:, columns].reshape(-1, *shape),
            )
    return Gather(rows, lambda xp, rows, which: rows[which])


@dataclass(frozen=True)
class Several:
    """Rows for a model with several inputs or outputs.

    Keras matches the arrays of a tuple with the model's by their order, and a dictionary's by name.
    A model whose outputs are a dictionary therefore needs named targets.

    Attributes:
        parts: The rows of each input, or the targets of each output; or these by name. A batch is
            a tuple or a dictionary of the same form.
    """

    parts: tuple[Rows, ...] | Mapping[Any, Rows]

    def __len__(self) -> int:
        parts = self.parts
        return len(next(iter(parts.values() if isinstance(parts, Mapping) else parts)))

    def __getitem__(self, which: Any) -> Any:
        if isinstance(self.parts, Mapping):
            return {name: rows[which] for name, rows in self.parts.items()}
        return tuple(rows[which] for rows in self.parts)

    def as_gather(self) -> Gather | None:
        """Returns how the parts are taken; see `gather_of`."""
        if not isinstance(self.parts, Mapping):
            found = Several(dict(enumerate(self.parts))).as_gather()
            return found and Gather(found.arrays, lambda *of: tuple(found.take(*of).values()))
        of_parts = {name: gather_of(rows) for name, rows in self.parts.items()}
        gathers = {name: each for name, each in of_parts.items() if each}
        if len(gathers) < len(of_parts):
            return None

        def take(xp: Any, arrays: Any, which: Any) -> Any:
            return {name: each.take(xp, arrays[name], which) for name, each in gathers.items()}

        return Gather({name: each.arrays for name, each in gathers.items()}, take)


@dataclass(frozen=True)
class Computed:
    """Rows that are computed from others batch by batch, so that they never exist as a whole.

    Attributes:
        rows: The rows to compute from.
        compute: Returns the rows of a batch from those of `rows`.
    """

    rows: Rows
    compute: Callable[[Any], Any]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, which: Any) -> Any:
        return self.compute(self.rows[which])


class Chained:
    """The rows of several arrays, one array after the other, as if they were one.

    Args:
        parts: Arrays with rows of the same shape and dtype; they may be mapped into memory.
    """

    def __init__(self, parts: Sequence[NDArray[Any]]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, which: Any) -> NDArray[Any]:
        which = np.arange(*which.indices(len(self))) if isinstance(which, slice) else which
        which = np.where(which < 0, which + len(self), which)
        first = self._parts[0]
        batch = np.empty((len(which), *first.shape[1:]), first.dtype)
        numbers = np.searchsorted(self._ends, which, side="right")
        for number in np.unique(numbers):
            here, part = numbers == number, self._parts[number]
            batch[here] = part[which[here] - (self._ends[number] - len(part))]
        return batch


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

    def as_gather(self) -> Gather | None:
        """Returns how the selected rows are taken; see `gather_of`."""
        rows = gather_of(self.rows)
        if rows is None:
            return None

        def take(xp: Any, arrays: Any, which: Any) -> Any:
            return rows.take(xp, arrays[0], arrays[1][which])

        return Gather((rows.arrays, self.indices), take)


@dataclass(frozen=True)
class Joined:
    """Rows that are joined from columns of their own and from rows of tables, batch by batch.

    Where a few tables of features describe many samples, the joined rows never exist as a whole. A
    first dense layer may compute with the tables; see `candle_p1.models.fast.tables`.

    Attributes:
        own: The first columns, float32, shape (rows, columns).
        indices: For each table, the row of it that each row has: integers, shape (rows,).
        tables: float32, shapes (rows of the table, columns), in the order of the columns.
    """

    own: NDArray[np.float32]
    indices: tuple[NDArray[Any], ...]
    tables: tuple[NDArray[Any], ...]

    def __len__(self) -> int:
        return len(self.own)

    def __getitem__(self, which: Any) -> NDArray[Any]:
        """Returns some rows: shape (rows, columns), float32 as the tables are."""
        own, last = self.own[which], self.own.shape[1]
        width = last + sum(table.shape[1] for table in self.tables)
        batch = np.empty((len(own), width), np.result_type(own, *self.tables))
        batch[:, :last] = own
        for indices, table in zip(self.indices, self.tables, strict=True):
            first, last = last, last + table.shape[1]
            for row, index in zip(batch, indices[which], strict=True):  # avoids a copy
                row[first:last] = table[index]
        return batch

    def as_gather(self) -> Gather:
        """Returns how a batch is taken from the tables, whose rows a device can join, too."""

        def take(xp: Any, arrays: Any, which: Any) -> Any:
            own, indices, tables = arrays
            pairs = zip(indices, tables, strict=True)
            rows = [table[index[which]] for index, table in pairs]
            return xp.concatenate([own[which], *rows], axis=1)

        return Gather((self.own, self.indices, self.tables), take)


@dataclass(frozen=True)
class Sparse:
    """The rows of a matrix that is mostly zeros, held without these; batches are arrays with them.

    Attributes:
        starts: Where the values of each row begin, and where the last ones end: int64.
        columns: The column of each value, int64, shape (values,).
        values: Those that are not zero, in the order of rows.
        width: The number of columns of the matrix.
    """

    starts: NDArray[np.int64]
    columns: NDArray[np.int64]
    values: NDArray[Any]
    width: int

    @classmethod
    def of(cls, matrix: NDArray[Any], max_density: float) -> Sparse | None:
        """Returns a matrix in this form; None if a larger share of its values are not zero."""
        nums, parts, total = [np.zeros(1, np.int64)], [], 0
        for first in range(0, len(matrix), SCANNED_ROWS):
            block = matrix[first : first + SCANNED_ROWS]
            rows, columns = np.divmod(np.flatnonzero(block != 0), matrix.shape[1])
            nums.append(np.bincount(rows, minlength=len(block)))
            parts.append((columns, block[rows, columns]))
            total += len(rows)
            if total > max_density * matrix.size:
                return None
        columns, values = (np.concatenate(each) for each in zip(*parts, strict=True))
        return cls(np.cumsum(np.concatenate(nums)), columns, values, matrix.shape[1])

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def density(self) -> float:
        """The share of values that are not zero."""
        return len(self.values) / (len(self) * self.width)

    def take(self, which: Any) -> tuple[int, NDArray[np.int64], NDArray[Any]]:
        """Returns the number of rows chosen, and the places and values of these that are not zero.

        Places are the row, from 0, and the column: int64, shape (values, 2).
        """
        which = np.arange(len(self))[which]
        nums = self.starts[which + 1] - self.starts[which]
        own = np.arange(nums.sum()) - np.repeat(np.cumsum(nums) - nums, nums)
        own += np.repeat(self.starts[which], nums)
        rows = np.repeat(np.arange(len(which)), nums)
        return len(which), np.stack([rows, self.columns[own]], axis=1), self.values[own]

    def __getitem__(self, which: Any) -> NDArray[Any]:
        num_rows, places, values = self.take(which)
        batch = np.zeros((num_rows, self.width), self.values.dtype)
        batch[places[:, 0], places[:, 1]] = values
        return batch


@dataclass
class Samples:
    """Features and targets of one set of samples.

    Attributes:
        x: The features, in the form the model takes.
        y: The targets, in the form the loss takes; `x` itself if they are the features.
    """

    x: Rows
    y: Rows

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, which: Any) -> tuple[Any, Any]:
        """Returns the batch (x, y) for an int64 array of indices, or for a slice."""
        x = self.x[which]
        return x, x if self.y is self.x else self.y[which]

    def as_gather(self) -> Gather | None:
        """Returns how batches are taken; see `gather_of`."""
        is_own = self.y is self.x
        found = Several((self.x,) if is_own else (self.x, self.y)).as_gather()
        return found and Gather(found.arrays, lambda *of: found.take(*of) * (1 + is_own))

    @property
    def x_shape(self) -> tuple[int, ...]:
        """The shape of one sample's features, for a model with one input."""
        return tuple(self.x[0:1].shape[1:])

    def first(self, num_samples: int) -> Samples:
        """Returns the first samples; 0 means all."""
        if not 0 < num_samples < len(self):
            return self
        indices = np.arange(num_samples)
        x = Selected(self.x, indices)
        return Samples(x, x if self.y is self.x else Selected(self.y, indices))


@dataclass
class DataSet:
    """The samples of a run, ready for the model.

    Attributes:
        train: The samples for training.
        validation: The samples for the metrics after every epoch.
        test: The samples for evaluating the trained model.
        preparation: What the inputs went through, from `Benchmark.prepared`; None: nobody says, so
            that the trained model is not applied to new samples.
    """

    train: Samples
    validation: Samples
    test: Samples
    preparation: Inputs | None = field(default=None, kw_only=True)


def join_batches(batches: Sequence[Any]) -> Any:
    """Concatenates batches: arrays, or tuples, lists or dictionaries of arrays."""
    import keras

    return keras.tree.map_structure(lambda *arrays: np.concatenate(arrays), *batches)


def pandas_sample(num_rows: int, fraction: float, seed: int) -> NDArray[np.int64]:
    """Returns the rows that ``DataFrame.sample(frac=fraction, random_state=seed)`` takes, in order.

    CANDLE uses it to shuffle (fraction 1) and to sample. int64, shape (rows taken,).
    """
    random = np.random.RandomState(seed)  # the generator that pandas uses for an integer seed
    return random.choice(num_rows, size=round(fraction * num_rows), replace=False).astype(np.int64)


def random_stream(seed: int, *key: int) -> np.random.Generator:
    """Returns a random generator for one purpose; different keys give independent streams."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
