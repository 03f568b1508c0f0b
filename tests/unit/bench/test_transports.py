from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.bench import comm_task, transports
from candle_p1.bench.comm import choose_transports
from candle_p1.bench.transports import OPERATIONS
from candle_p1.errors import ParameterError

ALLREDUCES = ("allreduce", "allreduce_of_16")
ranks = st.integers(2, 40)


def test_operations_are_those_of_nccl_tests():
    """doc/PERFORMANCE.md there: the factors of their bus bandwidths for 4 ranks."""
    factors = dict.fromkeys(OPERATIONS, 1) | dict.fromkeys(ALLREDUCES, 1.5)
    factors |= {"allgather": 0.75, "reduce_scatter": 0.75}
    assert {name: kind.bus_factor(4) for name, kind in OPERATIONS.items()} == factors


def computed(operation, values, rank):
    """What a rank receives of the arrays of all, which numpy computes."""
    if operation in ALLREDUCES:
        return values.sum(axis=0)
    if operation == "reduce_scatter":
        return np.split(values.sum(axis=0), len(values))[rank]
    return values.ravel() if operation == "allgather" else values[0]


@given(st.sampled_from(list(OPERATIONS)), ranks, st.integers(1, 4000), st.data())
def test_what_is_expected_is_what_numpy_computes(operation, num_ranks, num_bytes, data):
    rank = data.draw(st.integers(0, num_ranks - 1))
    num = OPERATIONS[operation].num_elements(num_bytes, num_ranks)
    assert 0 <= num * 4 - num_bytes < 4 * max(num_ranks, 17)
    arrays = (comm_task.given(operation, each, num_ranks, num) for each in range(num_ranks))
    values = np.stack([*arrays])
    received = computed(operation, values, rank)

    def is_expected(array, **options):
        return comm_task.is_expected(array, operation, rank, num_ranks, num, **options)

    assert is_expected(received)
    assert not is_expected(received[:-1])
    wrong = received.copy()
    wrong[data.draw(st.integers(0, len(wrong) - 1))] += 1
    assert not is_expected(wrong)
    averaged = values.mean(axis=0) if operation in ALLREDUCES else received
    assert is_expected(averaged, averages=True)


def test_long_arrays_and_sums_over_thousands_of_ranks_are_exact():
    num = 2 * comm_task.CHUNK + 17
    assert np.array_equal(comm_task.given("broadcast", 3, 5, num), np.arange(num) % 251 + 3)
    received = comm_task.given("broadcast", 2, 5, num)
    assert comm_task.is_expected(received, "point_to_point", 1, 3, num, source=2)
    assert not comm_task.is_expected(received, "point_to_point", 1, 3, num)
    received[-1] += 1
    assert not comm_task.is_expected(received, "point_to_point", 1, 3, num, source=2)
    total = np.full(1, sum(rank % 251 for rank in range(6000)), np.float32)
    assert comm_task.is_expected(total, "allreduce", 0, 6000, 1)
    assert not comm_task.is_expected(total * np.float32(1.0001), "allreduce", 0, 6000, 1)


OF_HOROVOD = ("mpi4py", "tensorflow", "horovod")
ALONE = {"one_process": True}


@pytest.mark.parametrize(
    ("packages", "text", "options", "chosen"),
    [
        (("mpi4py", "jax"), None, {}, "mpi jax"),
        (OF_HOROVOD, None, {}, "mpi shared_memory horovod horovod_fusion horovod_paper"),
        (OF_HOROVOD, None, ALONE, "mpi shared_memory horovod"),
        (OF_HOROVOD, "horovod, mpi,mpi", {}, "horovod mpi"),
        (OF_HOROVOD, "horovod_paper,mpi", ALONE, "horovod_paper mpi"),
        (OF_HOROVOD, "jax", {}, ParameterError("jax.*: jax")),
        (OF_HOROVOD, "hrovod", {}, ParameterError("'horovod'")),
        ((), None, {}, ParameterError("candle-p1")),
        (OF_HOROVOD, "horovod,horovod_fusion", ALONE, ParameterError("horovod_fusion")),
    ],
)
def test_what_is_installed_can_be_measured(monkeypatch, packages, text, options, chosen):
    monkeypatch.setattr(transports, "find_spec", lambda name: name in packages or None)
    is_refused = isinstance(chosen, ParameterError)
    with pytest.raises(ParameterError, match=str(chosen)) if is_refused else nullcontext():
        assert choose_transports(text, **options) == chosen.split()
