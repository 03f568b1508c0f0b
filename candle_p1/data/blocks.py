"""Reading a table some rows at a time, in one process and bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from candle_p1.data import _csvkernel as kernel
from candle_p1.data.source import Head, open_together, wrong_width
from candle_p1.data.table import CsvLayout, Table, TextColumn
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.errors import DataError

BLOCK_BYTES = 16 << 20
MAX_SHOWN_CHARS = 40


def read_head(path: Path, layout: CsvLayout) -> Head:
    """Returns what the first line of a table says.

    Raises:
        DataError: The file cannot be read or does not match the layout.
    """
    with open_together(path, SerialCommunicator()) as source:
        return source.read_head(layout)


def read_blocks(path: Path, layout: CsvLayout, block_bytes: int = BLOCK_BYTES) -> Iterator[Table]:
    """Yields the rows of a table, about so many bytes of the file at a time.

    Raises:
        DataError: The file cannot be read or does not match the layout.
    """
    with open_together(path, SerialCommunicator()) as source:
        head = source.read_head(layout)
        is_text = [name in layout.text_columns for name in head.names]
        is_text += [False] * (head.num_columns - len(head.names))
        lines = kernel.Layout(is_text, layout.separator, list(layout.missing))
        numbers = [name for name in head.names if name not in layout.text_columns]
        texts = [name for name in head.names if name in layout.text_columns]
        start, rest, has_rows = head.first_byte, b"", False
        while start < source.num_bytes:
            read = bytearray(min(block_bytes, source.num_bytes - start))
            source.read(memoryview(read), start)
            start += len(read)
            is_last = start == source.num_bytes
            text = rest + read
            end = len(text) if is_last else text.rfind(b"\n") + 1
            rest = text[end:]
            view = np.frombuffer(text, np.uint8)
            num_rows = kernel.count_rows(view, 0, end, lines)
            if not num_rows:
                continue
            has_rows = True
            values = np.empty((num_rows, head.num_columns - len(texts)), np.float32)
            codes = np.empty((len(texts), num_rows), np.int32)
            _, names, wrong = kernel.parse(view, 0, end, lines, values, codes, 0)
            if wrong is not None:
                offset, num_fields, column, content = wrong
                line = source.line_number(start - len(text) + offset)
                if num_fields != head.num_columns:
                    raise wrong_width(num_fields, head.num_columns, path, line)
                shown = content.decode(errors="replace")[:MAX_SHOWN_CHARS]
                raise DataError(f"{shown!r} is not a number", path, line, column + 1)
            columns = {}
            for name, found, code in zip(texts, names, codes, strict=True):
                try:
                    columns[name] = TextColumn([each.decode() for each in found], code)
                except UnicodeDecodeError as error:
                    raise DataError(f"its text is not UTF-8: {error}", path) from error
            yield Table(values, numbers, columns)
        if not has_rows:
            raise DataError("the file has no rows", path)
        source.check()
