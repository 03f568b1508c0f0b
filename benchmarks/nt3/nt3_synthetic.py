"""Synthetic NT3 data: expression profiles of matched normal and tumor samples.

Each of 700 patients contributes a normal and a tumor sample. 560 patients are for training and 140
for testing, so the classes are balanced and no patient is in both files. A small data set has 140
and 70 patients. The values are log(1 + x) of expression levels, between 0 and 18. The level of a
gene in a sample is the sum, clipped to these bounds, of

- the gene's baseline;
- its pathway's activity in the patient, the same in both samples, times the gene's loading;
- in a tumor, if the gene's pathway belongs to the tumor signature, the gene's response times the
  sample's purity: half of these pathways are raised and half are lowered;
- measurement noise.

Genes of a pathway are adjacent. Most of a full profile is unrelated to the class: 85 of its 2016
pathways belong to the signature. A small one has short pathways, 10 of 12 in the signature, so that
its few genes suffice to distinguish the classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from candle_p1.data.samples import random_stream
from candle_p1.datasets.synthetic import (
    SyntheticFile,
    SyntheticRecipe,
    format_rows,
    number_patients,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Size:
    """A size of the data.

    Attributes:
        num_genes: Number of genes.
        num_patients: Number of patients, by role.
        num_pathways: Number of pathways.
        num_in_signature: Number of pathways that are raised or lowered in tumors.
    """

    num_genes: int
    num_patients: Mapping[str, int]
    num_pathways: int
    num_in_signature: int


SIZES = {
    "full": Size(60_483, {"train": 560, "test": 140}, 2016, 85),
    "small": Size(60, {"train": 140, "test": 70}, 12, 10),
}
LARGEST_LEVEL = 18.0
ROWS_PER_BLOCK = 16
DECIMALS = 6
BYTES_PER_VALUE = 9.24  # of the published files


@dataclass(frozen=True)
class Genes:
    """The properties of the genes, the same for all samples; arrays of shape (genes,).

    Attributes:
        baseline: Level in the absence of activity.
        pathway: Index of the gene's pathway.
        loading: Level per unit of the pathway's activity.
        response: Change in level in a pure tumor.
    """

    baseline: Floats
    pathway: NDArray[np.int64]
    loading: Floats
    response: Floats

    @classmethod
    def draw(cls, size: Size, seed: int) -> Genes:
        """Draws the genes."""
        random = random_stream(seed, 0)
        num_genes = size.num_genes
        pathway = np.arange(num_genes) * size.num_pathways // num_genes
        signature = np.zeros(size.num_pathways)
        signature[: size.num_in_signature] = np.where(np.arange(size.num_in_signature) % 2, 1, -1)
        random.shuffle(signature)
        response = signature[pathway] * random.uniform(2.5, 7.5, num_genes)
        baseline = random.uniform(0, 11.5, num_genes)
        # A gene whose level is lowered in tumors must be expressed in normal tissue.
        baseline = np.where(response < 0, np.maximum(baseline, 2) - 0.8 * response, baseline)
        return cls(baseline, pathway, random.uniform(0.75, 2.25, num_genes), response)

    def sample(self, patient: int, tumor: int, seed: int) -> Floats:
        """Returns the levels of one sample, shape (genes,)."""
        activity = random_stream(seed, 1, patient).normal(size=self.pathway[-1] + 1)
        random = random_stream(seed, 2, patient, tumor)
        purity = np.clip(random.normal(1, 0.15), 0.4, 1.6) if tumor else 0.0
        level = self.baseline + activity[self.pathway] * self.loading + purity * self.response
        level += random.normal(0, 1.5, len(level))
        clipped: Floats = np.clip(level, 0, LARGEST_LEVEL)
        return clipped


class Nt3Recipe(SyntheticRecipe):
    """NT3's two files: without a header, the label and the genes."""

    name = "nt3"
    version = 2
    roles: ClassVar[Mapping[str, str]] = {"train": "nt_train2.csv", "test": "nt_test2.csv"}

    def files(self, size: str, seed: int) -> list[SyntheticFile]:
        """Returns the training and the test file."""
        genes = Genes.draw(SIZES[size], seed)
        files = []
        for role, patients in number_patients(SIZES[size].num_patients).items():
            estimate = int(2 * len(patients) * len(genes.baseline) * BYTES_PER_VALUE)
            blocks = _blocks(genes, patients, seed)
            files.append(SyntheticFile(self.roles[role], estimate, blocks))
        return files


def _blocks(genes: Genes, patients: range, seed: int) -> Iterator[bytes]:
    """Yields the rows of both samples of the patients, in random order."""
    rows = [(patient, tumor) for patient in patients for tumor in (0, 1)]
    rows = [rows[i] for i in random_stream(seed, 3, patients.start).permutation(len(rows))]
    for start in range(0, len(rows), ROWS_PER_BLOCK):
        block = rows[start : start + ROWS_PER_BLOCK]
        labels = [b"%d" % tumor for _, tumor in block]
        levels = np.stack([genes.sample(*row, seed) for row in block])
        yield format_rows(labels, levels, decimals=DECIMALS)
