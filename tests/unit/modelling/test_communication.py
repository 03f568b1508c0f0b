"""The reader of a measurement of communication."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from candle_p1.errors import ModelError
from candle_p1.modelling.communication import allreduce_of, measured_for, read_communication
from tests.modelled_runs import shape_of

ENTRY = {
    "transport": "horovod",
    "operation": "allreduce",
    "num_ranks": 4,
    "latency_s": 1e-4,
    "latency_ci95_s": [9e-5, 2e-4],
    "bandwidth_bytes_per_s": 1e9,
    "bandwidth_ci95_bytes_per_s": [9e8, None],
}


def written(tmp_path, content):
    path = tmp_path / "comm.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_latency_and_bandwidth_are_scaled_to_other_ranks(tmp_path):
    others = [
        ENTRY | {"operation": "broadcast"},
        ENTRY | {"transport": "mpi", "num_ranks": 8},
        ENTRY | {"num_ranks": 2, "bandwidth_bytes_per_s": None},
    ]
    path = written(tmp_path, {"fits": [*others, ENTRY], "more": 1})
    fits = read_communication(path)
    assert len(fits) == 4
    assert fits[2].allreduce_s(shape_of(2)) == 1e-4  # whatever the bytes
    found = allreduce_of(path, fits)
    assert (found.transport, found.num_ranks) == ("horovod", 4)
    assert (found.latency.low, found.latency.high) == (9e-5, 2e-4)
    assert (found.bandwidth.low, found.bandwidth.high) == (9e8, math.inf)
    assert "latency 0.0001 s (9e-05 to 0.0002)" in str(found)
    shape = shape_of(4, weight_bytes=10**9)
    assert found.allreduce_s(shape) == pytest.approx(1e-4 + 1)
    assert found.allreduce_s(shape_of(1)) == 0
    # log2(16) / log2(4) messages, (15 / 16) / (3 / 4) bytes
    assert found.allreduce_s(shape_of(16, weight_bytes=10**9)) == pytest.approx(2e-4 + 1.25)


def averaged_by(num_ranks, backend="horovod", **settings):
    """What a model needs of a record."""
    facts = SimpleNamespace(backend=backend, settings=settings or None)
    return SimpleNamespace(num_ranks=num_ranks, distributed=facts)


def test_what_is_taken_is_how_the_runs_have_averaged(tmp_path):
    names = ["mpi", "shared_memory", "horovod", "jax"]
    path = written(tmp_path, {"fits": [ENTRY | {"transport": name} for name in names]})
    alone = averaged_by(1, "serial")
    shared, by_horovod = (
        averaged_by(2, averaging=name, HOROVOD_CYCLE_TIME="1")
        for name in ("shared memory", "horovod")
    )
    for records, transport in (
        ([alone, shared, shared], "shared_memory"),
        ([alone, by_horovod], "horovod"),
        ([averaged_by(2, "jax")], "jax"),
        ([shared, by_horovod], "horovod"),  # neither stands for all
        ([alone], "horovod"),
    ):
        assert measured_for(path, records).transport == transport
    others = written(tmp_path, {"fits": [ENTRY | {"transport": "horovod_fusion"}]})
    assert measured_for(others, [shared]).transport == "horovod_fusion"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ([], "no list of fits"),
        ({"fits": []}, "no list of fits"),
        ({"fits": [3]}, r"fits\[0\] has no operation"),
        ({"fits": [ENTRY | {"latency_s": "1"}]}, r"fits\[0\].latency_s is '1'"),
        ({"fits": [ENTRY | {"latency_s": None}]}, "latency_s is None"),
        ({"fits": [ENTRY | {"transport": 1}]}, "transport is 1"),
        ({"fits": [ENTRY | {"latency_s": True}]}, "latency_s is True"),
        ({"fits": [ENTRY | {"bandwidth_bytes_per_s": 0}]}, "bandwidth_bytes_per_s is 0"),
        ({"fits": [ENTRY, ENTRY | {"num_ranks": 1}]}, r"fits\[1\].num_ranks is 1"),
        ({"fits": [ENTRY | {"latency_ci95_s": [1]}]}, "two numbers"),
        ('{"fits": [{"operation": "a", "latency_s": NaN}]}', "latency_s is nan"),
    ],
)
def test_what_is_no_measurement_is_refused_with_its_place(tmp_path, content, message):
    path = written(tmp_path, content)
    with pytest.raises(ModelError, match=message) as caught:
        read_communication(path)
    assert str(path) in str(caught.value)


def test_a_file_without_an_allreduce_or_that_is_not_there_is_named(tmp_path):
    path = written(tmp_path, {"fits": [ENTRY | {"operation": "broadcast"}]})
    with pytest.raises(ModelError, match="no fit of allreduce, only of broadcast"):
        allreduce_of(path, read_communication(path))
    with pytest.raises(ModelError, match="No such file"):
        read_communication(tmp_path / "missing.json")
