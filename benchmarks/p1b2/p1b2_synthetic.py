"""Synthetic P1B2 data: somatic mutations of tumors of ten types, added up by gene.

4,000 patients give a tumor each; 3,000 of them train and 1,000 test, and the types are balanced, as
CANDLE's undersampling leaves them. What is written is, for a tumor and a gene, the sum of the
impacts of the mutations that hit the gene: integers, nearly all of them 0. There are two kinds of
mutations:

- Passengers, which say little. Their number, the tumor's burden, spreads widely around its type's
  typical burden, and some tumors are hypermutated. They hit a gene in proportion to its length and
  to the rate at which its chromatin region mutates in this type. Their impact is mostly low.
- Drivers. Every type has genes of its own that its tumors mutate often, a few of them in every
  other tumor and most of them rarely; other genes drive all types. Their impact is high.

So the first driver genes tell some tumors from the others at once; the regions and the rare drivers
add up to more, which takes longer to learn; and a tumor with few mutations stays undecided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from candle_p1.data.number_text import format_rows
from candle_p1.data.synthetic import SyntheticFile, SyntheticRecipe

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

CANCER_TYPES = ("BRCA", "COAD", "GBM", "HNSC", "LUAD", "OV", "PRAD", "THCA", "UCEC", "others")


@dataclass(frozen=True)
class Size:
    """What differs between the sizes.

    Attributes:
        num_genes: Columns of numbers.
        num_patients: Rows, by role.
        num_regions: Chromatin regions.
        num_drivers: Driver genes of each type, and again of all types together.
        burden: Typical passengers of a tumor.
    """

    num_genes: int
    num_patients: Mapping[str, int]
    num_regions: int
    num_drivers: int
    burden: float


SIZES = {
    "full": Size(28_204, {"train": 3000, "test": 1000}, 60, 40, 500.0),
    "small": Size(300, {"train": 400, "test": 200}, 10, 6, 8.0),
}
NUM_PROCESSES = 12
PROCESS_SPREAD = 1.6
MAIN = 0.4
AGEING = 0.2
MIX_OF_PATIENT = 4.0
BURDEN_SPREAD_OF_TYPES = 0.5
BURDEN_SPREAD = 0.7
FIRST_DRIVER_FREQUENCY = 0.1
DRIVER_DECAY = 0.8
IMPACTS = np.array([1, 2, 3, 4])
PASSENGER_IMPACTS = (0.45, 0.3, 0.2, 0.05)
DRIVER_IMPACTS = (0.0, 0.1, 0.4, 0.5)
HYPERMUTATED = 0.02
HYPER = 4
ROWS_PER_BLOCK = 32
BYTES_PER_VALUE = 2.005


@dataclass(frozen=True)
class Genome:
    """What is the same for all tumors.

    Attributes:
        names: The genes' names.
        process: Share of each gene in a process' mutations, summed up; shape (processes, genes).
        mix: Share of each process in a type's passengers, shape (types, processes).
        drivers: Driver genes of each type, shape (types, drivers).
        frequency: Share of a type's tumors in which these are mutated, shape (types, drivers).
        burden: Typical passengers of each type's tumors, shape (types,).
    """

    names: list[str]
    process: Floats
    mix: Floats
    drivers: Integers
    frequency: Floats
    burden: Floats

    @classmethod
    def draw(cls, size: Size, seed: int) -> Genome:
        """Draws the genome."""
        random = _random(seed, 0)
        num_types, num_genes = len(CANCER_TYPES), size.num_genes
        length = random.lognormal(0, 0.9, num_genes)
        region = np.arange(num_genes) * size.num_regions // num_genes
        rate = random.lognormal(0, PROCESS_SPREAD, (NUM_PROCESSES, size.num_regions))
        process = np.cumsum(length * rate[:, region], axis=1)
        process /= process[:, -1:]
        mix = (1 - MAIN - AGEING) * random.dirichlet(np.ones(NUM_PROCESSES), num_types)
        mix[:, 0] += AGEING
        main = random.permutation(np.arange(num_types) // 2)
        mix[np.arange(num_types), 1 + main] += MAIN
        drivers = random.permutation(num_genes)[: (num_types + 1) * size.num_drivers]
        drivers = drivers.reshape(num_types + 1, size.num_drivers)
        shared = np.broadcast_to(drivers[-1], (num_types, size.num_drivers))
        decay = np.arange(1, size.num_drivers + 1) ** -DRIVER_DECAY
        own = FIRST_DRIVER_FREQUENCY * decay * random.uniform(0.4, 1.0, (num_types, len(decay)))
        common = FIRST_DRIVER_FREQUENCY * decay * random.uniform(0.2, 1.0, (num_types, len(decay)))
        return cls(
            _gene_names(num_genes, random),
            process,
            mix,
            np.concatenate([drivers[:-1], shared], axis=1),
            np.concatenate([own, common], axis=1),
            size.burden * np.exp(BURDEN_SPREAD_OF_TYPES * random.permutation(np.linspace(-1.5, 1.5, num_types))),
        )

    def tumor(self, patient: int, cancer_type: int, seed: int) -> Integers:
        """Returns the impact on each gene in a patient's tumor, shape (genes,)."""
        random = _random(seed, 1, patient)
        hyper = HYPER if random.random() < HYPERMUTATED else 1
        burden = self.burden[cancer_type] * random.lognormal(0, BURDEN_SPREAD) * hyper
        mix = random.dirichlet(MIX_OF_PATIENT * self.mix[cancer_type] + 0.01)
        num = random.poisson(burden * mix)
        passengers = np.concatenate(
            [np.searchsorted(p, random.random(n)) for p, n in zip(self.process, num)]
        )
        mutated = random.random(self.drivers.shape[1]) < self.frequency[cancer_type]
        drivers = self.drivers[cancer_type, mutated]
        impacts = np.concatenate(
            [
                random.choice(IMPACTS, len(passengers), p=PASSENGER_IMPACTS),
                random.choice(IMPACTS, len(drivers), p=DRIVER_IMPACTS),
            ]
        )
        hit = np.concatenate([passengers, drivers])
        return np.bincount(hit, impacts, minlength=len(self.names)).astype(np.int64)


class P1b2Recipe(SyntheticRecipe):
    """P1B2's two files: a header, then case_id, cancer_type and the genes."""

    name = "p1b2"
    version = 1
    roles: ClassVar[Mapping[str, str]] = {"train": "P1B2.train.csv", "test": "P1B2.test.csv"}

    def files(self, size: str, seed: int) -> list[SyntheticFile]:
        """Returns the training and the test file."""
        genome = Genome.draw(SIZES[size], seed)
        files, first = [], 0
        for role, name in self.roles.items():
            patients = range(first, first + SIZES[size].num_patients[role])
            estimate = int((len(patients) + 4) * SIZES[size].num_genes * BYTES_PER_VALUE)
            files.append(SyntheticFile(name, estimate, _blocks(genome, patients, seed)))
            first = patients.stop
        return files


def _blocks(genome: Genome, patients: range, seed: int) -> Iterator[bytes]:
    """Yields the header, then the patients' rows, whose types come in random order."""
    yield ",".join(["case_id", "cancer_type", *genome.names]).encode() + b"\n"
    types = np.arange(len(patients)) % len(CANCER_TYPES)
    _random(seed, 2, patients.start).shuffle(types)
    for start in range(0, len(patients), ROWS_PER_BLOCK):
        block = range(start, min(start + ROWS_PER_BLOCK, len(patients)))
        prefixes = [
            b"%s,%s" % (case_id(patients[row]), CANCER_TYPES[types[row]].encode()) for row in block
        ]
        impacts = np.stack([genome.tumor(patients[row], types[row], seed) for row in block])
        yield format_rows(prefixes, impacts, decimals=0)


def case_id(patient: int) -> bytes:
    """Returns a patient's barcode in TCGA's style."""
    return b"TCGA-S%d-%04d" % (patient // 1000, patient % 1000)


def _gene_names(num_genes: int, random: np.random.Generator) -> list[str]:
    """Returns symbols in HGNC's style: two to four letters and a number; all differ."""
    letters = np.array(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
    names: dict[str, None] = {}
    while len(names) < num_genes:
        stem = "".join(random.choice(letters, random.integers(2, 5)))
        names[f"{stem}{random.integers(1, 400)}"] = None
    return list(names)


def _random(seed: int, *key: int) -> np.random.Generator:
    """Returns the stream of random numbers for one purpose; streams do not depend on each other."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
