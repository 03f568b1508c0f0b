from __future__ import annotations

from dataclasses import replace

import pytest

from candle_p1.models.fast.convolution_costs import (
    ALGORITHMS,
    FACTORS,
    LANES,
    Convolution,
    Rates,
    choose,
    ideal_seconds,
    seconds,
    terms,
    tile_products,
)

NT3 = Convolution(60_464, 10, 128, 128, 10, 20, gives_gradient=True)
P1B3 = Convolution(29_532, 10, 1, 10, 10, 100)
RATES = Rates(100e9, 10e9)


@pytest.mark.parametrize(
    ("of", "algorithm"),
    [
        (NT3, "tiled"),
        (P1B3, "direct"),
        (Convolution(2952, 5, 10, 5, 10, 100, gives_gradient=True), "whole"),
        (replace(NT3, channels=256, filters=256), "tiled"),
    ],
)
def test_a_layer_takes_the_algorithm_that_suits_it(of, algorithm):
    assert choose(of) == algorithm


@pytest.mark.parametrize("change", [{"taps": 17}, {"taps": 1}, {"length": 200}, {"pool": 256}])
def test_tiles_are_for_what_they_can_compute(change):
    assert choose(replace(NT3, **change)) != "tiled"


def test_blocks_are_for_float32_and_short_pools():
    assert choose(NT3, in_blocks=False) in ("whole", "chunked")
    assert choose(replace(P1B3, pool=256)) in ("whole", "chunked")


def test_the_choice_does_not_depend_on_the_batch():
    for of in (NT3, P1B3):
        assert {choose(replace(of, batch=batch)) for batch in (1, 20, 1000)} == {choose(of)}


def test_terms_are_those_of_the_formula():
    of = Convolution(109, 10, 3, 20, 5, batch=2)
    positions = 2 * 100
    found = terms("whole", of)
    assert found["products_flop"] == 4 * positions * 10 * 3 * 2 * LANES
    assert found["input_gradient_flop"] == 0
    assert found["outputs_bytes"] == 4 * positions * 20
    wanted = replace(of, gives_gradient=True)
    assert terms("whole", wanted)["input_gradient_flop"] > 0
    assert terms("direct", of)["maxima_bytes"] == 4 * positions * 20 / 5


def test_the_gradient_of_a_short_kernel_waits_for_its_additions():
    """10 rows are a panel of 8 and two of 1, each of which takes as long as that of 8."""
    of = Convolution(1009, 10, 1, 16)
    found, of_eight = (
        terms("direct", replace(of, taps=taps))["kernel_gradient_flop"] / (1010 - taps)
        for taps in (10, 8)
    )
    assert found == 3 * of_eight
    assert of_eight == 2 * 8 * LANES


def test_long_sequences_whose_channels_crowd_the_caches_cost_more():
    crowded, not_crowded, short = (
        terms("plain", of)["conflicts_flop"] / terms("plain", of)["products_flop"]
        for of in (NT3, replace(NT3, channels=96, filters=96), replace(NT3, length=4000))
    )
    assert crowded > 10 * not_crowded > 0
    assert short == 0
    assert "conflicts_flop" not in terms("chunked", NT3)


def test_tiles_take_a_fifth_of_the_multiplications():
    assert tile_products(10, 128, 128) == pytest.approx(10 * 128 * 128 / 4.9, rel=0.01)
    assert tile_products(10, 10, 5) == tile_products(10, 32, 32)


def test_a_first_convolution_is_part_of_tiles_and_a_layer_of_other_forms():
    both = Convolution(60_483, 10, 128, 128, 10, 20, first_taps=20)
    first, second = both.separate
    assert (first.positions, second.positions) == (60_464, 60_455)
    assert second == replace(NT3, pool=10)
    assert "direct" not in both.algorithms
    for algorithm in ("plain", "whole"):
        separate = sum(seconds(algorithm, each, RATES, FACTORS) for each in both.separate)
        assert seconds(algorithm, both, RATES, FACTORS) == pytest.approx(separate)
    assert terms("tiled", both)["first_flop"] > 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_time_follows_from_the_rates(algorithm):
    of = NT3
    once, twice = (seconds(algorithm, of, rates, FACTORS) for rates in (RATES, Rates(200e9, 20e9)))
    assert once == pytest.approx(2 * twice)
    assert set(FACTORS[algorithm]) == set(ideal_seconds(algorithm, of, RATES))
    assert once > 0
