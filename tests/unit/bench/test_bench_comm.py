from __future__ import annotations

import json
import re
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from candle_p1.bench import comm, comm_worker, draw_comm, show_comm
from candle_p1.bench.comm import (
    GRADIENT_BYTES,
    CommJob,
    CommMeasurement,
    CommOutcome,
    TimedOverlap,
    TimedSize,
    choose_operations,
    choose_sizes,
)
from candle_p1.benchmark import find_benchmark
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.distributed.transports.transport import (
    ALLREDUCE,
    OPERATIONS,
    STREAM,
    Call,
)
from candle_p1.errors import DistributedError, ParameterError
from candle_p1.modelling.communication import allreduce_of, read_communication

SIZES = [4, 1 << 10, 1 << 16, 1 << 20, 1 << 26]


def test_sizes_go_from_4_bytes_to_1_gib():
    large = [1 << power for power in range(23, 31)]
    between = [3 << 27, 3 << 28]
    assert choose_sizes() == sorted([4**power for power in range(1, 12)] + large + between)
    assert choose_sizes(1 << 28, (3 << 27) - 1) == [1 << 28]
    assert choose_sizes(100, 1600) == [100, 400, 1600]
    assert choose_sizes(8, 8) == [8]
    with pytest.raises(ParameterError, match="--min_bytes"):
        choose_sizes(8, 4)


def test_operations_are_measured_in_their_order():
    assert choose_operations(None) == list(OPERATIONS)
    assert choose_operations("broadcast,allreduce") == ["allreduce", "broadcast"]
    with pytest.raises(ParameterError, match="did you mean 'allreduce'"):
        choose_operations("allreduces")


def dense(*widths):
    return sum(a * b + b for a, b in pairwise(widths))


def test_gradients_are_those_of_the_default_networks():
    """The layers of the benchmarks' default parameters on inputs of CANDLE's sizes."""
    params = {name: find_benchmark(name).read_parameters([]) for name in ("nt3", "p1b1", "p1b2")}
    assert params["nt3"]["conv"] == [128, 20, 1, 128, 10, 1]
    assert params["nt3"]["pool"] == [1, 10]
    length = (60_483 - 20 + 1 - 10 + 1) // 10
    convolutions = 128 * 20 + 128 + 128 * 10 * 128 + 128
    nt3 = convolutions + dense(128 * length, *params["nt3"]["dense"], 2)
    encoder = params["p1b1"]["dense"]
    p1b1 = dense(60_483, *encoder, params["p1b1"]["latent_dim"], *encoder[::-1], 60_483)
    p1b2 = dense(28_204, *params["p1b2"]["dense"], 10)
    p1b3 = dense(29_532, *find_benchmark("p1b3").read_parameters([])["dense"], 1)
    numbers = {"NT3": nt3, "P1B1": p1b1, "P1B2": p1b2, "P1B3": p1b3}
    assert {name: 4 * number for name, number in numbers.items()} == GRADIENT_BYTES


def point(transport, operation, num_bytes, latency_s=1e-5, rate=1e9, **facts):
    mean_s = latency_s + num_bytes / rate
    given = {
        "min_s": 0.9 * mean_s,
        "mean_s": mean_s,
        "max_s": 1.2 * mean_s,
        "ci95_s": [0.98 * mean_s, 1.01 * mean_s],
        "blocks_s": [mean_s] * 6,
        "calls_per_block": 5,
        "stopped_by": "precision",
        "algorithm_bytes_per_s": num_bytes / mean_s,
        "bus_bytes_per_s": 1.5 * num_bytes / mean_s,
    }
    return TimedSize(transport, operation, num_bytes, **(given | facts))


def outcome(name, operations=(ALLREDUCE,), limit_bytes=10**9, sizes=SIZES):
    """What 4 ranks measure: 10 us and 1 GB/s."""
    found = CommOutcome(4, 2, 2, limit_bytes, {name: {"library": f"the library of {name}"}})
    found.points = [point(name, each, size) for each in operations for size in sizes]
    found.overlaps = [TimedOverlap(name, 1 << 20, 1e-3, 1e-3, 1.25e-3, 0.25e-3, 0.75)]
    return found


@pytest.fixture
def measure(monkeypatch):
    """Measures with jobs whose outcomes a function returns by the transport's name."""

    def measure(outcome_of, transports=("mpi",), other=None, **conditions):
        monkeypatch.setattr(comm, "run", lambda job, ranks: [outcome_of(job.name)] * ranks)
        monkeypatch.setattr(comm, "missing_packages", lambda name: ["jax"] * (name == "jax"))
        job = CommJob(transports, sizes=SIZES, gradients=sorted(GRADIENT_BYTES.values()))
        measurement = CommMeasurement(job, 4, other)
        return measurement.measure(lambda *progress: None)

    return measure


def shown(report):
    console = Console(width=250)
    with console.capture() as capture:
        for part in show_comm.parts(report):
            console.print(part)
    return capture.get()


def test_every_transport_is_a_job_and_all_are_in_the_report(measure):
    report = measure(outcome, ("mpi", "horovod"))
    assert list(report["transports"]) == ["mpi", "horovod"]
    assert report["not_installed"] == {"jax": ["jax"]}
    assert len(report["results"]) == 2 * len(SIZES)
    assert (report["num_ranks"], report["num_nodes"], report["launched"]) == (4, 2, False)
    keys = {"transport", "operation", "num_ranks", "latency_s", "bandwidth_bytes_per_s"}
    for fit in report["fits"]:
        assert keys < set(fit)
        assert fit["latency_s"] == pytest.approx(1e-5)
        assert fit["bandwidth_bytes_per_s"] == pytest.approx(1e9)
        assert fit["measured_bytes_per_s"] == pytest.approx(1e9, rel=1e-3)
        assert fit["latency_ci95_s"][0] <= fit["latency_s"] <= fit["latency_ci95_s"][1]
    assert [fit["transport"] for fit in report["fits"]] == ["mpi", "horovod"]
    assert json.loads(json.dumps(report, allow_nan=False))["num_ranks"] == 4


def test_models_read_the_report(measure, tmp_path):
    report = measure(outcome, ("mpi", "horovod", "horovod_fusion"))
    (tmp_path / "comm.json").write_text(json.dumps(report))
    fits = read_communication(tmp_path / "comm.json")
    chosen = allreduce_of(tmp_path / "comm.json", fits)
    assert (chosen.transport, chosen.num_ranks) == ("horovod", 4)
    assert chosen.latency.value == pytest.approx(1e-5)
    assert chosen.bandwidth.value == pytest.approx(1e9)


def test_what_is_missing_here_is_measured_in_the_other_environment(measure):
    asked = []

    def run(job, num_ranks):
        asked.append((job.name, num_ranks))
        return [outcome(job.name)] * num_ranks

    other = SimpleNamespace(backend="jax", python="other/python", run=run)
    report = measure(outcome, other=other)
    assert asked == [("jax", 4)]
    assert list(report["transports"]) == ["mpi", "jax"]
    assert report["not_installed"] == {}
    assert report["other_python"] == "other/python"


def test_the_tables_say_what_was_measured(measure):
    found = outcome("mpi", limit_bytes=700_000_000)
    found.points += [point("mpi", ALLREDUCE, GRADIENT_BYTES["NT3"], gradients_of="NT3")]
    found.points[0] = point("mpi", ALLREDUCE, 4, stopped_by="time")
    found.points[1] = point("mpi", ALLREDUCE, 1 << 10, ci95_s=None)
    text = shown(measure(lambda name: found))
    assert "communication of 4 ranks on 2 nodes" in text
    row = next(line.split() for line in text.splitlines() if line.rstrip().endswith("NT3"))
    assert row == ["619,691,672", "557,732", "619,702", "743,642", "607,308", "to", "625,899",
                   "1.00", "1.50", "NT3"]  # fmt: skip
    assert "~9.80 to 10.1" in text
    assert "too few repeats" in text
    assert f"left out, {'because'}" in text
    assert "977,600,340 bytes" in text
    assert "jax: not measured, because not installed here: jax" in text
    assert re.search(r"mpi\s+allreduce\s+10\.0 \[.*\]\s+1\.00 \[.*\]\s+1\.00", text)
    assert re.search(r"mpi\s+1,048,576\s+1,000\s+1,000\s+1,250\s+250\s+75", text)


def test_ranks_of_a_launcher_are_told_of_horovods_other_settings(monkeypatch):
    job = CommJob(["horovod"], sizes=SIZES)
    report = CommMeasurement(job, None).report([outcome("horovod")], "now")
    text = shown(report)
    assert "name one of them in --through" in text


def test_the_page_has_the_figure_and_the_tables(measure):
    found = outcome("mpi", (ALLREDUCE, STREAM))
    found.points += [
        point("mpi", ALLREDUCE, size, gradients_of=name) for name, size in GRADIENT_BYTES.items()
    ]
    report = measure(lambda name: found)
    page = draw_comm.page(report)
    assert "<h1>communication of 4 ranks on 2 nodes</h1>" in page
    assert "619,691,672" in page
    drawn = draw_comm.picture(report)
    assert drawn.svg.count("P1B2, P1B3") == 2  # above the times and the bandwidths
    assert "stream of messages" in drawn.svg
    assert drawn.png.startswith(b"\x89PNG")


def test_labels_share_a_place_or_have_rows_of_their_own():
    apart = draw_comm.place_labels({"A": 10**3, "B": 10**6}, 1.0)
    assert apart == [("A", 10**3, 0), ("B", 10**6, 0)]
    placed = draw_comm.place_labels(GRADIENT_BYTES, 0.45)
    assert [label for label, _, _ in placed] == ["P1B2, P1B3", "NT3", "P1B1"]
    ends = {}
    for label, size, level in placed:
        middle = 0.45 * np.log10(size)
        half = draw_comm.CHARACTER_INCHES * len(label) / 2
        assert middle - half > ends.get(level, -np.inf)
        ends[level] = middle + half


class Clock:
    """A clock that calls advance."""

    def __init__(self, monkeypatch) -> None:
        self.now_s, self.num_calls = 0.0, 0
        monkeypatch.setattr(comm_worker, "clock_s", lambda: self.now_s)

    def call(self, seconds):
        """Returns a call that takes so long the n-th time, from 0."""

        def run():
            self.now_s += seconds(self.num_calls) if callable(seconds) else seconds
            self.num_calls += 1

        return run


def test_steady_times_are_measured_until_they_are_precise(monkeypatch):
    clock = Clock(monkeypatch)
    times = comm_worker.timed(clock.call(1e-4), SerialCommunicator(), 1.0)
    assert times.mean_s == pytest.approx(1e-4)
    assert times.stopped_by == "precision"
    assert len(times.blocks_s) == 6  # the least for an interval of 95 %
    assert times.calls_per_block == pytest.approx(1.0 / comm_worker.NUM_BLOCKS / 1e-4, abs=1)
    assert clock.num_calls == pytest.approx(1 + 7 * times.calls_per_block, abs=1)


def test_unsteady_times_are_measured_until_the_time_is_over(monkeypatch):
    clock = Clock(monkeypatch)
    run = clock.call(lambda number: 0.01 * (1 + number % 7))
    times = comm_worker.timed(run, SerialCommunicator(), 1.0)
    assert times.stopped_by == "time"
    assert 1.0 <= sum(times.blocks_s) * times.calls_per_block < 1.5
    assert times.ci95_s[0] < times.mean_s < times.ci95_s[1]


def test_of_calls_that_take_longer_than_all_the_time_one_may_be_disturbed(monkeypatch):
    clock = Clock(monkeypatch)
    run = clock.call(lambda number: 50.0 if number == 2 else 5.0)
    times = comm_worker.timed(run, SerialCommunicator(), 1.0, num_messages=2)
    assert (times.mean_s, times.ci95_s, times.calls_per_block) == (2.5, None, 1)
    assert clock.num_calls == 1 + 3


class OneRank:
    """A transport of one rank, whose allreduce takes 1 ms and adds an error."""

    operations = (ALLREDUCE,)
    averages = False

    def __init__(self, clock, error=0.0, slow_until_s=0.0, call_s=1e-3, num_cold=0) -> None:
        self.comm, self._clock, self._error = SerialCommunicator(), clock, error
        self._slow_until_s, self._call_s, self._num_cold = slow_until_s, call_s, num_cold

    def prepare(self, operation, values):
        received = values.copy()
        received[-1] += self._error
        clock, first = self._clock, self._clock.num_calls

        def takes_s(number):
            is_slow = clock.now_s < self._slow_until_s or number < first + self._num_cold
            return (3 if is_slow else 1) * self._call_s

        return Call(clock.call(takes_s), lambda: received)


def test_a_point_has_the_definitions_of_nccl_tests(monkeypatch):
    monkeypatch.setattr(comm_worker, "OPERATIONS", {ALLREDUCE: OPERATIONS[ALLREDUCE]})
    transport = OneRank(Clock(monkeypatch))
    gradients = [GRADIENT_BYTES["P1B2"]]
    job = CommJob(["one"], sizes=[4000, 10**9], gradients=gradients, seconds=0.1)
    small, large = comm_worker._points(job, "one", transport, ALLREDUCE, 200_000_000)
    assert (small.bytes, large.bytes) == (4000, gradients[0])
    assert (small.gradients_of, large.gradients_of) == (None, "P1B2")
    assert small.mean_s == pytest.approx(1e-3)
    assert small.algorithm_bytes_per_s == pytest.approx(4e6)
    assert small.bus_bytes_per_s == 0  # 2 (n - 1) / n of one rank


def test_a_machine_that_is_slow_for_a_while_makes_no_size_slow(monkeypatch):
    transport = OneRank(Clock(monkeypatch), slow_until_s=0.4)
    job = CommJob(["one"], sizes=[4, 16, 64, 256], seconds=0.3)
    points = comm_worker._points(job, "one", transport, ALLREDUCE, 10**9)
    assert max(points[0].blocks_s) == pytest.approx(3e-3, rel=0.1)
    assert [each.mean_s for each in points] == pytest.approx([1e-3] * 4)


def test_large_arrays_are_timed_when_their_memory_is_in_use(monkeypatch):
    """The first calls on new arrays take longer, and one takes longer than all the time given."""
    transport = OneRank(Clock(monkeypatch), call_s=5.0, num_cold=3)
    [point] = comm_worker._points(CommJob(["one"], sizes=[400]), "one", transport, ALLREDUCE, 10**9)
    assert len(point.blocks_s) == comm_worker.NUM_ROUNDS * comm_worker.LEAST_BLOCKS
    assert point.mean_s == pytest.approx(5.0)
    assert point.ci95_s is not None


@pytest.mark.parametrize("num_bytes", [4, 40_000_000])
def test_wrong_values_are_an_error(monkeypatch, num_bytes):
    transport = OneRank(Clock(monkeypatch), error=1.0)
    job = CommJob(["one"], sizes=[num_bytes], seconds=0.1)
    with pytest.raises(DistributedError, match=f"allreduce of {num_bytes} bytes: rank 0"):
        comm_worker._points(job, "one", transport, ALLREDUCE, 10**9)


def test_one_rank_cannot_communicate():
    with pytest.raises(ParameterError, match="at least two"):
        comm_worker.measure(CommJob(["mpi"]), SerialCommunicator())
    with pytest.raises(ParameterError, match="--np 1"):
        _ = CommMeasurement(CommJob(["mpi"]), 1).notes


def test_an_error_ends_the_rank_that_a_launcher_has_started(monkeypatch, capsys):
    monkeypatch.setattr(comm_worker, "connect", SerialCommunicator)
    with pytest.raises(SystemExit) as ended:
        comm_worker.measure_here(CommMeasurement(CommJob(["mpi"]), None))
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("at least two") == 1


def test_arrays_fill_no_more_than_half_of_the_memory(monkeypatch):
    free = SimpleNamespace(available=10 << 30)
    monkeypatch.setattr(comm_worker.psutil, "virtual_memory", lambda: free)
    monkeypatch.setattr(comm_worker, "memory_limit_bytes", lambda: 20 << 30)
    assert comm_worker.memory_for_an_array(SerialCommunicator()) == (10 << 30) / 2 / comm.ARRAYS
    monkeypatch.setattr(comm_worker, "memory_limit_bytes", lambda: 1 << 30)
    assert comm_worker.memory_for_an_array(SerialCommunicator()) == int((1 << 30) / 2 / comm.ARRAYS)
