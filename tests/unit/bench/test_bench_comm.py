from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.bench import comm_task
from candle_p1.bench.comm import Comm, fit, fit_line
from candle_p1.bench.comm_task import GRADIENT_BYTES, CommTask
from candle_p1.bench.transports import ALLREDUCE, Call
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.errors import DistributedError, ParameterError


def test_sizes_are_close_together_where_they_are_large():
    sizes = [4**power for power in range(1, 12)] + [1 << power for power in range(23, 31)]
    assert Comm(min_bytes=4, max_bytes=1 << 30).sizes == sorted([*sizes, 3 << 27, 3 << 28])
    assert Comm(min_bytes=100, max_bytes=1600).sizes == [100, 400, 1600]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"min_bytes": 8, "max_bytes": 4}, "--min_bytes 8"), ({"num_ranks": 1}, "--np 1")],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ParameterError, match=message):
        Comm(transport="mpi", **options).jobs()
    task = Comm(operations="broadcast, allreduce").task("mpi")
    assert task.operations == ["allreduce", "broadcast"]  # in their own order


class OneRank:
    """A transport of one rank, whose allreduce takes `seconds` and adds an error.

    `seconds` is a function of the number of the call, and of that since the array is new.
    """

    name = "one"
    averages = False

    def __init__(self, monkeypatch, seconds=lambda number, age: 1e-3, error=0.0) -> None:
        self.comm, self._seconds, self._error = SerialCommunicator(), seconds, error
        self.now_s, self.num_calls = 0.0, 0
        monkeypatch.setattr(comm_task, "clock_s", lambda: self.now_s)

    def prepare(self, operation=ALLREDUCE, values=None):
        first = self.num_calls

        def run():
            self.now_s += self._seconds(self.num_calls, self.num_calls - first)
            self.num_calls += 1

        def received():
            wrong = values.copy()
            wrong[-1] += self._error
            return wrong

        return Call(run, received)

    def points(self, sizes, **options):
        task = CommTask(transports=["one"], sizes=sizes, **options)
        return task.points(self, ALLREDUCE, limit_bytes=200_000_000)


@pytest.mark.parametrize(
    ("seconds", "mean_s", "stopped_by", "num_blocks"),
    [
        (lambda *_: 1e-4, 1e-4, "precision", 6),  # the least for an interval of 95 %
        (lambda number, age: 0.01 * (1 + number % 7), 0.04, "time", None),
        # Of calls that take longer than all the time given, one may be disturbed.
        (lambda number, age: 50.0 if number == 2 else 5.0, 5.0, "time", 3),
    ],
)
def test_calls_are_timed_until_the_mean_is_precise_or_the_time_is_over(
    monkeypatch, seconds, mean_s, stopped_by, num_blocks
):
    transport = OneRank(monkeypatch, seconds)
    times = comm_task.timed(transport.prepare().run, transport.comm, 1.0)
    assert (times["mean_s"], times["stopped_by"]) == (pytest.approx(mean_s, rel=0.15), stopped_by)
    blocks_s, each = times["blocks_s"], times["calls_per_block"]
    assert len(blocks_s) == num_blocks or 1.0 <= sum(blocks_s) * each < 1.5
    assert (times["ci95_s"] is None) == (num_blocks == 3)
    assert num_blocks or times["ci95_s"][0] < times["mean_s"] < times["ci95_s"][1]


def test_neither_a_slow_while_nor_new_memory_makes_a_size_slow(monkeypatch):
    transport = OneRank(monkeypatch, lambda *_: 3e-3 if transport.now_s < 0.4 else 1e-3)
    found = transport.points([4, 16, 64, 256], seconds=0.3)
    assert max(found[0]["blocks_s"]) == pytest.approx(3e-3, rel=0.1)
    assert [each["mean_s"] for each in found] == pytest.approx([1e-3] * 4)
    # The first calls on new arrays take longer, and one takes longer than all the time given.
    (found,) = OneRank(monkeypatch, lambda number, age: 15 if age < 3 else 5).points([400])
    assert len(found["blocks_s"]) == comm_task.NUM_ROUNDS * comm_task.LEAST_BLOCKS
    assert (found["mean_s"], found["ci95_s"] is None) == (pytest.approx(5.0), False)


def test_a_point_is_of_a_size_that_fits_and_of_right_values(monkeypatch):
    sizes, p1b2 = [4000, 10**9], GRADIENT_BYTES["P1B2"]
    small, large = OneRank(monkeypatch).points(sizes, gradients=[p1b2], seconds=0.1)
    assert (small["bytes"], small["gradients_of"]) == (4000, None)
    assert (large["bytes"], large["gradients_of"]) == (p1b2, "P1B2")
    with pytest.raises(DistributedError, match="allreduce of 4000 bytes: rank 0"):
        OneRank(monkeypatch, error=1.0).points(sizes, seconds=0.1)


def test_computing_beside_an_allreduce_takes_as_long(monkeypatch):
    transport = OneRank(monkeypatch)

    def compute(num, more_s=0.0):
        transport.now_s += 1e-5 * num + more_s

    transport.overlap = lambda values: (compute, lambda num: compute(num, 2.5e-4))
    (point,) = transport.points([1 << 16], seconds=0.1)
    found = CommTask(transports=["one"], seconds=0.1).overlap(transport, point)
    names = ("bytes", "communication_s", "computing_s", "exposed_s", "hidden_share")
    assert [found[name] for name in names] == pytest.approx([1 << 16, 1e-3, 1e-3, 2.5e-4, 0.75])


def test_memory_that_ranks_share_is_not_measured_between_nodes():
    ranks = SerialCommunicator()
    ranks.size = ranks.num_nodes = 2
    with pytest.raises(ParameterError, match="2 nodes"):
        CommTask(transports=["shared_memory"]).measure(ranks)


FITTED = [4**power for power in range(1, 16)]


def hockney(latency_s, rate, sizes=FITTED):
    return [latency_s + size / rate for size in sizes]


@given(st.floats(1e-7, 1e-2), st.floats(1e6, 1e12), st.integers(0, 2**32 - 1))
def test_noise_is_in_the_intervals_and_moves_the_parameters_little(latency_s, rate, seed):
    noise = np.random.default_rng(seed).uniform(0.97, 1.03, len(FITTED))
    found = fit(FITTED, list(noise * hockney(latency_s, rate)))
    assert len(found["ranges"]) == 1
    low, high = found["bandwidth_ci95_bytes_per_s"]
    assert low < found["bandwidth_bytes_per_s"]
    assert high is None or high > found["bandwidth_bytes_per_s"]
    if latency_s < FITTED[-3] / rate:  # the largest sizes show the bandwidth
        assert found["bandwidth_bytes_per_s"] == pytest.approx(rate, rel=0.05)
    if latency_s > FITTED[2] / rate:  # the smallest ones show the latency
        assert found["latency_s"] == pytest.approx(latency_s, rel=0.05)
    ends = found["latency_ci95_s"]
    assert 0 <= ends[0] <= found["latency_s"] <= ends[1]


def test_an_interval_covers_the_parameters_as_often_as_it_says():
    random, covered, num = np.random.default_rng(2), np.zeros(2), 400
    for _ in range(num):
        times = random.normal(1, 0.02, len(FITTED)) * hockney(1e-5, 1e9)
        line, _ = fit_line(FITTED, list(times))
        (low_s, high_s), (low, high) = line["latency_ci95_s"], line["bandwidth_ci95_bytes_per_s"]
        covered += [low_s <= 1e-5 <= high_s, low <= 1e9 <= high]
    assert all(0.92 <= share <= 0.98 for share in covered / num), covered / num


@pytest.mark.parametrize("cut", [5, 11])
def test_a_change_of_protocol_divides_the_sizes_where_it_is(cut):
    found = fit(FITTED, hockney(2e-6, 5e9, FITTED[:cut]) + hockney(3e-4, 1e9, FITTED[cut:]))
    assert [line["num_sizes"] for line in found["ranges"]] == [cut, len(FITTED) - cut]
    assert found["latency_s"] == pytest.approx(2e-6, rel=1e-6)
    assert found["bandwidth_bytes_per_s"] == pytest.approx(1e9, rel=1e-6)
    assert found["largest_residual"] < 1e-6 < found["one_line_residual"]


def test_the_bandwidth_of_times_that_do_not_grow_is_not_known():
    found = fit(FITTED, [2e-6 - 1e-8 * i for i in range(len(FITTED))])
    assert found["bandwidth_bytes_per_s"] is None
    assert found["latency_s"] == pytest.approx(2e-6, rel=0.1)
    line, _ = fit_line([1, 2, 4], [1.0, 2.2, 4.8])  # the latency is not negative
    assert (line["latency_s"], line["bandwidth_bytes_per_s"]) == pytest.approx((0, 0.88), rel=0.05)
    assert fit(FITTED[:2], [1, 2]) is None


def test_sizes_that_lie_close_together_give_a_bandwidth_with_an_interval():
    """With a latency, three noisy sizes would leave the slope open."""
    sizes = [size << 20 for size in (64, 128, 256, 384, 512, 768, 1024)]
    rates = np.array([3.5e9] * 4 + [1.9e9] * 3) * [1, 1.01, 0.99, 1, 1.1, 0.98, 1.02]
    times = [1e-3 * (1 << 20) / size + size / rate for size, rate in zip(sizes, rates, strict=True)]
    found = fit(sizes, times)
    assert [line["num_sizes"] for line in found["ranges"]] == [4, 3]
    assert found["ranges"][-1]["latency_s"] == 0
    low, high = found["bandwidth_ci95_bytes_per_s"]
    assert 1.5e9 < low < found["bandwidth_bytes_per_s"] < high < 2.6e9
    assert found["measured_bytes_per_s"] == pytest.approx(1.94e9, rel=0.01)


@pytest.mark.parametrize(("last", "num_ranges"), [(10, 1), (16, 2)])
def test_a_range_spans_a_factor_of_two(last, num_ranges):
    sizes = [size << 20 for size in (1, 2, 4, 8, 9, last)]
    times = [size / rate for size, rate in zip(sizes, [1e9] * 3 + [5e9] * 3, strict=True)]
    assert len(fit(sizes, times)["ranges"]) == num_ranges
