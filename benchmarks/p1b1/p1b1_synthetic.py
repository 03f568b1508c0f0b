"""Synthetic P1B1 data: expression profiles of tumors of many types.

4,000 patients give a tumor each; 3,000 of them train and 1,000 test. Types are as frequent as in
TCGA, roughly. What is written is log(1 + x) of an expression level. A gene's level in a tumor is
the sum of

- the gene's baseline;
- its pathway's activity in the tumor, times the gene's loading;
- noise of the measurement;

and 0 where that is below the limit of detection, as it is for many genes. The activity of a pathway
is the sum of

- the lineage: every type has a place on a map of two axes, types of one organ system near each
  other; a pathway follows a direction of its own on that map. A tumor lies nearer to the map's
  center the less pure it is, since normal cells are mixed in;
- what is particular to the type;
- what is particular to the patient.

The lineage is the strongest of the three, so that two latent dimensions hold much of a profile,
and what is particular to the type comes out of more of them. Genes of a pathway are neighbors.

``lincs1000.tsv`` names the landmark genes: the strongest gene of a pathway, for many of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

ORGAN_SYSTEMS = {
    "glandular": {"BRCA": 110, "PRAD": 50, "OV": 38},
    "squamous": {"HNSC": 52, "LUSC": 50, "CESC": 31, "BLCA": 41},
    "lung and thyroid": {"LUAD": 53, "THCA": 51, "MESO": 9},
    "gastrointestinal": {"COAD": 48, "READ": 17, "STAD": 41, "PAAD": 18},
    "liver": {"LIHC": 37, "CHOL": 4},
    "kidney": {"KIRC": 54, "KIRP": 29, "KICH": 7},
    "neural": {"LGG": 53, "GBM": 17, "PCPG": 18},
    "blood": {"LAML": 15, "THYM": 12, "DLBC": 5},
    "mesenchymal": {"SKCM": 47, "SARC": 26, "UCEC": 55},
}
"""Types by organ system, each with its share: tumors in TCGA, in tens."""
CANCER_TYPES = [name for types in ORGAN_SYSTEMS.values() for name in types]
SHARES = np.array([share for types in ORGAN_SYSTEMS.values() for share in types.values()])


@dataclass(frozen=True)
class Size:
    """What differs between the sizes."""

    num_genes: int
    num_patients: Mapping[str, int]
    genes_per_pathway: int
    num_landmarks: int


SIZES = {
    "full": Size(60_483, {"train": 3000, "test": 1000}, 60, 978),
    "small": Size(300, {"train": 400, "test": 200}, 10, 20),
}
LINEAGE = 3.0
TYPE_SPREAD = 0.6
PATIENT_SPREAD = 0.4
NOISE = 0.7
DETECTION_LIMIT = 3.0
BASE = (4.0, 14.0)
SIL = (-6.0, 2.0)
SILENT = 0.4
OFFSET = 0.25
JITTER = 0.1
DECIMALS = 3
ROWS_PER_BLOCK = 16
BYTES_PER_VALUE = 4.45


@dataclass(frozen=True)
class Genes:
    """What is the same for all tumors.

    Attributes:
        names: Columns of the table, shape (genes,).
        baseline: Level without any activity, shape (genes,).
        pathway: Index of each gene's pathway, shape (genes,).
        loading: Level per unit of the pathway's activity, shape (genes,).
        direction: Direction of each pathway on the map, shape (2, pathways).
        place: Place of each type on the map, shape (types, 2).
        particular: Activity that is a type's own, shape (types, pathways).
    """

    names: Sequence[str]
    baseline: Floats
    pathway: Integers
    loading: Floats
    direction: Floats
    place: Floats
    particular: Floats

    @classmethod
    def draw(cls, size: Size, seed: int) -> Genes:
        random = _random(seed, 0)
        n = size.num_genes
        num_pathways = n // size.genes_per_pathway
        pathway = np.arange(n) * num_pathways // n
        angle = random.uniform(0, 2 * np.pi, num_pathways)
        direction = np.stack([np.cos(angle), np.sin(angle)])
        num_sys = len(ORGAN_SYSTEMS)
        angle = 2 * np.pi * random.permutation(num_sys) / num_sys
        center = np.stack([np.cos(angle), np.sin(angle)], axis=1)
        system = np.repeat(np.arange(num_sys), [len(t) for t in ORGAN_SYSTEMS.values()])
        place = center[system] + random.normal(0, OFFSET, (len(system), 2))
        return cls(
            _gene_names(n, random),
            np.where(random.random(n) < SILENT, random.uniform(*SIL, n), random.uniform(*BASE, n)),
            pathway,
            random.uniform(0.5, 1.5, n),
            direction,
            place,
            random.normal(0, TYPE_SPREAD, (len(place), num_pathways)),
        )

    def sample(self, patient: int, cancer_type: int, seed: int) -> Floats:
        random = _random(seed, 1, patient)
        purity = random.beta(6, 2)
        place = purity * self.place[cancer_type] + random.normal(0, JITTER, 2)
        activity = LINEAGE * place @ self.direction + purity * self.particular[cancer_type]
        activity += random.normal(0, PATIENT_SPREAD, len(activity))
        level = self.baseline + self.loading * activity[self.pathway]
        level += random.normal(0, NOISE, len(level))
        return np.where(level < DETECTION_LIMIT, 0.0, level)


def _gene_names(num_genes: int, random: np.random.Generator) -> list[str]:
    """Returns identifiers in Ensembl's style, with a version, in rising order."""
    numbers = np.sort(random.choice(5 * num_genes, num_genes, replace=False)) + 3
    versions = random.integers(1, 17, num_genes)
    return [f"ENSG{n:011}.{v}" for n, v in zip(numbers, versions, strict=True)]


def _random(seed: int, *key: int) -> np.random.Generator:
    """Returns the stream of random numbers for one purpose; streams do not depend on each other."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
