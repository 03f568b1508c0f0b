"""The planted model of P1B3's synthetic data: how drugs act on the growth of cell lines.

A cell line is characterised by the activities of its pathways, which depend in part on its tissue.
A drug is characterised by its mechanism, which acts on one pathway, by its affinity, the strength
of this action, and by its chemistry. They determine the response, a Hill curve of growth (percent
of an untreated culture; below zero the cells die) over log10 of the molar concentration:

- log EC50 is minus the potency. A drug's potency depends on its chemistry and on a part that no
  feature reflects. In a cell line it increases with the activity of the drug's pathway, in
  proportion to the affinity, and with proliferation, which is the activity of the first pathway.
- The floor, the growth at high concentrations, depends on the mechanism: cytotoxic mechanisms kill
  cells, and cytostatic ones stop their growth.

Drugs are screened as at the NCI: all of them at one dose, and those that reduce growth the most
also at five doses.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

LINES_BY_TISSUE = {
    "breast": "BT-549 HS-578T MCF7 MDA-MB-231 T-47D",
    "central nervous system": "SF-268 SF-295 SF-539 SNB-19 SNB-75 U251",
    "colon": "COLO-205 HCC-2998 HCT-116 HCT-15 HT29 KM12 SW-620",
    "leukemia": "CCRF-CEM HL-60 K-562 MOLT-4 RPMI-8226 SR",
    "lung": "A549 EKVX HOP-62 HOP-92 NCI-H226 NCI-H23 NCI-H322M NCI-H460 NCI-H522",
    "melanoma": "LOX M14 MALME-3M MDA-MB-435 MDA-N SK-MEL-2 SK-MEL-28 SK-MEL-5 UACC-257 UACC-62",
    "ovary": "IGROV1 NCI-ADR-RES OVCAR-3 OVCAR-4 OVCAR-5 OVCAR-8 SK-OV-3",
    "prostate": "DU-145 PC-3",
    "kidney": "786-0 A498 ACHN CAKI-1 RXF-393 SN12C TK-10 UO-31",
}
"""The 60 cell lines of the NCI60 panel."""

NUM_MECHANISMS = 8  # also of pathways: a mechanism acts on the pathway with its index
NUM_CHEMISTRY_FACTORS = 4
TISSUE_SHARE = 0.5  # of the variance of a pathway's activity

MEAN_POTENCY = 4.34  # -log10 of a molar concentration, like all potencies here
SD_POTENCY_BY_CHEMISTRY = 0.6
SD_POTENCY_BY_NOTHING_ELSE = 0.3
POTENCY_PER_ACTIVITY = 0.3
POTENCY_PER_PROLIFERATION = 0.08
SD_POTENCY_OF_PAIR = 0.2  # of a drug and a line

TOP = 96.0  # percent; growth in the absence of an effect
FLOORS_CYTOTOXIC = (-120.0, -60.0)  # percent; the range before clipping at LEAST_GROWTH
FLOORS_CYTOSTATIC = (-20.0, 65.0)
LEAST_GROWTH, LARGEST_GROWTH = -100, 270
SD_MEASUREMENT = 6.0
OUTLIER_SHARE = 0.001
MEAN_OUTLIER = 60.0

ONE_DOSE = (-5,)
FIVE_DOSES = (-8, -7, -6, -5, -4)
SD_OTHER_CRITERIA = 20.0  # percent of growth; the weight of other selection criteria


@dataclass(frozen=True)
class CellLines:
    """The cell lines.

    Attributes:
        names: Their names, sorted.
        activities: Activities of the pathways, shape (lines, mechanisms); mean 0, variance 1.
    """

    names: tuple[str, ...]
    activities: Floats

    @classmethod
    def draw(cls, random: np.random.Generator) -> CellLines:
        """Draws the activities."""
        tissue_of = {
            name: i for i, names in enumerate(LINES_BY_TISSUE.values()) for name in names.split()
        }
        names = tuple(sorted(tissue_of))
        by_tissue = random.normal(size=(len(LINES_BY_TISSUE), NUM_MECHANISMS))
        own = random.normal(size=(len(names), NUM_MECHANISMS))
        tissues = [tissue_of[name] for name in names]
        mixed = np.sqrt(TISSUE_SHARE) * by_tissue[tissues] + np.sqrt(1 - TISSUE_SHARE) * own
        return cls(names, _standardised(mixed))


@dataclass(frozen=True)
class Drugs:
    """The drugs' properties that determine the responses.

    Attributes:
        mechanism: Index of the mechanism, shape (drugs,).
        affinity: Strength of the action, shape (drugs,).
        chemistry: Chemical properties, shape (drugs, factors); mean 0, variance 1.
        potency: Potency in a line with average activities, shape (drugs,).
        slope: Hill coefficient, shape (drugs,).
        floor: Growth at high concentrations in percent, shape (drugs,).
    """

    mechanism: Integers
    affinity: Floats
    chemistry: Floats
    potency: Floats
    slope: Floats
    floor: Floats

    @classmethod
    def draw(cls, num_drugs: int, random: np.random.Generator) -> Drugs:
        """Draws the drugs, an equal number for each mechanism, give or take one."""
        mechanism = random.permutation(num_drugs) % NUM_MECHANISMS
        chemistry = _standardised(random.normal(size=(num_drugs, NUM_CHEMISTRY_FACTORS)))
        by_chemistry = chemistry @ np.full(NUM_CHEMISTRY_FACTORS, NUM_CHEMISTRY_FACTORS**-0.5)
        unseen = _standardised(random.normal(size=num_drugs))
        potency = (
            MEAN_POTENCY
            + SD_POTENCY_BY_CHEMISTRY * by_chemistry
            + SD_POTENCY_BY_NOTHING_ELSE * unseen
        )
        cytotoxic, cytostatic = (
            random.uniform(*floors, num_drugs) for floors in (FLOORS_CYTOTOXIC, FLOORS_CYTOSTATIC)
        )
        floor = np.where(mechanism % 2, cytotoxic, cytostatic)
        return cls(
            mechanism=mechanism,
            affinity=random.lognormal(-0.1, 0.4, num_drugs),
            chemistry=chemistry,
            potency=potency,
            slope=random.lognormal(np.log(1.3), 0.25, num_drugs),
            floor=np.clip(floor, LEAST_GROWTH, None),
        )

    def take(self, indices: Integers) -> Drugs:
        """Returns some of the drugs."""
        return Drugs(*(getattr(self, field.name)[indices] for field in fields(self)))

    def factors(self) -> Floats:
        """Returns what the features of a drug reflect, shape (drugs, factors); variance 1.

        These are the affinity for each pathway, which is zero for all but one, and the chemistry.
        """
        affinities = np.zeros((len(self.mechanism), NUM_MECHANISMS))
        affinities[np.arange(len(self.mechanism)), self.mechanism] = self.affinity
        return np.hstack([_standardised(affinities), self.chemistry])

    def log_ec50(self, lines: CellLines) -> Floats:
        """Returns log10 of the EC50 in each line, shape (drugs, lines)."""
        acting = self.affinity[:, np.newaxis] * lines.activities.T[self.mechanism]
        proliferation = lines.activities[:, 0]
        potency = self.potency[:, np.newaxis] + POTENCY_PER_PROLIFERATION * proliferation
        result: Floats = -(potency + POTENCY_PER_ACTIVITY * acting)
        return result

    def growth(self, log_concentration: float, log_ec50: Floats) -> Floats:
        """Returns the Hill curves at a concentration, without noise: percent, (drugs, lines)."""
        exponent = self.slope[:, np.newaxis] * (log_ec50 - log_concentration)
        floor = self.floor[:, np.newaxis]
        result: Floats = TOP - (TOP - floor) / (1 + 10**exponent)
        return result

    def screen(
        self, log_concentrations: Integers, lines: CellLines, random: np.random.Generator
    ) -> Floats:
        """Returns measured growth in whole percent, shape (drugs, lines, concentrations)."""
        log_ec50 = self.log_ec50(lines)
        log_ec50 += random.normal(0, SD_POTENCY_OF_PAIR, log_ec50.shape)
        growth = np.stack([self.growth(dose, log_ec50) for dose in log_concentrations], axis=-1)
        growth += random.normal(0, SD_MEASUREMENT, growth.shape)
        outlier = random.random(growth.shape) < OUTLIER_SHARE
        growth[outlier] += random.exponential(MEAN_OUTLIER, outlier.sum())
        measured: Floats = np.clip(np.rint(growth), LEAST_GROWTH, LARGEST_GROWTH)
        return measured


def most_active(growth: Floats, num: int, random: np.random.Generator) -> NDArray[np.bool_]:
    """Returns approximately which drugs reduce the growth of all lines the most, shape (drugs,).

    Args:
        growth: Percent, shape (drugs, lines).
        num: The number of drugs to choose.
        random: The random stream of other selection criteria.
    """
    criterion = growth.mean(axis=1) + random.normal(0, SD_OTHER_CRITERIA, len(growth))
    chosen = np.zeros(len(growth), bool)
    chosen[criterion.argsort()[:num]] = True
    return chosen


def _standardised(values: Floats) -> Floats:
    result: Floats = (values - values.mean(axis=0)) / values.std(axis=0)
    return result
