"""Numbers and estimates in words, and the words of records in files, where they do no harm."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from math import floor, isfinite
from pathlib import Path
from typing import Any

from candle_p1.reports.statistics import Estimate
from candle_p1.toml_file import read_toml

DIGITS = 3
MAX_DECIMALS = 4
"""Exceeded only where a number is so small that it would have fewer than two digits."""

NAME_LENGTH = 60
FORMULA = re.compile(r"(?![-+]?[\d.][-+.,e\d ]*$)[=+\-@\t\r]")
"""How text begins that spreadsheets take for a formula. Numbers are none."""


@cache
def contents() -> dict[str, Any]:
    """Returns contents.toml: titles, captions and explanations, which are described there."""
    return read_toml(Path(__file__).with_name("contents.toml"))


def number(value: float, like: float | None = None) -> str:
    """Returns a number with three or four significant digits, for example 12,345, 41.2 or 0.0123.

    Below 0.01 it has two. It gets the decimals of `like`, if that is given.
    """
    if not isfinite(value):
        return "not a number"
    text = f"{value:,.{_decimals(value if like is None else like)}f}"
    return text.removeprefix("-") if not float(text.replace(",", "")) else text


def percent(share: float) -> str:
    """Returns a share as a percentage."""
    return f"{100 * share:.0f} %"


def interval(estimate: Estimate, of: str = "run") -> str:
    """Returns the interval of an estimate for a sentence, with the noun for what it is made of."""
    runs = f"{' against '.join(map(str, estimate.num))} {of}{'s' * (estimate.num != (1,))}"
    if estimate.confidence == 0:
        return f"no interval, {runs}"
    ends = _ends(estimate)
    if estimate.is_confident:
        return f"95 % interval {ends}, {runs}"
    if len(estimate.num) == 1:
        return f"range {ends}, {runs}"
    return f"{floor(100 * estimate.confidence)} % interval {ends}, {runs}: too few for 95 %"


def cell(estimate: Estimate) -> str:
    """Returns an estimate for a table.

    (…) is a 95 % interval. […] is the range of the values of a median, or the widest interval of a
    ratio with its confidence. Neither means a single run.
    """
    value = number(estimate.value)
    if estimate.confidence == 0:
        return value
    ends = _ends(estimate)
    if estimate.is_confident:
        return f"{value} ({ends})"
    confidence = f"; {floor(100 * estimate.confidence)} %" if len(estimate.num) > 1 else ""
    return f"{value} [{ends}{confidence}]"


def _ends(estimate: Estimate) -> str:
    """Returns "a to b", with the decimals of the largest."""
    like = max(abs(estimate.value), abs(estimate.low), abs(estimate.high))
    return f"{number(estimate.low, like)} to {number(estimate.high, like)}"


def listed(items: Sequence[object]) -> str:
    """Returns items as "a", "a and b", "a, b and c"."""
    words = [f"{item:,}" if isinstance(item, int) else str(item) for item in items]
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def file_name(words: str) -> str:
    """Returns words from a record as a part of a file name, of letters, digits, "-" and "."."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", words).strip("-.")
    if len(name) > NAME_LENGTH:
        name = name[:NAME_LENGTH].rpartition("-")[0] or name[:NAME_LENGTH]
    return name.rstrip("-.") or "unnamed"


def csv_text(text: str) -> str:
    """Returns the text of a CSV cell, with an apostrophe before what would be a formula."""
    return f"'{text}" if FORMULA.match(text) else text


def _decimals(value: float) -> int:
    """Returns the decimals for three significant digits, or four where the first is a 1."""
    if value == 0 or not isfinite(value):
        return 0
    first, exponent = f"{abs(value):.{DIGITS - 1}e}".split("e")
    digits = DIGITS + first.startswith("1")
    return min(max(digits - 1 - int(exponent), 0), max(MAX_DECIMALS, 1 - int(exponent)))
