"""The algorithms by which a convolution can be computed, and which of them a layer takes.

The choice follows from the shape by a rule, not from a timing, so all ranks take the same, every
time. `make bench-conv` times the algorithms and says how often the rule chose the fastest.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress

from candle_p1.models.fast import CHUNK

ALGORITHMS = ("plain", "whole", "chunked", "direct", "tiled")
"""Keras's own operations, and those of candle_p1.models.fast.convolutions."""
IN_BLOCKS = ("direct", "tiled")
"""The algorithms that compute a pooling together with the convolution; for float32."""

TILE = 32
"""The positions that are transformed together; as in candle_p1/ops/source/tiles/steps.h."""
PLANES = 2 + 3 * (TILE // 2 - 1)
"""The real products of matrices that a tile takes: one for each of the two real frequencies, and
three for each of the complex ones."""
WIDTH = 32
"""Channels and filters of tiles are padded to a multiple of this."""
MAX_TAPS = TILE // 2
MIN_POSITIONS = 256
"""Below this, the transform of the kernel takes too large a part."""
MAX_POOL = 255
"""The longest pool that a convolution takes over, as it keeps the place of a maximum in a byte."""

TILED_TAPS, TILED_PRODUCTS = 4, 1024
"""The taps, and the product of channels and filters, from which on tiles are the fastest."""
DIRECT_FILTERS = 16
"""The filters of a vector of floats. With fewer, the direct form gains only if it pools the outputs
of a single channel."""
CHUNKED_POSITIONS, CHUNKED_FILTERS = 20_000, 64
"""Where oneDNN's gradient of a kernel leaves the caches, so that chunks are faster."""


@dataclass(frozen=True)
class Convolution:
    """A 1D convolution with a stride of one and no padding, its bias, relu and pooling."""

    length: int  # of its input
    taps: int  # of its kernel
    channels: int
    filters: int
    pool: int = 1  # the positions whose maximum is taken

    @property
    def positions(self) -> int:
        """The outputs of a sample before pooling."""
        return self.length - self.taps + 1

    @property
    def algorithms(self) -> list[str]:
        """The algorithms by which it can be computed."""
        fits = self.pool <= min(MAX_POOL, self.positions)
        tiled = 1 < self.taps <= MAX_TAPS and self.positions >= MIN_POSITIONS
        tiled &= fits and self.pool <= TILE * (TILE - self.taps + 1)
        possible = (True, True, self.positions > CHUNK, fits, tiled)
        return list(compress(ALGORITHMS, possible))

    def choose(self, *, in_blocks: bool = True) -> str:
        """Returns the algorithm that is mostly the fastest of those that are not Keras's own.

        `in_blocks` is whether IN_BLOCKS can compute it.
        """
        possible = [each for each in self.algorithms if in_blocks or each not in IN_BLOCKS]
        many = self.channels * self.filters >= TILED_PRODUCTS
        if "tiled" in possible and self.taps >= TILED_TAPS and many:
            return "tiled"
        pools_one = self.channels == 1 and self.pool > 1
        if "direct" in possible and (self.filters >= DIRECT_FILTERS or pools_one):
            return "direct"
        is_large = self.positions > CHUNKED_POSITIONS and self.filters >= CHUNKED_FILTERS
        return "chunked" if is_large else "whole"


def tile_products(taps: int, channels: int, filters: int) -> float:
    """Returns the multiplications that tiles take in products, for each output position."""
    padded_channels, padded_filters = (-(-num // WIDTH) * WIDTH for num in (channels, filters))
    return PLANES * padded_channels * padded_filters / (TILE - taps + 1)
