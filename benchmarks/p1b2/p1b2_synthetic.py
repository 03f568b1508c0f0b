"""Synthetic P1B2 data: the somatic mutations in tumors of ten types, summed by gene.

Each of 4,000 patients contributes a tumor; 3,000 are for training and 1,000 for testing. The types
are balanced, as after CANDLE's undersampling. The value for a tumor and a gene is the sum of the
impacts of all mutations of the gene: an integer, nearly always 0. There are two kinds of mutations:

- Passengers come from mutational processes. Ageing is active in all types. Every type also has a
  main process (such as smoking), which it shares with one other type, and traces of the others. A
  process has a specific rate in each chromatin region, and mutates genes there in proportion to
  their length. The share of each process in a tumor's passengers varies between patients around the
  type's typical mix. The number of passengers, the tumor's burden, varies widely around the type's
  typical burden, and some tumors are hypermutated. Most passengers have a low impact.
- Drivers: every type has its own driver genes, which are mutated in some of its tumors, the first
  ones most often; other driver genes are common to all types. Their impact is high.

No single gene is very informative. The differences between types are spread over thousands of genes
and take many steps to learn, and because the mixes overlap, many tumors remain ambiguous. A small
data set has few genes and few tumors, so its drivers are frequent and its mixes vary little.
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

CANCER_TYPES = ("BRCA", "GBM", "HNSC", "KIRC", "LGG", "LUAD", "OV", "THCA", "UCEC", "others")
"""The nine most frequent types in the GDC, and all others."""

LETTERS = "ABCDEFGHIKLMNPRSTUXZ"  # of the names of genes


@dataclass(frozen=True)
class Size:
    """A size of the data.

    Attributes:
        num_genes: Number of genes.
        num_patients: Number of patients, by role.
        num_regions: Number of chromatin regions.
        burden: Passengers of a typical tumor.
        steadiness: How close the patients' mixes of processes are to their type's: the sum of the
            parameters of a Dirichlet distribution.
        num_drivers: Driver genes of each type, and as many common to all types.
        driver_frequency: Maximum share of tumors in which the first driver is mutated.
        driver_decay: The frequency of driver k is proportional to k ** -driver_decay.
    """

    num_genes: int
    num_patients: Mapping[str, int]
    num_regions: int
    burden: float
    steadiness: float
    num_drivers: int
    driver_frequency: float
    driver_decay: float


SIZES = {
    "full": Size(28_204, {"train": 3000, "test": 1000}, 60, 500, 7, 40, 0.1, 0.8),
    "small": Size(300, {"train": 320, "test": 160}, 10, 16, 20, 8, 0.65, 0.5),
}
NUM_PROCESSES = 12
AGEING_SHARE, MAIN_SHARE = 0.2, 0.4  # of a type's passengers
# Standard deviations of logarithms.
RATE_SPREAD, LENGTH_SPREAD, BURDEN_SPREAD = 1.6, 0.9, 0.7
LARGEST_BURDEN_OF_TYPE = 2.1  # relative to the typical one; the smallest is the reciprocal
HYPERMUTATED_SHARE, HYPERMUTATION = 0.02, 4
IMPACTS = (1, 2, 3, 4)
PASSENGER_IMPACTS = (0.45, 0.3, 0.2, 0.05)  # the probability of each
DRIVER_IMPACTS = (0, 0.1, 0.4, 0.5)
ROWS_PER_BLOCK = 32
BYTES_PER_VALUE = 2.005  # of the published files


@dataclass(frozen=True)
class Genome:
    """The properties of genes and types, the same for all tumors.

    Attributes:
        names: The genes' names, shape (genes,).
        hits: Cumulative share of the genes in a process's mutations, shape (processes, genes).
        mix: Share of each process in a type's passengers, shape (types, processes).
        burden: Passengers of a type's typical tumor, shape (types,).
        drivers: The driver genes of each type, shape (types, drivers).
        frequency: Share of a type's tumors with a mutation of each, shape (types, drivers).
        steadiness: See Size.
    """

    names: list[str]
    hits: Floats
    mix: Floats
    burden: Floats
    drivers: Integers
    frequency: Floats
    steadiness: float

    @classmethod
    def draw(cls, size: Size, seed: int) -> Genome:
        """Draws the genome."""
        random = random_stream(seed, 0)
        num_types = len(CANCER_TYPES)
        region = np.arange(size.num_genes) * size.num_regions // size.num_genes
        rate = random.lognormal(0, RATE_SPREAD, (NUM_PROCESSES, size.num_regions))
        length = random.lognormal(0, LENGTH_SPREAD, size.num_genes)
        hits = np.cumsum(length * rate[:, region], axis=1)
        mix = random.dirichlet(np.ones(NUM_PROCESSES), num_types)
        mix *= 1 - AGEING_SHARE - MAIN_SHARE
        mix[:, 0] += AGEING_SHARE
        mix[np.arange(num_types), 1 + random.permutation(num_types) // 2] += MAIN_SHARE
        burden = size.burden * LARGEST_BURDEN_OF_TYPE ** np.linspace(-1, 1, num_types)
        drivers = random.permutation(size.num_genes)[: (num_types + 1) * size.num_drivers]
        own, common = np.split(drivers.reshape(num_types + 1, -1), [num_types])
        frequency = np.arange(1, size.num_drivers + 1.0) ** -size.driver_decay
        varying = random.uniform(0.3, 1, (num_types, 2 * size.num_drivers))
        return cls(
            names=_gene_names(size.num_genes, seed),
            hits=hits / hits[:, -1:],
            mix=mix,
            burden=random.permutation(burden),
            drivers=np.hstack([own, np.broadcast_to(common, own.shape)]),
            frequency=size.driver_frequency * np.tile(frequency, 2) * varying,
            steadiness=size.steadiness,
        )

    def tumor(self, patient: int, cancer_type: int, seed: int) -> Integers:
        """Returns the impact on each gene in a patient's tumor, shape (genes,)."""
        random = random_stream(seed, 1, patient)
        burden = self.burden[cancer_type] * random.lognormal(0, BURDEN_SPREAD)
        if random.random() < HYPERMUTATED_SHARE:
            burden *= HYPERMUTATION
        nums = random.poisson(burden * random.dirichlet(self.steadiness * self.mix[cancer_type]))
        passengers = [
            np.searchsorted(hits, random.random(num))
            for hits, num in zip(self.hits, nums, strict=True)
        ]
        mutated = random.random(self.drivers.shape[1]) < self.frequency[cancer_type]
        drivers = self.drivers[cancer_type, mutated]
        impacts = [
            random.choice(IMPACTS, nums.sum(), p=PASSENGER_IMPACTS),
            random.choice(IMPACTS, len(drivers), p=DRIVER_IMPACTS),
        ]
        genes = np.concatenate([*passengers, drivers])
        sums = np.bincount(genes, np.concatenate(impacts), minlength=len(self.names))
        return sums.astype(np.int64)


class P1b2Recipe(SyntheticRecipe):
    """P1B2's two files, with columns case_id, cancer_type and the genes."""

    name = "p1b2"
    version = 1
    roles: ClassVar[Mapping[str, str]] = {"train": "P1B2.train.csv", "test": "P1B2.test.csv"}

    def files(self, size: str, seed: int) -> list[SyntheticFile]:
        """Returns the training and the test file."""
        genome = Genome.draw(SIZES[size], seed)
        files = []
        for role, patients in number_patients(SIZES[size].num_patients).items():
            estimate = int(len(patients) * len(genome.names) * BYTES_PER_VALUE)
            blocks = write_cases(
                genome.names,
                CANCER_TYPES,
                _cases(patients, seed),
                partial(genome.tumor, seed=seed),
                decimals=0,
                rows_per_block=ROWS_PER_BLOCK,
            )
            files.append(SyntheticFile(self.roles[role], estimate, blocks))
        return files


def _cases(patients: range, seed: int) -> list[tuple[int, int]]:
    """Returns each patient with the index of a cancer type; all types are equally frequent."""
    types = np.arange(len(patients)) % len(CANCER_TYPES)
    shuffled = random_stream(seed, 2, patients.start).permutation(types)
    return list(zip(patients, shuffled, strict=True))


def _gene_names(num_genes: int, seed: int) -> list[str]:
    """Returns symbols that look like gene names (letters and a number), in alphabetical order."""
    random = random_stream(seed, 3)
    names: set[str] = set()
    while len(names) < num_genes:
        letters = [LETTERS[i] for i in random.integers(0, len(LETTERS), 4)]
        names.add(f"{''.join(letters[: random.integers(3, 5)])}{random.integers(1, 1000)}")
    return sorted(names)
