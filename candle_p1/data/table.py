"""Tables: the layout of their files, their content in memory, and what is wrong with a file."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from candle_p1.errors import DataError
from candle_p1.text import count

MAX_SHOWN_CHARS = 40


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


CONVERT = "convert it with pandas's to_csv"
ENCODE = "convert it with iconv -f UTF-16 -t UTF-8"
FORMATS = {
    b"\xfd7zXZ\0": ("compressed by xz", "decompress it with xz -d"),
    b"BZh": ("compressed by bzip2", "decompress it with bzip2 -d"),
    b"PK\x03\x04": ("an Excel workbook (xlsx) or another ZIP archive", f"unzip it, or {CONVERT}"),
    b"PAR1": ("a Parquet file", CONVERT),
    b"\x89HDF\r\n\x1a\n": ("an HDF5 file", CONVERT),
    b"\xff\xfe": ("text in UTF-16", ENCODE),
    b"\xfe\xff": ("text in UTF-16", ENCODE),
}
"""What files are that begin with these bytes, and what to do about it."""
SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "vertical bars", " ": "spaces"}


def expected(layout: CsvLayout) -> str:
    """Returns what a file with a layout is, for messages."""
    header = "with a header" if layout.header else "without a header"
    if layout.text_columns:
        header += f" that has {' and '.join(layout.text_columns)}"
    elif layout.label_column == 0:
        header += ", the label first in each line"
    separator = SEPARATORS.get(layout.separator, repr(layout.separator))
    return f"expected: text in UTF-8 with fields separated by {separator}, {header}"


def check_format(start: bytes, layout: CsvLayout, path: Path) -> None:
    """Raises DataError if a file that begins with these bytes cannot be a table."""
    found = [each for signature, each in FORMATS.items() if start.startswith(signature)]
    if b"\0" in start[:2]:
        found.append(("text in UTF-16 or not text", ENCODE))
    for what, remedy in found[:1]:
        raise DataError(f"the file is {what}: {remedy}; {expected(layout)}", path)


def check_first_line(line: str, layout: CsvLayout, path: Path, number: int) -> None:
    """Raises DataError if a first line has another separator, or is a header but should be none."""
    own, wanted, line = layout.separator, {*layout.text_columns}, line.replace('"', "").strip()
    if layout.header:
        found = [s for s in (own, *SEPARATORS) if wanted <= {*line.split(s)}]
    else:  # a number has no semicolon
        found = [s for s in (";", "|", own, *SEPARATORS) if s in line]
    fields = line.removeprefix(own).split(own)
    if found and found[0] != own:
        problem = f"the fields are separated by {SEPARATORS[found[0]]}: write the file by"
        problem += f" to_csv(sep={own!r})"
    elif not layout.header and len(fields) > 2 and fields == [*map(str, range(len(fields)))]:
        problem = "the line counts (0, 1, 2, …), as a header written by pandas does: write the file"
        problem += " by to_csv(header=False, index=False)"
    else:
        return
    raise DataError(f"{problem}; {expected(layout)}", path, number)


def check_header(fields: list[str], layout: CsvLayout, path: Path, number: int) -> None:
    """Raises DataError if columns are missing, without a name, or called alike."""
    for name in layout.text_columns:
        if name not in fields:
            problem = f"the header has no column {name!r}; {expected(layout)}"
            raise DataError(problem, path, number)
    for column, name in enumerate(fields, start=1):
        unnamed = not name.strip() or name.startswith("Unnamed: ")
        if unnamed and not layout.may_have_index:
            problem = (
                f"the column's name is {name!r}, as that of an index which pandas writes along:"
                " remove the column, or write the file by to_csv(index=False)"
            )
            raise DataError(problem, path, number, column)
    for name in repeated(fields)[:1]:
        problem = f"the header has several columns {name!r}: remove or rename all but one"
        raise DataError(problem, path, number)
    if len(fields) != (layout.num_columns or len(fields)):
        raise wrong_width(len(fields), layout.num_columns, path, number)


def wrong_width(num_fields: int, num_expected: int | None, path: Path, line: int) -> DataError:
    """Returns the error for a line that has too few or too many fields."""
    fields = count(num_fields, "field")
    return DataError(f"the line has {fields} instead of {num_expected}", path, line)


def wrong_line(
    num_fields: int,
    column: int,
    content: bytes,
    is_text: Sequence[bool],
    path: Path,
    line: int,
    label_column: int | None = None,
) -> DataError:
    """Returns the error for a line that the kernel has found wrong; see `_csvkernel.parse`."""
    if num_fields != len(is_text):
        return wrong_width(num_fields, len(is_text), path, line)
    what = "the label" if column == label_column else "the field"
    if not content.strip():
        return DataError(f"{what} is empty", path, line, column + 1)
    shown = content.decode("utf-8", "replace").rstrip("\n")
    shown = shown if len(shown) <= MAX_SHOWN_CHARS else shown[:MAX_SHOWN_CHARS] + "…"
    kind = "text" if is_text[column] else "a finite float32 number"
    return DataError(f"{what} {shown!r} is not {kind}", path, line, column + 1)
