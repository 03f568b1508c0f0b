from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.bench import transport_libraries, transports
from candle_p1.bench.transports import (
    ALLGATHER,
    ALLREDUCE,
    ALLREDUCE_OF_16,
    BROADCAST,
    OPERATIONS,
    POINT_TO_POINT,
    REDUCE_SCATTER,
    STREAM,
    TRANSPORTS,
    choose_transports,
    make_transport,
)
from candle_p1.errors import ParameterError

ranks = st.integers(2, 40)


def test_bus_bandwidths_are_those_of_nccl_tests():
    """doc/PERFORMANCE.md there: the factors for 4 ranks."""
    factors = {name: kind.bus_factor(4) for name, kind in OPERATIONS.items()}
    assert factors[ALLREDUCE] == factors[ALLREDUCE_OF_16] == 1.5
    assert factors[ALLGATHER] == factors[REDUCE_SCATTER] == 0.75
    assert factors[BROADCAST] == factors[POINT_TO_POINT] == factors[STREAM] == 1


@given(st.sampled_from(list(OPERATIONS)), st.integers(1, 10**7), ranks)
def test_an_array_has_about_the_size_that_was_asked_for(operation, num_bytes, num_ranks):
    kind = OPERATIONS[operation]
    num = kind.num_elements(num_bytes, num_ranks)
    assert 0 <= num * 4 - num_bytes < 4 * max(num_ranks, 17)
    if kind.is_divided:
        assert num % num_ranks == 0


def computed(operation, values, rank):
    """What a rank receives of the arrays of all, which numpy computes."""
    if operation in (ALLREDUCE, ALLREDUCE_OF_16):
        return values.sum(axis=0)
    if operation == REDUCE_SCATTER:
        return np.split(values.sum(axis=0), len(values))[rank]
    return values.ravel() if operation == ALLGATHER else values[0]


@given(st.sampled_from(list(OPERATIONS)), ranks, st.integers(1, 4000), st.data())
def test_what_is_expected_is_what_numpy_computes(operation, num_ranks, num_bytes, data):
    rank = data.draw(st.integers(0, num_ranks - 1))
    num = OPERATIONS[operation].num_elements(num_bytes, num_ranks)
    values = np.stack(
        [transports.given(operation, each, num_ranks, num) for each in range(num_ranks)]
    )
    received = computed(operation, values, rank)

    def is_expected(array, **options):
        return transports.is_expected(array, operation, rank, num_ranks, num, **options)

    assert is_expected(received)
    assert not is_expected(received[:-1])
    wrong = received.copy()
    wrong[data.draw(st.integers(0, len(wrong) - 1))] += 1
    assert not is_expected(wrong)
    averages = operation in (ALLREDUCE, ALLREDUCE_OF_16)
    assert is_expected(values.mean(axis=0) if averages else received, averages=True)


def test_long_arrays_are_filled_and_compared_in_parts():
    num = 2 * transports.CHUNK + 17
    values = transports.given(BROADCAST, 3, 5, num)
    assert np.array_equal(values, np.arange(num) % 251 + 3)
    received = transports.given(BROADCAST, 0, 5, num)
    assert transports.is_expected(received, BROADCAST, 3, 5, num)
    received[-1] += 1
    assert not transports.is_expected(received, BROADCAST, 3, 5, num)


def test_one_rank_sends_its_own_array_and_sums_over_thousands_are_exact():
    received = transports.given(POINT_TO_POINT, 2, 3, 10)
    assert transports.is_expected(received, POINT_TO_POINT, 1, 3, 10, source=2)
    assert not transports.is_expected(received, POINT_TO_POINT, 1, 3, 10)
    total = np.full(1, sum(rank % 251 for rank in range(6000)), np.float32)
    assert transports.is_expected(total, ALLREDUCE, 0, 6000, 1)
    assert not transports.is_expected(total * np.float32(1.0001), ALLREDUCE, 0, 6000, 1)


@pytest.fixture
def installed(monkeypatch):
    """Pretends that only some packages are installed."""

    def install(*packages):
        monkeypatch.setattr(transports, "find_spec", lambda name: name in packages or None)

    return install


OF_HOROVOD = ("mpi4py", "tensorflow", "horovod")
ONE_PROCESS = {"one_process": True}


@pytest.mark.parametrize(
    ("packages", "text", "options", "chosen"),
    [
        (("mpi4py", "jax"), None, {}, "mpi jax"),
        (OF_HOROVOD, None, {}, "mpi shared_memory horovod horovod_fusion horovod_paper"),
        (OF_HOROVOD, None, ONE_PROCESS, "mpi shared_memory horovod"),
        (OF_HOROVOD, "horovod, mpi,mpi", {}, "horovod mpi"),
        (OF_HOROVOD, "horovod_paper,mpi", ONE_PROCESS, "horovod_paper mpi"),
    ],
)
def test_all_that_is_installed_is_chosen(installed, packages, text, options, chosen):
    installed(*packages)
    assert choose_transports(text, **options) == chosen.split()


@pytest.mark.parametrize(
    ("packages", "text", "options", "message"),
    [
        (OF_HOROVOD, "jax", {}, r"not installed.*: jax"),
        (OF_HOROVOD, "nccl", {}, "none of mpi"),
        (OF_HOROVOD, "", {}, "none of"),
        (OF_HOROVOD, "hrovod", {}, "mean"),
        ((), None, {}, "candle-p1"),
        (OF_HOROVOD, "horovod,horovod_fusion", ONE_PROCESS, r"horovod_fusion.*a command each"),
    ],
)
def test_others_are_refused(installed, packages, text, options, message):
    installed(*packages)
    with pytest.raises(ParameterError, match=message):
        choose_transports(text, **options)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_transport_offers_known_operations(name):
    made = make_transport(name, None)
    assert set(made.operations) <= set(OPERATIONS)
    assert ALLREDUCE in made.operations


def test_settings_of_horovod_differ():
    names = ("horovod", "horovod_fusion", "horovod_paper")
    assert [list(make_transport(name, None).variables.values()) for name in names] == [
        [],
        ["134217728", "1"],
        ["67108864", "5"],
    ]


def test_products_of_ones_and_means_stay_ones(monkeypatch):
    written = []
    monkeypatch.setattr(
        transport_libraries.np, "matmul", lambda a, b, out: written.append(np.dot(a[0], b)) or out
    )
    transport_libraries.multiplier()(3)
    assert len(written) == 3
    assert all(np.allclose(each, 1) for each in written)
