"""Which algorithm a convolution takes follows from its shape alone."""

from dataclasses import replace

import pytest

from candle_p1.models.fast.convolution_algorithms import Convolution, tile_products

NT3 = Convolution(60_464, 10, 128, 128, 10)
P1B3 = Convolution(29_532, 10, 1, 10, 10)


@pytest.mark.parametrize(
    ("convolution", "algorithm", "in_float64"),
    [
        (Convolution(60_483, 20, 1, 128), "direct", "chunked"),  # NT3's at full size
        (NT3, "tiled", "chunked"),
        (P1B3, "direct", "whole"),
        (Convolution(2952, 5, 10, 5, 10), "whole", "whole"),
        (replace(NT3, filters=8), "tiled", "whole"),
        (replace(NT3, filters=7), "whole", "whole"),
        (replace(NT3, taps=3), "direct", "chunked"),
        (replace(NT3, taps=17), "direct", "chunked"),
        (replace(NT3, length=200), "direct", "whole"),
        (replace(NT3, pool=256), "chunked", "chunked"),
        (replace(P1B3, pool=1), "whole", "whole"),
        (replace(P1B3, pool=256), "whole", "whole"),
    ],
)
def test_a_layer_takes_the_algorithm_that_suits_it(convolution, algorithm, in_float64):
    assert convolution.choose() == algorithm
    assert convolution.choose(in_blocks=False) == in_float64


def test_tiles_take_a_fifth_of_the_multiplications():
    assert tile_products(10, 128, 128) == pytest.approx(10 * 128 * 128 / 4.9, rel=0.01)
    assert tile_products(10, 10, 5) == tile_products(10, 32, 32)
