"""What the first bytes of a file say if it is not the table that is expected."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from candle_p1.data.table import CsvLayout

CONVERT = "convert it with pandas's to_csv"
ENCODE = "convert it with iconv -f UTF-16 -t UTF-8"
FORMATS = {
    b"\x1f\x8b": ("compressed by gzip", "decompress it with gzip -d"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "decompress it with zstd -d"),
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


def wrong_format(start: bytes, layout: CsvLayout) -> str | None:
    """Returns what a file is that begins with these bytes; None if it may be a table."""
    found = [each for signature, each in FORMATS.items() if start.startswith(signature)]
    if b"\0" in start[:2]:
        found.append(("text in UTF-16 or not text", ENCODE))
    return f"the file is {found[0][0]}: {found[0][1]}; {expected(layout)}" if found else None


def wrong_first_line(line: str, layout: CsvLayout) -> str | None:
    """Returns what is wrong with a first line as a whole: its separator, or that it is a header."""
    own, wanted, line = layout.separator, {*layout.text_columns}, line.replace('"', "").strip()
    if layout.header:
        found = [s for s in (own, *SEPARATORS) if wanted <= {*line.split(s)}]
    else:  # a number has no semicolon
        found = [s for s in (";", "|", own, *SEPARATORS) if s in line]
    if found and found[0] != own:
        return (
            f"the fields are separated by {SEPARATORS[found[0]]}: write the file by"
            f" to_csv(sep={own!r}); {expected(layout)}"
        )
    fields = line.removeprefix(own).split(own)
    if not layout.header and len(fields) > 2 and fields == [str(i) for i in range(len(fields))]:
        return (
            "the line counts (0, 1, 2, …), as a header written by pandas does: write the file by"
            f" to_csv(header=False, index=False); {expected(layout)}"
        )
    return None


def expected(layout: CsvLayout) -> str:
    """Returns what a file with a layout is, for messages."""
    header = "with a header" if layout.header else "without a header"
    if layout.text_columns:
        header += f" that has {' and '.join(layout.text_columns)}"
    elif layout.label_column == 0:
        header += ", the label first in each line"
    separator = SEPARATORS.get(layout.separator, repr(layout.separator))
    return f"expected: text in UTF-8 with fields separated by {separator}, {header}"
