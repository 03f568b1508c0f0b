"""Files of expected texts, each beneath a heading of its own, "## NAME".

After a change that is meant, they are written by the tests that compare them:
``CANDLE_P1_WRITE=1 python -m pytest FILE``. What changes in them has to be understood.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path


def check_expected(path: Path, name: str, text: str, names: Collection[str]) -> None:
    """Asserts that a text is the one of this name in a file that has one for each of `names`."""
    blocks = re.split(r"^## ", path.read_text(), flags=re.M)[1:] if path.exists() else []
    expected = {head: rest.strip() for head, _, rest in (block.partition("\n") for block in blocks)}
    if "CANDLE_P1_WRITE" in os.environ:
        expected[name] = text.strip()
        found = [f"## {each}\n\n{expected[each]}\n" for each in names if each in expected]
        path.write_text("\n".join(found))
    assert text.strip() == expected[name]
    assert expected.keys() <= {*names}
