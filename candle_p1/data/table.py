"""Tables: the layout of their files, and their content in memory."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class CsvLayout:
    """What is known about a file before it is read.

    Attributes:
        header: Whether the first line has the columns' names.
        text_columns: The names of the columns of text; the others are numbers.
        separator: The separator, one character.
        missing: What stands for a missing number; by default, none may be missing.
        num_columns: The number of fields of every row; None means that of the first line.
        label_column: The column that holds the class, for messages; None if there is none.
        may_have_index: Whether a column may have no name, because no such column is used.
    """

    header: bool = False
    text_columns: tuple[str, ...] = ()
    separator: str = ","
    missing: tuple[str, ...] = ()
    num_columns: int | None = None
    label_column: int | None = None
    may_have_index: bool = False


@dataclass(frozen=True)
class TextColumn:
    """A column of text.

    Attributes:
        names: The distinct values, sorted.
        codes: int32, shape (rows,): each row's index into `names`.
    """

    names: list[str]
    codes: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.codes)

    def values(self) -> list[str]:
        """Returns the value of each row."""
        return [self.names[code] for code in self.codes]


@dataclass(frozen=True)
class Table:
    """The content of a file.

    Attributes:
        values: float32, shape (rows, columns of numbers), C-contiguous.
        columns: The names of these columns; empty without a header.
        text: The columns of text, by name.
    """

    values: NDArray[np.float32]
    columns: list[str] = field(default_factory=list)
    text: dict[str, TextColumn] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.values)

    def sha256(self) -> str:
        """Returns the SHA-256 of the numbers, row by row, and of the text's names and codes."""
        digest = hashlib.sha256(self.values.data)
        for name, column in self.text.items():
            digest.update("\0".join([name, *column.names]).encode())
            digest.update(column.codes.tobytes())
        return digest.hexdigest()


def repeated(names: Iterable[str]) -> list[str]:
    """Returns the names that occur more than once."""
    return [name for name, num in Counter(names).items() if num > 1]
