"""What a report cannot show because the records lack the data."""

from __future__ import annotations

from dataclasses import dataclass


class MissingDataError(Exception):
    """The records lack what a figure or a statement needs; the message says what."""


@dataclass(frozen=True)
class Missing:
    """What could not be shown, and why."""

    what: str
    reason: str
