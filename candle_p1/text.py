"""Text for users: wording that messages and reports share, its layout, and how errors are printed.

Lines break between words only, at the terminal's width. A word that is longer than a line, such as
a path, stays in one piece, so that it can be copied. Where the width is not known, as in a file or
a pipe, lines are not broken at all.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.table import Table

ERROR_MARK = "error: "
"""How a line with an error begins."""

WIDTH_VARIABLE = "COLUMNS"
MAX_NODES = 8  # that a message names
GAP = "  "  # between the columns of a table, and before the continuation of a line
UNLIMITED = 100_000  # the width of a line that is not broken
PLAIN: Any = {"color_system": None, "highlight": False, "markup": False, "emoji": False}
"""Settings of rich's console for text as it is."""
CONTINUATION = " \\"  # ends a line of a command that goes on in the next one

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

    None if $COLUMNS is not set and the file, by default standard output, is not a terminal.
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
    """Returns a table as lines, as rich lays it out, or every row as a paragraph if words are long.

    Its style is not used. If the width is not limited, no cell is broken. The rule is the character
    of horizontal lines.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.console import Console

    lines = wrap(str(table.title), width).split("\n") if table.title else []
    texts = [[str(each.header), *map(str, each.cells)] for each in table.columns]
    widths = [max(map(cell_len, "\n".join(of).split("\n"))) for of in texts]
    least = [max(map(cell_len, " ".join(of).split()), default=0) for of in texts]
    room = (width or UNLIMITED) - len(GAP) * (len(texts) - 1)
    if sum(least) > room:
        headings = [" ".join(heading.split()) for heading, *_ in texts]
        return [*lines, *_paragraphs(headings, zip(*(of[1:] for of in texts), strict=True), width)]
    while sum(widths) > room:
        spare = [(each - need, each) for each, need in zip(widths, least, strict=True)]
        widths[spare.index(max(spare))] -= 1
    plain = copy(table)
    plain.title, plain.box, plain.pad_edge, plain.show_edge = None, box.SIMPLE_HEAD, False, False
    plain.padding = (0, 1, 0, 0)  # the box adds the other space of GAP
    plain.columns = [replace(c, width=w) for c, w in zip(table.columns, widths, strict=True)]
    file = io.StringIO()
    Console(file=file, width=width or UNLIMITED, **PLAIN).print(plain)
    return lines + [line.rstrip().replace("─", rule) for line in file.getvalue().splitlines()]


def _wrap_line(line: str, width: int) -> list[str]:
    indent = line[: len(line) - len(line.lstrip())]
    pieces = textwrap.wrap(
        line, width, subsequent_indent=indent + GAP, break_long_words=False, break_on_hyphens=False
    )
    return pieces or [""]


def _paragraphs(
    headings: Sequence[str], rows: Iterable[Sequence[str]], width: int | None
) -> Iterator[str]:
    for row in rows:
        yield ""
        for heading, cell in zip(headings, row, strict=True):
            if cell.strip():
                text = f"{heading}: {cell.strip()}" if heading else cell.strip()
                yield from wrap(text, width).split("\n")


def examples(names: Any, most: int = 3) -> str:
    """Returns the first of some names, a list or an index of pandas, for a message."""
    return ", ".join(map(repr, names[:most])) + ", …" * (len(names) > most)
