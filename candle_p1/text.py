"""Wording that messages and reports share."""

from __future__ import annotations


def count(num: int, noun: str) -> str:
    """Returns a number with its noun, as "1 rank" or "3,072 ranks"."""
    return f"{num:,} {noun}{'s' * (num != 1)}"
