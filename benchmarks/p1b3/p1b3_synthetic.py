"""Synthetic P1B3 data: the growth of cell lines under drugs, and the features of lines and drugs.

``p1b3_biology`` defines the model of the responses, and ``p1b3_features`` how the feature tables
reflect its factors; this module writes the nine files that CANDLE's P1B3 reads. Some lines and
drugs are absent from some files, and some values are missing.

The paper gives P1B3 a "training file" of 318 MB and a "testing file" of 103 MB, which match no
single file that CANDLE reads. We take the 103 MiB to be the dose responses, and the 318 MiB to be
the other eight files together. After CANDLE's processing (concentrations between 1e-5 and 1e-4
molar, naive balancing, join with expression and descriptors), as many responses remain as its
README reports: 1,000,151 for training and validation, and about 14,740 for testing.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from candle_p1.data.samples import random_stream
from candle_p1.datasets.synthetic import SyntheticFile, SyntheticRecipe, format_rows
from p1b3_biology import FIVE_DOSES, ONE_DOSE, CellLines, Drugs, most_active
from p1b3_features import Columns

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

NUM_DRUGS = {"full": 27_000, "small": 2_400}
# CANDLE's convolutional network needs at least 2,755 inputs: 1, the genes and the descriptors.
NUM_COLUMNS = {
    "expression": {"full": 25_722, "small": 1_800},
    "mirna": {"full": 453, "small": 40},
    "proteome": {"full": 8_097, "small": 60},
    "kinome": {"full": 1_663, "small": 20},
    "descriptors": {"full": 3_809, "small": 1_000},
    "latent": {"full": 292, "small": 30},
}
NUM_SELECTED = 996_000
"""About how many responses of the full size remain for training and validation by default."""

COUNTS_SHARE, FLAGS_SHARE = 0.37, 0.37  # of the descriptors
ABSENT_SHARE = {  # of the lines, or drugs
    "expression": 0.0,
    "mirna": 0.02,
    "proteome": 0.03,
    "kinome": 0.03,
    "descriptors": 0.02,
    "latent": 0.04,
    "response": 0.01,
}
FIVE_DOSES_SHARE = 0.312  # of the drugs
NUM_TEST_LINES = 6
TEST_DRUGS_SHARE = 0.0905  # of the drugs that have responses and descriptors
LARGEST_NSC = 800_000

DECIMALS = 2
ROWS_PER_BLOCK = 120
BYTES_PER_LEVEL, BYTES_PER_DESCRIPTOR, BYTES_PER_RESPONSE = 5.1, 2.8, 26.4
LINE_ROLES = ("expression", "mirna", "proteome", "kinome")
EMPTY_FIELD_ROLES = ("mirna", "latent")  # "na" stands for a missing value in the other tables

LINES, DRUGS, NSC, ABSENT, ACTIVE, TEST, COLUMNS, VALUES, RESPONSES = range(9)
"""The keys of the random streams."""


class P1b3Recipe(SyntheticRecipe):
    """P1B3's nine files: features of lines and drugs, responses, and lists for testing."""

    name = "p1b3"
    version = 2
    roles: ClassVar[Mapping[str, str]] = {
        "expression": "P1B3_cellline_expressions.tsv",
        "mirna": "P1B3_cellline_mirna.tsv",
        "proteome": "P1B3_cellline_proteome.tsv",
        "kinome": "P1B3_cellline_kinome.tsv",
        "descriptors": "P1B3_drug_descriptors.tsv",
        "latent": "P1B3_drug_latent.csv",
        "response": "P1B3_dose_response.csv",
        "test_cells": "P1B3_test_celllines.txt",
        "test_drugs": "P1B3_test_drugs.txt",
    }

    def files(self, size: str, seed: int) -> list[SyntheticFile]:
        """Returns the nine files."""
        return list(Screening(size, seed).files())


ROLE_INDEX = {role: i for i, role in enumerate(P1b3Recipe.roles)}


class Screening:
    """The lines and drugs of a data set, and its files.

    Attributes:
        lines: The cell lines.
        drugs: The drugs.
        nsc: The drugs' numbers, ascending, shape (drugs,).
        growth: Growth at one dose without noise, in percent, shape (drugs, lines).
        has_five_doses: Whether a drug is also screened at five doses, shape (drugs,).
    """

    def __init__(self, size: str, seed: int):
        self.size = size
        self._random = partial(random_stream, seed)
        num_drugs = NUM_DRUGS[size]
        self.lines = CellLines.draw(self._random(LINES))
        self.drugs = Drugs.draw(num_drugs, self._random(DRUGS))
        self.nsc = np.sort(self._random(NSC).choice(LARGEST_NSC, num_drugs, replace=False) + 1)
        self.growth = self.drugs.growth(*ONE_DOSE, self.drugs.log_ec50(self.lines))
        self.has_five_doses = most_active(
            self.growth, round(FIVE_DOSES_SHARE * num_drugs), self._random(ACTIVE)
        )

    def files(self) -> Iterator[SyntheticFile]:
        """Yields the files, in the order of the roles."""
        activities, drug_factors = self.lines.activities, self.drugs.factors()
        names = [f"NCI60.{name}".encode() for name in self.lines.names]
        numbers = [b"%d" % number for number in self.nsc]
        for role in LINE_ROLES:
            yield self._table(role, "CellLine", b"\t", names, activities)
        yield self._table("descriptors", "NAME", b"\t", numbers, drug_factors)
        yield self._table("latent", "NSC", b",", numbers, drug_factors)
        yield self._responses()
        test_lines = [f"NCI60:{self.lines.names[i]}" for i in self.test_lines()]
        yield _list("test_cells", "CELLNAME", test_lines)
        yield _list("test_drugs", "NSC", [str(self.nsc[i]) for i in self.test_drugs()])

    def test_lines(self) -> Integers:
        """Returns the indices of the lines reserved for testing, ascending.

        They are spread evenly over all lines in the order of their responses, as are the test
        drugs. So their share of the responses after balancing is their share of the lines or drugs.
        """
        return _spread(self.growth.mean(axis=0).argsort(), NUM_TEST_LINES, self._random(TEST, 0))

    def test_drugs(self) -> Integers:
        """Returns the indices of the drugs reserved for testing, ascending."""
        usable = np.intersect1d(self._present("response"), self._present("descriptors"))
        growth = self.growth[usable].mean(axis=1)
        ordered = usable[np.lexsort((growth, ~self.has_five_doses[usable]))]
        return _spread(ordered, round(TEST_DRUGS_SHARE * len(usable)), self._random(TEST, 1))

    def _table(
        self, role: str, key: str, separator: bytes, names: list[bytes], factors: Floats
    ) -> SyntheticFile:
        """Returns a table of features; `factors` has a row per line or drug."""
        stream = ROLE_INDEX[role]
        num_columns = NUM_COLUMNS[role][self.size]
        is_descriptors = role == "descriptors"
        columns = Columns.draw(
            factors.shape[1],
            num_columns,
            round(COUNTS_SHARE * num_columns) if is_descriptors else 0,
            round(FLAGS_SHARE * num_columns) if is_descriptors else 0,
            self._random(COLUMNS, stream),
        )
        present = self._present(role)
        titles = [key.encode(), *(b"%s_%d" % (role.encode(), i) for i in range(num_columns))]
        header = separator.join(titles) + b"\n"

        def blocks() -> Iterator[bytes]:
            yield header
            for start in range(0, len(present), ROWS_PER_BLOCK):
                rows = present[start : start + ROWS_PER_BLOCK]
                yield format_rows(
                    [names[row] for row in rows],
                    columns.values(factors[rows], self._random(VALUES, stream, start)),
                    decimals=DECIMALS,
                    separator=separator,
                    strip_zeros=True,
                    missing=b"" if role in EMPTY_FIELD_ROLES else b"na",
                )

        bytes_per_value = BYTES_PER_DESCRIPTOR if is_descriptors else BYTES_PER_LEVEL
        num_bytes = len(header) + sum(len(names[row]) for row in present)
        num_bytes += int(len(present) * num_columns * bytes_per_value)
        return SyntheticFile(P1b3Recipe.roles[role], num_bytes, blocks())

    def _responses(self) -> SyntheticFile:
        """Returns the responses, drug by drug."""
        present = self._present("response")
        lines = [b"NCI60:" + name.encode() for name in self.lines.names]
        doses = np.array(ONE_DOSE + FIVE_DOSES)

        def blocks() -> Iterator[bytes]:
            yield b"NSC,CELLNAME,LOG_CONCENTRATION,GROWTH\n"
            for start in range(0, len(present), ROWS_PER_BLOCK):
                rows = present[start : start + ROWS_PER_BLOCK]
                random = self._random(RESPONSES, start)
                growth = self.drugs.take(rows).screen(doses, self.lines, random)
                tested = np.ones(growth.shape, bool)
                tested[~self.has_five_doses[rows], :, len(ONE_DOSE) :] = False
                prefixes = [
                    b"%d,%s" % (self.nsc[rows[i]], lines[j])
                    for i, j in zip(*np.nonzero(tested)[:2], strict=True)
                ]
                values = np.stack(np.broadcast_arrays(doses, growth), axis=-1)
                yield format_rows(prefixes, values[tested], decimals=0)

        num_screens = len(present) + len(FIVE_DOSES) * self.has_five_doses[present].sum()
        num_bytes = int(num_screens * len(lines) * BYTES_PER_RESPONSE)
        return SyntheticFile(P1b3Recipe.roles["response"], num_bytes, blocks())

    def _present(self, role: str) -> Integers:
        """Returns the indices of the lines or drugs in a file, ascending."""
        num = len(self.lines.names) if role in LINE_ROLES else len(self.nsc)
        num_present = num - round(ABSENT_SHARE[role] * num)
        order = self._random(ABSENT, ROLE_INDEX[role]).permutation(num)
        present: Integers = np.sort(order[:num_present])
        return present


def _list(role: str, header: str, names: list[str]) -> SyntheticFile:
    content = "".join(f"{line}\n" for line in [header, *names]).encode()
    return SyntheticFile(P1b3Recipe.roles[role], len(content), iter([content]))


def _spread(ordered: Integers, num: int, random: np.random.Generator) -> Integers:
    """Returns evenly spaced elements, starting at a random one; ascending."""
    places = (np.arange(num) + random.random()) * len(ordered) / num
    chosen: Integers = np.sort(ordered[places.astype(np.int64)])
    return chosen
