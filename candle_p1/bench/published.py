"""The loading times that the paper published: its Tables 3 and 4, in published.json."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any


def published_loading(benchmark: str) -> list[dict[str, Any]]:
    """Returns what the paper's tables say of a benchmark; [] if nothing.

    Each entry has the number of its ``table``, the ``machine`` and its ``node``, and ``files``: by
    role ("train", "test") the ``data_size`` as the paper writes it and the seconds of a method,
    ``original_s`` and ``chunked_s``.
    """
    return [
        {key: table[key] for key in ("table", "machine", "node")}
        | {"files": table["benchmarks"][benchmark]}
        for table in _content()["tables"]
        if benchmark in table["benchmarks"]
    ]


def source() -> str:
    """Returns what the paper is called."""
    return str(_content()["source"])


@cache
def _content() -> dict[str, Any]:
    text = files("candle_p1.bench").joinpath("published.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content
