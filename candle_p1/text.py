"""Text for users: wording that messages and reports share, its layout, and how errors are printed.

Lines break between words only, at the terminal's width. A word that is longer than a line, such as
a path, stays in one piece, so that it can be copied. Where the width is not known, as in a file or
a pipe, lines are not broken at all.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import textwrap
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import TextIO

    from rich.table import Table

ERROR_MARK = "error: "
"""How a line with an error begins."""

WIDTH_VARIABLE = "COLUMNS"
MAX_NODES = 8
"""The most nodes that a message names."""
GAP = "  "
"""What separates the columns of a table, and indents the continuation of a line."""
CONTINUATION = " \\"
"""What ends a line of a command that goes on in the next one."""

_CONTROLS = re.compile(
    # Sequences that begin with ESC or its 8-bit form (ECMA-48): colours and cursor movements, then
    # strings such as a window's title or a link, then all others.
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x00-\x1f\x7f-\x9f]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]"
    # Single control characters except tab and line feed, and those that reorder or break lines.
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)


def count(num: int, noun: str) -> str:
    """Returns a number with its noun, as "1 rank" or "3,072 ranks"."""
    return f"{num:,} {noun}{'s' * (num != 1)}"


def name_nodes(nodes: Iterable[str]) -> str:
    """Returns "node a", "nodes a, b" or the first of many, each name once."""
    names = list(dict.fromkeys(nodes))
    more = f" and {len(names) - MAX_NODES} more" if len(names) > MAX_NODES else ""
    return f"node{'s' * (len(names) > 1)} {', '.join(names[:MAX_NODES])}{more}"


def printable(text: str) -> str:
    """Returns text that cannot control the terminal it is printed to.

    Text from a server, a file or its name may contain sequences that recolour the screen, rename
    the window or overwrite lines. They are removed; tabs and line feeds stay. Lone surrogates,
    which stand for bytes that are not UTF-8 and cannot be encoded, are shown as backslash escapes.
    """
    return _CONTROLS.sub("", text).encode(errors="backslashreplace").decode()


def print_error(message: object) -> None:
    """Prints an error to standard error, at once."""
    text = wrap(f"{ERROR_MARK}{printable(str(message))}", columns(sys.stderr))
    print(text, file=sys.stderr, flush=True)


def columns(file: TextIO | None = None) -> int | None:
    """Returns the width that lines have to fit: $COLUMNS, or that of the terminal.

    Args:
        file: What is written to, by default standard output.

    Returns:
        None if $COLUMNS is not set and the file is not a terminal.
    """
    named = os.environ.get(WIDTH_VARIABLE, "")
    if re.fullmatch("[1-9][0-9]{0,4}", named):
        return int(named)
    try:
        return os.get_terminal_size((file or sys.stdout).fileno()).columns or None
    except (AttributeError, OSError, ValueError):  # closed, replaced, or not a terminal
        return None


def wrap(text: str, width: int | None) -> str:
    """Returns text whose lines are broken between words; continuations are indented."""
    if width is None:
        return text
    return "\n".join(piece for line in text.split("\n") for piece in _wrap_line(line, width))


def wrap_command(argv: Sequence[str], width: int | None, prompt: str = "") -> str:
    """Returns a command as it can be typed, if need be in several lines that end in backslashes."""
    first, *others = map(shlex.quote, argv)
    lines = [prompt + first]
    for word in others:
        if width is None or len(f"{lines[-1]} {word}{CONTINUATION}") <= width:
            lines[-1] += f" {word}"
        else:
            lines[-1] += CONTINUATION
            lines.append(2 * GAP + word)
    return "\n".join(lines)


def table_lines(table: Table, width: int | None, rule: str = "─") -> list[str]:
    """Returns a table as lines.

    A row with a word that is longer than half a line, such as a path, is not aligned with the
    others. Columns that do not fit follow below, after the first ones, which are repeated. If not
    even two columns fit, every row becomes a paragraph.

    Args:
        table: Its title, headings, cells, sections and justification are used, not its style.
        width: The largest width, if it is limited.
        rule: The character of horizontal lines.
    """
    headings = [str(column.header) for column in table.columns]
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
    rows = list(zip(*cells, strict=True))
    aligned = [row for row in rows if not _is_long(row, width)]
    lines = wrap(str(table.title), width).split("\n") if table.title else []
    least, most = [], []
    for i, column in enumerate(table.columns):
        of_column = [headings[i], *(row[i] for row in aligned)]
        least.append(max(_longest_word(cell, column.no_wrap) for cell in of_column))
        most.append(max(_longest_word(cell, True) for cell in of_column))
    blocks = _blocks(least, _num_keys(rows), width)
    if blocks is None:
        return [*lines, *_paragraphs(headings, rows, width)]
    for block in blocks:
        is_first = block is blocks[0]
        shown = [row if is_first or not _is_long(row, width) else None for row in rows]
        lines += [] if is_first else [""]
        widths = _filled(block, least, most, width)
        lines += _block_lines(table, [headings, *shown], block, widths, rule, width)
    return lines


def _wrap_line(line: str, width: int) -> list[str]:
    indent = line[: len(line) - len(line.lstrip())]
    pieces = textwrap.wrap(
        line,
        width,
        subsequent_indent=indent + GAP,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return pieces or [""]


def _longest_word(cell: str, whole: bool) -> int:
    """Returns the least width of a cell, whose lines may be broken between words unless `whole`."""
    return max((len(each) for each in (cell.split("\n") if whole else cell.split())), default=0)


def _num_keys(rows: Sequence[Sequence[str]]) -> int:
    """Returns how many of the first columns it takes to tell rows apart; 1 if none do."""
    for num in range(1, len(rows[0]) if rows else 1):
        if len({tuple(row[:num]) for row in rows}) == len(rows):
            return num
    return 1


def _blocks(least: Sequence[int], num_keys: int, width: int | None) -> list[list[int]] | None:
    """Returns the columns of each block; None if one column does not fit beside the keys."""
    keys = list(range(num_keys))
    blocks = [list(keys)]
    for i in range(num_keys, len(least)):
        if width is not None and _width([*blocks[-1], i], least) > width:
            blocks.append([*keys])
        blocks[-1].append(i)
    if width is not None and any(_width(block, least) > width for block in blocks):
        return None
    return [block for block in blocks if len(block) > num_keys] or [keys]


def _width(block: Sequence[int], widths: Sequence[int]) -> int:
    return sum(widths[i] for i in block) + len(GAP) * (len(block) - 1)


def _is_long(row: Sequence[str], width: int | None) -> bool:
    """Returns whether a row has a word that would make its column too wide for the others."""
    return width is not None and any(_longest_word(cell, False) > width // 2 for cell in row)


def _block_lines(
    table: Table,
    grid: Sequence[Sequence[str] | None],
    block: Sequence[int],
    widths: Sequence[int],
    rule: str,
    width: int | None,
) -> Iterator[str]:
    """Yields the lines of some columns of a table.

    Args:
        table: The table.
        grid: The headings, then the rows; None is a row that is left out.
        block: The columns.
        widths: The width of every column.
        rule: The character of horizontal lines.
        width: The width of a line.
    """
    ends = [False, *(row.end_section for row in table.rows)]
    for number, row in enumerate(grid):
        if row is None:
            continue
        if number and _is_long(row, width):
            yield from wrap(GAP.join(filter(str.strip, row)), width).split("\n")
            continue
        cells = [_cell_lines(row[i], widths[i]) for i in block]
        for pieces in zip_longest(*cells, fillvalue=""):
            line = GAP.join(
                piece.rjust(widths[i])
                if table.columns[i].justify == "right"
                else piece.ljust(widths[i])
                for i, piece in zip(block, pieces, strict=True)
            )
            yield line.rstrip()
        if number == 0:
            yield rule * _width(block, widths)
        elif ends[number] and number < len(grid) - 1:
            yield ""


def _cell_lines(cell: str, width: int) -> list[str]:
    return [
        piece
        for line in cell.split("\n")
        for piece in textwrap.wrap(
            line, max(width, 1), break_long_words=False, break_on_hyphens=False
        )
        or [""]
    ]


def _filled(
    block: Sequence[int], least: Sequence[int], most: Sequence[int], width: int | None
) -> list[int]:
    """Returns the widths of all columns, where those of a block share the room that is left."""
    if width is None:
        return list(most)
    widths = list(least)
    spare = width - _width(block, least)
    while spare > 0 and (growing := [i for i in block if widths[i] < most[i]]):
        for i in growing[:spare]:
            widths[i] += 1
        spare -= len(growing[:spare])
    return widths


def _paragraphs(
    headings: Sequence[str], rows: Sequence[Sequence[str]], width: int | None
) -> Iterator[str]:
    """Yields every row as lines "heading: cell"."""
    for row in rows:
        yield ""
        for heading, cell in zip(headings, row, strict=True):
            if cell.strip():
                name = " ".join(heading.split())
                text = f"{name}: {cell.strip()}" if name else cell.strip()
                yield from wrap(text, width).split("\n")
