"""How the planted factors determine the columns of P1B3's synthetic feature tables.

A column is a weighted sum of a few factors, plus noise. Every factor contributes to many columns,
so any few hundred columns reflect all factors. Levels are written unchanged; counts,
such as those of a fragment in a molecule, are rounded; flags indicate that the sum exceeds a
threshold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    SmallFloats = NDArray[np.float32]

FACTORS_PER_COLUMN = 3
COMMUNALITIES = (0.3, 0.9)  # the share of a column's variance that comes from the factors
INCOMPLETE_SHARE = 0.03  # of the columns
MISSING_SHARE = 0.02  # of the values of an incomplete column


@dataclass(frozen=True)
class Columns:
    """The columns of a table: first levels, then counts, then flags.

    Attributes:
        loadings: Weights of the factors, shape (factors, columns).
        noise: Standard deviation of the noise, shape (columns,).
        center: Shape (columns,); of a flag, the threshold.
        spread: Shape (columns,).
        missing: Probability of a missing value, shape (columns,).
        first_count: Index of the first column with counts.
        first_flag: Index of the first column with flags, 0 or 1.
    """

    loadings: SmallFloats
    noise: SmallFloats
    center: SmallFloats
    spread: SmallFloats
    missing: SmallFloats
    first_count: int
    first_flag: int

    @classmethod
    def draw(
        cls,
        num_factors: int,
        num_columns: int,
        num_counts: int,
        num_flags: int,
        random: np.random.Generator,
    ) -> Columns:
        """Draws the columns."""
        num_levels = num_columns - num_counts - num_flags
        ranks = random.random((num_factors, num_columns)).argsort(axis=0)
        loadings = random.normal(size=ranks.shape) * (ranks < FACTORS_PER_COLUMN)
        communality = random.uniform(*COMMUNALITIES, num_columns)
        loadings *= np.sqrt(communality) / np.linalg.norm(loadings, axis=0)
        center = [
            random.uniform(-2, 10, num_levels),
            random.uniform(0.5, 3, num_counts),
            random.uniform(-1, 1.5, num_flags),
        ]
        incomplete = random.random(num_columns) < INCOMPLETE_SHARE
        return cls(
            loadings=loadings.astype(np.float32),
            noise=np.sqrt(1 - communality).astype(np.float32),
            center=np.concatenate(center).astype(np.float32),
            spread=random.uniform(0.5, 2, num_columns).astype(np.float32),
            missing=(MISSING_SHARE * incomplete).astype(np.float32),
            first_count=num_levels,
            first_flag=num_levels + num_counts,
        )

    def values(self, factors: Floats, random: np.random.Generator) -> SmallFloats:
        """Returns rows of the table, shape (rows, columns); missing values are NaN.

        Args:
            factors: Mean 0 and variance 1, shape (rows, factors).
            random: The random stream of the noise.
        """
        signal = factors.astype(np.float32) @ self.loadings
        standard: SmallFloats = signal + self.noise * random.standard_normal(
            signal.shape, dtype=np.float32
        )
        result = self.center + self.spread * standard
        counts, flags = slice(self.first_count, self.first_flag), slice(self.first_flag, None)
        result[:, counts] = np.maximum(np.rint(result[:, counts]), 0)
        result[:, flags] = standard[:, flags] > self.center[flags]
        incomplete = np.flatnonzero(self.missing)
        lost = random.random((len(result), len(incomplete))) < self.missing[incomplete]
        result[:, incomplete] = np.where(lost, np.nan, result[:, incomplete])
        return result
