"""Files of cases and of expected texts, each beneath a heading of its own, "## NAME".

After a change that is meant, expected texts are written by the tests that compare them:
``CANDLE_P1_WRITE=1 python -m pytest FILE``. What changes in them has to be understood.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

PROSE = re.compile(r"[A-Z]?[a-z]+(?:['-][a-z]+)*|[-;|─]*")
"""A word that names nothing."""


def read_cases(path: Path) -> tuple[str, dict[str, list[str]]]:
    """Returns what precedes the first heading, without comments, and the lines of each case."""
    head, *blocks = re.split(r"^## ", path.read_text(), flags=re.M)
    cases = {
        name: rest.strip().splitlines() for name, _, rest in (b.partition("\n") for b in blocks)
    }
    return re.sub(r"\A(#.*\n|\n)*", "", head).strip(), cases


def named(message: str, given: str = "") -> str:
    """Returns what a message names, such as files, flags, values and numbers, without its prose.

    These are also the words of what was `given`, but for short ones.
    """
    known = set(re.findall(r"[\w-]{3,}", given))
    words = (word.strip('.,:;()?"') for word in re.findall(r"'[^']*'|\S+", message))
    return " ".join(word for word in words if word in known or not PROSE.fullmatch(word))


def rounded(text: str) -> str:
    """Returns a text whose numbers with many decimals have five digits."""
    return re.sub(r"\d+\.\d{5,}", lambda found: f"{float(found[0]):.5g}", text)


def check_expected(path: Path, name: str, text: str, names: Collection[str]) -> None:
    """Asserts that a text is the one of this name in a file that has one for each of `names`."""
    _, cases = read_cases(path) if path.exists() else ("", {})
    expected = {head: "\n".join(lines) for head, lines in cases.items()}
    if "CANDLE_P1_WRITE" in os.environ:
        expected[name] = text.strip()
        found = [f"## {each}\n\n{expected[each]}\n" for each in names if each in expected]
        path.write_text("\n".join(found))
    assert text.strip() == expected[name]
    assert expected.keys() <= {*names}
