from __future__ import annotations

import json

import pytest

from candle_p1.bench import comm_report, comm_task, transports
from candle_p1.bench.comm import Comm
from candle_p1.bench.comm_task import GRADIENT_BYTES, CommTask
from candle_p1.bench.task import OtherEnvironment
from candle_p1.bench.transports import ALLREDUCE, STREAM, Call
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.errors import DistributedError, ParameterError
from candle_p1.modelling.communication import measured_for

SIZES = [4, 1 << 10, 1 << 16, 1 << 20, 1 << 26]
NT3 = GRADIENT_BYTES["NT3"]


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


def point(transport, operation, num_bytes, **facts):
    mean_s = 1e-5 + num_bytes / 1e9
    rate = num_bytes / mean_s
    return {
        **{"transport": transport, "operation": operation, "bytes": num_bytes},
        **{"min_s": 0.9 * mean_s, "mean_s": mean_s, "max_s": 1.2 * mean_s},
        **{"ci95_s": [0.98 * mean_s, 1.01 * mean_s], "stopped_by": "precision"},
        **{"algorithm_bytes_per_s": rate, "bus_bytes_per_s": 1.5 * rate, "gradients_of": None},
        **facts,
    }


def outcome(name, *more):
    """What 4 ranks measure: 10 us and 1 GB/s."""
    overlap = {"communication_s": 1e-3, "computing_s": 1e-3, "together_s": 1.25e-3}
    overlap |= {"exposed_s": 0.25e-3, "hidden_share": 0.75}
    return {
        **{"num_ranks": 4, "num_nodes": 2, "ranks_per_node": 2, "limit_bytes": 700_000_000},
        "settings": {name: {"library": f"the library of {name}"}},
        "points": [*(point(name, ALLREDUCE, size) for size in SIZES), *more],
        "overlaps": [{"transport": name, "bytes": 1 << 20, **overlap}],
    }


@pytest.fixture
def measured(compare, monkeypatch):
    """Returns the report of transports whose outcomes a function returns by their names."""
    monkeypatch.setattr(transports, "find_spec", lambda name: name != "jax" or None)

    def measured(outcome_of, names="mpi", **options):
        def measure(task, num_ranks):
            (name,) = task.transports
            return [outcome_of(name)] * num_ranks

        return compare(Comm(num_ranks=4, transport=names, **options), measure, there=measure)

    return measured


def test_every_transport_is_a_job_whose_fit_models_read(measured, tmp_path):
    names = ["mpi", "horovod", "horovod_fusion"]
    report = measured(outcome, ",".join(names))
    assert list(report["transports"]) == [fit["transport"] for fit in report["fits"]] == names
    assert report["not_installed"] == {"jax": ["jax"]}
    assert len(report["results"]) == 3 * len(SIZES)
    for fit in report["fits"]:
        assert fit["measured_bytes_per_s"] == pytest.approx(1e9, rel=1e-3)
    (tmp_path / "comm.json").write_text(json.dumps(report))
    chosen = measured_for(tmp_path / "comm.json", [])
    assert (chosen.transport, chosen.num_ranks) == ("horovod", 4)
    assert chosen.latency_s == pytest.approx(1e-5)
    assert chosen.bandwidth_bytes_per_s == pytest.approx(1e9)


def test_what_is_missing_here_is_measured_in_the_other_environment(measured, monkeypatch):
    other = OtherEnvironment("other/python", "jax")
    monkeypatch.setattr(OtherEnvironment, "of", lambda python: other)
    jobs = Comm(transport="mpi", compare_env=other.python).jobs()
    assert [(job.variant, job.other) for job in jobs] == [("mpi", None), ("jax", other)]
    report = measured(outcome, compare_env=other.python)
    assert list(report["transports"]) == ["mpi", "jax"]
    assert (report["not_installed"], report["compare_env"]) == ({}, other.python)


def test_tables_and_figure_show_what_was_measured(measured, printed, tmp_path):
    gradients = [point("mpi", ALLREDUCE, n, gradients_of=of) for of, n in GRADIENT_BYTES.items()]
    found = outcome("mpi", *gradients, *(point("mpi", STREAM, size) for size in SIZES))
    found["points"][0]["stopped_by"] = "time"
    found["points"][1]["ci95_s"] = None
    report = measured(lambda name: found)
    shown = printed(comm_report.render(report))
    rows = [line.split() for line in shown.splitlines()]
    assert ["619,691,672", "557,732", "619,702", "743,642", "607,308", "to", "625,899",
            "1.00", "1.50", "NT3"] in rows  # fmt: skip
    assert ["mpi", "1,048,576", "1,000", "1,000", "1,250", "250", "75"] in rows
    assert any(row[:3] == ["mpi", "allreduce", "10.0"] for row in rows)
    for words in ("~9.80 to 10.1", "too few repeats", "977,600,340", "jax: not measured"):
        assert words in shown
    drawn = tmp_path / "comm.svg"
    assert list(Comm(picture=drawn).draw(report)) == [f"picture: {drawn}"]
    assert drawn.read_text().count("P1B2, P1B3") == 2  # beside the times and the bandwidths


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
