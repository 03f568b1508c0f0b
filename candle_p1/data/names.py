"""Matching names of two files that are joined by name: what they share, and what was misspelled."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from candle_p1.data.reader import Reader
from candle_p1.data.table import TextColumn
from candle_p1.errors import DataError
from candle_p1.records.types import NameMatch
from candle_p1.text import examples

MAX_EXAMPLES = 3
ENSEMBL = re.compile(r"^(ENS[A-Z]{0,4}G\d{6,})(\.\d+)?(_\w+)?$")


class Join(NamedTuple):
    """What the names of two files have in common.

    Attributes:
        facts: The counts, for the record.
        lacking: The names of the left file that the right one lacks.
        similar: Whether different names probably mean the same: they differ only in blanks, in
            case, in ".0" after a whole number, or in "." for ":".
        problem: What does not match, for messages; empty if there is nothing.
    """

    facts: NameMatch
    lacking: list[str]
    similar: bool
    problem: str


def match(
    reader: Reader,
    what: str,
    roles: tuple[str, str],
    left: TextColumn,
    right: Collection[str],
    effect: str = "",
    is_part: bool = False,
) -> Join:
    """Looks up the names of one file, `left`, in another, and counts them for the record.

    If there is an effect of names that do not match, a clause, the user is warned.

    Raises:
        DataError: They have an effect, and fewer than half of the names of `left` match or, if
            `right` may be about a part of them (`is_part`), of the names of either.
    """
    known, spellings = set(right), defaultdict(list)
    for name in right:
        spellings[_meant(name)].append(name)
    lacking = [name for name in left.names if name not in known]
    similar = [(a, b) for a in left.names for b in spellings.get(_meant(a), ()) if a != b]
    num_left, num_right = len(left.names), len(right)
    num_matched = num_left - len(lacking)
    paths, clauses = [reader.files.paths[role] for role in roles], []
    if lacking:
        num_lost = np.isin(left.names, lacking)[left.codes].sum()
        rows = f", in {num_lost:,} of {len(left):,} rows," if len(left) > num_left else ""
        clauses.append(
            f"{len(lacking):,} of {num_left:,} {what} in {paths[0].name}{rows} are not in"
            f" {paths[1].name} ({', '.join(map(repr, lacking[:MAX_EXAMPLES]))})"
        )
    if similar:
        pairs = (f"{a!r} and {b!r}" for a, b in similar[:MAX_EXAMPLES])
        clauses.append(f"some names seem to mean the same ({', '.join(pairs)})")
    problem = ", and ".join(clauses)
    if effect and 2 * num_matched < (min(num_left, num_right) if is_part else num_left):
        raise DataError(
            f"too few {what} match: {problem}; give files that belong together", paths[0]
        )
    if effect and problem:
        reader.warn(f"{problem}: {effect}" if lacking else problem)
    facts = NameMatch(
        what=what,
        left=roles[0],
        right=roles[1],
        num_left=num_left,
        num_right=num_right,
        num_matched=num_matched,
    )
    reader.joins.append(facts)
    return Join(facts, lacking, bool(similar), problem)


def _meant(name: str) -> str:
    """Returns what all spellings of a name have in common."""
    text = "".join(name.split()).casefold()
    number = re.fullmatch(r"(\d+)\.0+", text)
    return number[1] if number else text.replace(".", ":")


def without_version(name: str) -> str:
    """Returns Ensembl's identifier of a gene without its version; other names as they are."""
    return ENSEMBL.sub(r"\1\3", name)


def place_features(
    wanted: Sequence[str], found: Sequence[str], path: Path
) -> tuple[list[int] | None, list[str]]:
    """Returns where in a table the features are, None if they are all it has; and notes.

    Names of genes match without their versions where they do not match with them.

    Args:
        wanted: The features that a network is trained on, in order.
        found: Those of the table.
        path: The table.

    Raises:
        DataError: Some are missing.
    """
    if list(wanted) == list(found):  # as a rule; versions take a regular expression per name
        return None, []
    place = {name: i for i, name in enumerate(found)}
    bare = defaultdict(list)
    for i, name in enumerate(found):
        bare[without_version(name)].append(i)
    columns, lacking = [], []
    for name in wanted:
        similar = bare.get(without_version(name), [])
        if name in place:
            columns.append(place[name])
        elif len(similar) == 1:
            columns += similar
        else:
            lacking.append(name)
    if lacking:
        raise DataError(
            f"it lacks {len(lacking):,} of the {len(wanted):,} features that the network is trained"
            f" on, such as {examples(lacking)}",
            path,
        )
    if columns == [*range(len(found))]:
        return None, []
    further = [found[i] for i in sorted({*range(len(found))}.difference(columns))]
    notes = [f"{len(further):,} further features are ignored: {examples(further)}"] * bool(further)
    notes += ["features are put in the order of the training"] * (columns != sorted(columns))
    return columns, notes
