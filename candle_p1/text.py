"""Text for users: wording that messages and reports share, and how errors are printed."""

from __future__ import annotations

import re
import sys

ERROR_MARK = "error: "
"""How a line with an error begins."""

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


def printable(text: str) -> str:
    """Returns text that cannot control the terminal it is printed to.

    Text from a server, a file or its name may contain sequences that recolour the screen, rename
    the window or overwrite lines. They are removed; tabs and line feeds stay. Lone surrogates,
    which stand for bytes that are not UTF-8 and cannot be encoded, are shown as backslash escapes.
    """
    return _CONTROLS.sub("", text).encode(errors="backslashreplace").decode()


def print_error(message: object) -> None:
    """Prints an error to standard error, at once."""
    print(f"{ERROR_MARK}{printable(str(message))}", file=sys.stderr, flush=True)
