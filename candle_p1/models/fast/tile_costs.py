"""What the convolution by tiles costs, next to the direct one: how many multiplications each takes.

The sizes are those of candle_p1/ops/source/tiles/steps.h.
"""

from __future__ import annotations

TILE = 32
"""The positions that are transformed together."""
PLANES = 2 + 3 * (TILE // 2 - 1)
"""The real products of matrices that a tile takes: one for each of the two real frequencies, and
three for each of the complex ones."""
WIDTH = 32
"""Channels and filters are padded to a multiple of this."""
TRANSFORM = 650
"""The transform of a tile, of one channel, takes as long as so many multiplications in a product of
matrices; measured on a processor with AVX-512."""
MAX_TAPS = TILE // 2
MIN_POSITIONS = 256
"""Below this, the transform of the kernel takes too large a part."""
MIN_GAIN = 1.25
"""The estimate must promise this much, as it knows nothing of caches."""


def pay(positions: int, taps: int, channels: int, filters: int) -> bool:
    """Returns whether tiles are the faster form for this convolution."""
    return (
        positions >= MIN_POSITIONS
        and 1 < taps <= MAX_TAPS
        and gain(taps, channels, filters) >= MIN_GAIN
    )


def gain(taps: int, channels: int, filters: int) -> float:
    """Returns the estimated time of the direct form, divided by that of tiles."""
    padded = [-(-num // WIDTH) * WIDTH for num in (channels, filters)]
    transforms = TRANSFORM * sum(padded) / (TILE - taps + 1)
    return taps * channels * filters / (products(taps, *padded) + transforms)


def products(taps: int, channels: int, filters: int) -> float:
    """Returns the multiplications in the products of matrices, for each output position."""
    return PLANES * channels * filters / (TILE - taps + 1)
