"""The first line of a table, which tells its columns."""

from __future__ import annotations

import csv
import os
from typing import TYPE_CHECKING, NamedTuple

from candle_p1.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from candle_p1.data.table import CsvLayout

BLOCK_BYTES = 1 << 16
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Head(NamedTuple):
    """What the first line tells.

    Attributes:
        names: The columns' names; empty where there is no header.
        num_columns: The fields that a row must have.
        first_byte: Where the rows begin.
    """

    names: list[str]
    num_columns: int
    first_byte: int


def read_head(file: int, path: Path, layout: CsvLayout) -> tuple[Head, bytes]:
    """Reads an open file's first line; returns what it tells, and all that was read.

    Raises:
        DataError: The file is empty, or the header does not fit the layout.
        OSError: It cannot be read.
    """
    text = b""
    while b"\n" not in text.lstrip():
        block = os.pread(file, BLOCK_BYTES, len(text))
        if not block:
            break
        text += block
    if not text:
        raise DataError("the file is empty", path)
    mark = len(BYTE_ORDER_MARK) if text.startswith(BYTE_ORDER_MARK) else 0
    content = text[mark:].lstrip(b"\r\n")
    line, *_ = content.partition(b"\n")
    if not line.strip():
        raise DataError("the file holds no rows", path)
    try:
        fields = next(csv.reader([line.decode()], delimiter=layout.separator))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"the first line cannot be read: {error}", path, 1) from error
    if not layout.header:
        return Head([], layout.num_columns or len(fields), mark), text
    for name in layout.text_columns:
        if name not in fields:
            raise DataError(f"the header names no column {name!r}", path, 1)
    if len(fields) != (layout.num_columns or len(fields)):
        raise DataError(f"{len(fields)} fields where {layout.num_columns} are expected", path, 1)
    return Head(fields, len(fields), len(text) - len(content) + len(line) + 1), text
