"""Synthetic P1B1 data: expression profiles of tumors of many types.

Each of 4,000 patients contributes a tumor; 3,000 are for training and 1,000 for testing. Types are
about as frequent as in TCGA. The values are log(1 + x) of expression levels. The level of a gene in
a tumor is the sum of

- the gene's baseline;
- its pathway's activity in the tumor, times the gene's loading;
- measurement noise;

or 0 if that is below the detection limit, as it is for many genes. The activity of a pathway is the
sum of

- a part for the lineage: each type has a position on a two-dimensional map, on which types of the
  same organ system are close to each other, and each pathway increases in its own direction;
- a part for the type;
- a part for the patient.

A tumor contains normal cells, which are alike for all types: its purity scales what is specific to
its type. Genes of a pathway are adjacent. The lineage is the strongest part, so that a network with
two latent dimensions can encode most of a profile, and roughly the type of the tumor.

``lincs1000.tsv`` names the landmark genes, one for each of the first pathways: the gene that
follows its pathway most closely.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from candle_p1.data.samples import random_stream
from candle_p1.datasets.synthetic import (
    SyntheticFile,
    SyntheticRecipe,
    number_patients,
    write_cases,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

ORGAN_SYSTEMS = {
    "gland": {"BRCA": 110, "OV": 38, "PRAD": 50},
    "squamous": {"BLCA": 41, "CESC": 31, "HNSC": 52, "LUSC": 50},
    "chest": {"LUAD": 53, "MESO": 9, "THCA": 51},
    "gut": {"COAD": 48, "PAAD": 18, "READ": 17, "STAD": 41},
    "liver": {"CHOL": 4, "LIHC": 37},
    "kidney": {"KICH": 7, "KIRC": 54, "KIRP": 29},
    "nerve": {"GBM": 17, "LGG": 53, "PCPG": 18},
    "blood": {"DLBC": 5, "LAML": 15, "THYM": 12},
    "connective": {"SARC": 26, "SKCM": 47, "UCEC": 55},
}
"""Cancer types with their numbers of tumors in TCGA, in tens."""
TYPES_AND_COUNTS = [pair for types in ORGAN_SYSTEMS.values() for pair in types.items()]
CANCER_TYPES = [name for name, _ in TYPES_AND_COUNTS]


@dataclass(frozen=True)
class Size:
    """A size of the data.

    Attributes:
        num_genes: Number of genes.
        num_patients: Number of patients, by role.
        num_pathways: Number of pathways.
        num_landmarks: Number of landmark genes.
    """

    num_genes: int
    num_patients: Mapping[str, int]
    num_pathways: int
    num_landmarks: int


SIZES = {
    "full": Size(60_483, {"train": 3000, "test": 1000}, 1000, 978),
    "small": Size(300, {"train": 400, "test": 200}, 30, 20),
}
LOWEST_BASELINE, HIGHEST_BASELINE = -4.8, 12.0
DETECTION_LIMIT = 2.0
# Activities, as standard deviations or, for the lineage, per unit of the map.
LINEAGE, OF_TYPE, OF_PATIENT = 5.0, 0.6, 0.4
DISTANCE_OF_TYPES, DISTANCE_OF_PATIENTS = (
    0.25,
    0.1,
)  # organ systems are at distance 1 from the map's centre
PURITY = (6, 2)  # parameters of a beta distribution
NOISE = 0.5
DECIMALS = 3
ROWS_PER_BLOCK = 16
BYTES_PER_VALUE = 4.446  # of the published files


@dataclass(frozen=True)
class Genes:
    """The properties of the genes and types, the same for all tumors.

    Attributes:
        names: The genes' names, shape (genes,).
        baseline: Level in the absence of activity, shape (genes,).
        pathway: Index of each gene's pathway, ascending, shape (genes,).
        loading: Level per unit of the pathway's activity, shape (genes,).
        place: Position of each type on the map, shape (types, 2).
        direction: Activity of each pathway per unit of the map, shape (2, pathways).
        of_type: Each type's own activity of each pathway, shape (types, pathways).
    """

    names: list[str]
    baseline: Floats
    pathway: Integers
    loading: Floats
    place: Floats
    direction: Floats
    of_type: Floats

    @classmethod
    def draw(cls, size: Size, seed: int) -> Genes:
        """Draws the genes."""
        random = random_stream(seed, 0)
        num_genes, num_pathways = size.num_genes, size.num_pathways
        num_types, num_systems = len(CANCER_TYPES), len(ORGAN_SYSTEMS)
        system = np.repeat(np.arange(num_systems), [len(types) for types in ORGAN_SYSTEMS.values()])
        center = _unit_vectors(random.permutation(num_systems) / num_systems)
        pathway = np.arange(num_genes) * num_pathways // num_genes
        return cls(
            names=_gene_names(num_genes, seed),
            baseline=random.uniform(LOWEST_BASELINE, HIGHEST_BASELINE, num_genes),
            pathway=pathway,
            loading=random.uniform(0.5, 1.5, num_genes),
            place=center[system] + random.normal(0, DISTANCE_OF_TYPES, (num_types, 2)),
            direction=LINEAGE * _unit_vectors(random.random(num_pathways)).T,
            of_type=random.normal(0, OF_TYPE, (num_types, num_pathways)),
        )

    def tumor(self, patient: int, cancer_type: int, seed: int) -> Floats:
        """Returns the levels in a patient's tumor, shape (genes,)."""
        random = random_stream(seed, 1, patient)
        purity = random.beta(*PURITY)
        place = purity * self.place[cancer_type] + random.normal(0, DISTANCE_OF_PATIENTS, 2)
        activity = place @ self.direction + purity * self.of_type[cancer_type]
        activity += random.normal(0, OF_PATIENT, len(activity))
        level: Floats = self.baseline + self.loading * activity[self.pathway]
        level += random.normal(0, NOISE, len(level))
        level[level < DETECTION_LIMIT] = 0
        return level

    def landmarks(self, num_landmarks: int) -> Integers:
        """Returns the indices of the landmark genes, shape (landmarks,).

        A pathway's landmark is the gene with the largest loading of those well above the detection
        limit.
        """
        strength = np.where(self.baseline > 2 * DETECTION_LIMIT, self.loading, 0)
        by_strength = np.lexsort((-strength, self.pathway))
        first = np.searchsorted(self.pathway, np.arange(num_landmarks))
        chosen: Integers = by_strength[first]
        return chosen


class P1b1Recipe(SyntheticRecipe):
    """P1B1's two files, with columns case_id, cancer_type and the genes, and its landmarks."""

    name = "p1b1"
    version = 1
    roles: ClassVar[Mapping[str, str]] = {
        "train": "P1B1.dev.train.csv",
        "test": "P1B1.dev.test.csv",
        "landmarks": "lincs1000.tsv",
    }

    def files(self, size: str, seed: int) -> list[SyntheticFile]:
        """Returns the training file, the test file and the table of the landmark genes."""
        genes = Genes.draw(SIZES[size], seed)
        files = []
        for role, patients in number_patients(SIZES[size].num_patients).items():
            estimate = int(len(patients) * len(genes.names) * BYTES_PER_VALUE)
            blocks = write_cases(
                genes.names,
                CANCER_TYPES,
                _cases(patients, seed),
                partial(genes.tumor, seed=seed),
                decimals=DECIMALS,
                rows_per_block=ROWS_PER_BLOCK,
            )
            files.append(SyntheticFile(self.roles[role], estimate, blocks))
        table = _landmark_table(genes, SIZES[size].num_landmarks)
        return [*files, SyntheticFile(self.roles["landmarks"], len(table), iter([table]))]


def _cases(patients: range, seed: int) -> list[tuple[int, int]]:
    """Returns each patient with a cancer type's index, drawn according to its frequency."""
    counts = np.array([count for _, count in TYPES_AND_COUNTS])
    random = random_stream(seed, 2, patients.start)
    types = random.choice(len(counts), len(patients), p=counts / counts.sum())
    return list(zip(patients, types, strict=True))


def _landmark_table(genes: Genes, num_landmarks: int) -> bytes:
    """Returns the landmark genes: number, pathway, identifier without and with its version."""
    lines = ["number\tpathway\tensembl\tgdc"]
    for number, gene in enumerate(genes.landmarks(num_landmarks), start=1):
        name = genes.names[gene]
        lines.append(f"{number}\tP{genes.pathway[gene]:04}\t{name.split('.')[0]}\t{name}")
    return "\n".join([*lines, ""]).encode()


def _gene_names(num_genes: int, seed: int) -> list[str]:
    """Returns identifiers in the style of Ensembl, with versions, in ascending order."""
    random = random_stream(seed, 3)
    numbers = np.sort(random.choice(4 * num_genes, num_genes, replace=False)) + 3
    versions = random.integers(1, 17, num_genes)
    return [f"ENSG{n:011}.{v}" for n, v in zip(numbers, versions, strict=True)]


def _unit_vectors(turns: Floats) -> Floats:
    """Returns the unit vectors at these angles, given in turns; shape (angles, 2)."""
    return np.stack([np.cos(2 * np.pi * turns), np.sin(2 * np.pi * turns)], axis=1)
