"""What a convolution costs by each algorithm: its operations, its bytes and a machine's rates.

An algorithm's time is a sum of terms: operations divided by the rate of products of large matrices,
and bytes divided by the rate of copying. Each term has a factor, which says how much slower than at
these rates its work is done, or how often it is done. `make bench-conv` times convolutions of other
shapes than the benchmarks' and fits the factors.

The same factors, at the rates of the machine that they were fitted on, decide which algorithm a
layer takes. Nothing is timed for that, so all ranks take the same one, every time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from candle_p1.models.fast import CHUNK

if TYPE_CHECKING:
    from collections.abc import Mapping

ALGORITHMS = ("plain", "whole", "chunked", "direct", "tiled")
"""Keras's own operations, and those of candle_p1.models.fast.convolutions."""
IN_BLOCKS = ("direct", "tiled")
"""The algorithms that compute a pooling together with the convolution."""

TILE = 32
"""The positions that are transformed together; as in candle_p1/ops/source/tiles/steps.h."""
PLANES = 2 + 3 * (TILE // 2 - 1)
"""The real products of matrices that a tile takes: one for each of the two real frequencies, and
three for each of the complex ones."""
WIDTH = 32
"""Channels and filters of tiles are padded to a multiple of this."""
LANES = 16
"""Those of other products to a multiple of this."""
MAX_TAPS = TILE // 2
MIN_POSITIONS = 256
"""Below this, the transform of the kernel takes too large a part."""
MAX_POOL = 255
"""The longest pool that a convolution takes over, as it keeps the place of a maximum in a byte."""
LONG = 8192
"""Positions whose rows, of the input and of the output's gradient, have the size of a second-level
cache of 1 MB. In longer sequences the gradient of a kernel is slower than its operations."""
CROWDED = 20_000
"""Positions whose rows nearly fill an eighth of a third-level cache of 32 MB, where rows of 128
channels meet."""
LATENCY = 4
FLOPS_PER_CYCLE = 2 * 2 * LANES
MAX_CROWDING = 8
PER_POSITION = 1000
"""Operations in whose time the work is expressed that every position takes, whatever its width."""


@dataclass(frozen=True)
class Rates:
    """What a machine reaches; see candle_p1.bench.roofline.

    Attributes:
        flops_per_s: In products of large matrices.
        bytes_per_s: In copying a large array: bytes read plus bytes written.
    """

    flops_per_s: float
    bytes_per_s: float

    def faster(self, other: Rates) -> Rates:
        """Returns the higher of each rate."""
        return Rates(
            max(self.flops_per_s, other.flops_per_s), max(self.bytes_per_s, other.bytes_per_s)
        )


@dataclass(frozen=True)
class Convolution:
    """A 1D convolution with a stride of one and no padding, its bias, relu and pooling.

    Attributes:
        length: Of its input; if there is a convolution before it, that one's.
        taps: The length of its kernel.
        channels: Of its input.
        filters: Of its output.
        pool: The positions whose maximum is taken.
        batch: The samples of a step.
        first_taps: The length of the kernel of a rectified convolution of one channel before it,
            which makes the channels; 0: there is none.
        gives_gradient: Whether the gradient of the input is wanted.
    """

    length: int
    taps: int
    channels: int
    filters: int
    pool: int = 1
    batch: int = 1
    first_taps: int = 0
    gives_gradient: bool = False

    @property
    def positions(self) -> int:
        """The outputs of a sample before pooling."""
        return self.length - max(self.first_taps - 1, 0) - self.taps + 1

    @property
    def separate(self) -> list[Convolution]:
        """The convolutions as layers of their own."""
        if not self.first_taps:
            return [self]
        first = replace(
            self, taps=self.first_taps, channels=1, filters=self.channels, pool=1, first_taps=0
        )
        own = replace(self, length=first.positions, first_taps=0, gives_gradient=True)
        return [first, own]

    @property
    def algorithms(self) -> list[str]:
        """The algorithms by which it can be computed."""
        fits = self.pool <= min(MAX_POOL, self.positions)
        tiled = 1 < self.taps <= MAX_TAPS and self.positions >= MIN_POSITIONS
        possible = {
            "plain": True,
            "whole": True,
            "chunked": self.positions > CHUNK,
            "direct": fits and not self.first_taps,
            "tiled": fits and tiled and self.pool <= TILE * (TILE - self.taps + 1),
        }
        return [algorithm for algorithm in ALGORITHMS if possible[algorithm]]


def terms(algorithm: str, of: Convolution) -> dict[str, float]:
    """Returns what a step does, forward and for the gradients, in one of ALGORITHMS.

    Names end in the unit: operations (``flop``) or bytes.
    """
    if algorithm == "tiled":
        return _of_tiles(of)
    if algorithm == "direct":
        return _of_direct(of)
    total: dict[str, float] = {}
    for each in of.separate:
        for name, value in _of_layer(each, chunked=algorithm == "chunked").items():
            total[name] = total.get(name, 0.0) + value
    return total


def seconds(
    algorithm: str, of: Convolution, rates: Rates, factors: Mapping[str, Mapping[str, float]]
) -> float:
    """Returns the predicted time of a step's work on a convolution, forward and gradients, in s."""
    return sum(
        factors[algorithm][name] * value
        for name, value in ideal_seconds(algorithm, of, rates).items()
    )


def ideal_seconds(algorithm: str, of: Convolution, rates: Rates) -> dict[str, float]:
    """Returns the time of each term at a machine's rates, in s."""
    rate_of = {"flop": rates.flops_per_s, "bytes": rates.bytes_per_s}
    return {
        name: value / rate_of[name.rpartition("_")[2]]
        for name, value in terms(algorithm, of).items()
    }


def _of_layer(of: Convolution, *, chunked: bool) -> dict[str, float]:
    """Counts the operations of a framework, each of which writes its outputs to memory."""
    num = of.batch * of.positions
    wanted = float(of.gives_gradient)
    products = 2.0 * num * of.taps * _padded(of.channels) * _padded(of.filters)
    found = {
        # Forward, and the gradient of the kernel.
        "products_flop": 4.0 * num * of.taps * of.channels * _padded(of.filters),
        "input_gradient_flop": wanted * products,
        "positions_flop": float(PER_POSITION * num),
        "outputs_bytes": 4.0 * num * of.filters,
        "inputs_bytes": wanted * 4.0 * of.batch * of.length * of.channels,
    }
    if not chunked:
        # The gradient of the kernel reads rows of 16 channels again for each tap and each 16 of the
        # others. Those of a long sequence leave the caches, the more so if they fall into few sets.
        crowding = _crowding(of.channels) * _crowding(of.filters)
        found["long_sequence_flop"] = products * max(0.0, 1.0 - LONG / of.positions)
        found["conflicts_flop"] = products * crowding * max(0.0, 1.0 - CROWDED / of.positions)
    return found


def _crowding(num: int) -> float:
    """Returns the share of the distances between cache sets that a row of values skips.

    The lines of 16 channels of all positions lie a whole row apart. If that is a large power of
    two, they fall into few sets: 1 for 8 lines or a multiple, 1/8 for an odd number.
    """
    lines = _padded(num) // LANES
    return min(lines & -lines, MAX_CROWDING) / MAX_CROWDING


def _of_direct(of: Convolution) -> dict[str, float]:
    """Counts the work of blocks of positions whose outputs stay in the caches."""
    num = of.batch * of.positions
    wanted = float(of.gives_gradient)
    channels, filters = _padded(of.channels), _padded(of.filters)
    cycles = _panel_cycles(of.taps * of.channels, filters // LANES)
    return {
        "forward_flop": 2.0 * num * of.taps * of.channels * filters,
        "kernel_gradient_flop": float(num * cycles * FLOPS_PER_CYCLE),
        "input_gradient_flop": wanted * 2.0 * num * of.taps * filters * channels,
        "pools_flop": float(PER_POSITION * num) / of.pool * filters / LANES,
        "rows_bytes": 4.0 * num * filters,
        "maxima_bytes": 4.0 * num * of.filters / of.pool,
        "inputs_bytes": wanted * 4.0 * of.batch * of.length * of.channels,
    }


def _panel_cycles(depth: int, vectors: int) -> int:
    """Returns the cycles that a position takes in the gradient of a kernel.

    The sums of a panel of the kernel stay in registers, and every position adds to each once. A
    panel has 8, 4 or 1 rows (of `depth`) and two vectors or one, as in
    candle_p1/ops/source/tiles/products.h. Two additions begin in a cycle, and the next to the same
    sum begins LATENCY later.
    """

    def of_rows(width: int) -> int:
        eights, rest = divmod(depth, 8)
        fours, ones = divmod(rest, 4)
        panels = ((eights, 8), (fours, 4), (ones, 1))
        return sum(num * max(LATENCY, rows * width // 2) for num, rows in panels)

    return vectors // 2 * of_rows(2) + vectors % 2 * of_rows(1)


def _of_tiles(of: Convolution) -> dict[str, float]:
    """Counts the products of spectra, and the transforms."""
    num = of.batch * of.positions
    channels, filters = _padded(of.channels, WIDTH), _padded(of.filters, WIDTH)
    step = TILE - of.taps + 1
    has_first = of.first_taps > 0
    of_inputs = of.gives_gradient or has_first
    products = 2.0 * num * tile_products(of.taps, of.channels, of.filters)
    # Inputs and outputs are transformed, once forward and once for each gradient.
    transforms = 2.0 * num * PER_POSITION * (channels + filters) / step
    return {
        "products_flop": products * (2 + of_inputs),
        "transforms_flop": transforms * (2 + of_inputs),
        # Forward, once more for the gradient, and its own gradient.
        "first_flop": 3 * 2.0 * num * of.first_taps * channels,
        "maxima_bytes": 4.0 * num * of.filters / of.pool,
    }


def _padded(num: int, multiple: int = LANES) -> int:
    return -(-num // multiple) * multiple


def choose(of: Convolution, *, in_blocks: bool = True) -> str:
    """Returns the algorithm that takes the least time on the machine on which FACTORS were fitted.

    Args:
        of: The convolution.
        in_blocks: Whether IN_BLOCKS can compute it; they are for float32.
    """
    possible = [each for each in of.algorithms if each != "plain"]
    possible = [each for each in possible if in_blocks or each not in IN_BLOCKS]
    return min(possible, key=lambda each: seconds(each, of, FITTED_AT, FACTORS))


def tile_products(taps: int, channels: int, filters: int) -> float:
    """Returns the multiplications that tiles take in products, for each output position."""
    padded = _padded(channels, WIDTH) * _padded(filters, WIDTH)
    return PLANES * padded / (TILE - taps + 1)


FITTED_AT = Rates(4.79e11, 7.12e10)
FACTORS: dict[str, dict[str, float]] = {
    "plain": {
        "products_flop": 1.37,
        "input_gradient_flop": 0.551,
        "positions_flop": 1.47,
        "outputs_bytes": 16.4,
        "inputs_bytes": 2.74,
        "long_sequence_flop": 0.0,
        "conflicts_flop": 8.47,
    },
    "whole": {
        "products_flop": 1.3,
        "input_gradient_flop": 0.682,
        "positions_flop": 0.846,
        "outputs_bytes": 11.8,
        "inputs_bytes": 3.71,
        "long_sequence_flop": 0.0,
        "conflicts_flop": 8.85,
    },
    "chunked": {
        "products_flop": 0.936,
        "input_gradient_flop": 1.3,
        "positions_flop": 2.94,
        "outputs_bytes": 10.1,
        "inputs_bytes": 7.88,
    },
    "direct": {
        "forward_flop": 0.0,
        "kernel_gradient_flop": 1.02,
        "input_gradient_flop": 1.88,
        "pools_flop": 1.8,
        "rows_bytes": 1.94,
        "maxima_bytes": 5.25,
        "inputs_bytes": 8.34,
    },
    "tiled": {
        "products_flop": 1.32,
        "transforms_flop": 1.57,
        "first_flop": 0.0,
        "maxima_bytes": 0.0,
    },
}
"""As `make bench-conv` printed them, on a machine with AVX-512 that reaches FITTED_AT."""
