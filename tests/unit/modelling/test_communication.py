"""The reader of a measurement of communication."""

from __future__ import annotations

import json

import pytest

from candle_p1.errors import ModelError
from candle_p1.modelling.communication import allreduce_of, read_communication
from tests.modelled_runs import shape_of

ENTRY = {"operation": "allreduce", "ranks": 4, "latency_s": 1e-4, "bandwidth_bytes_per_s": 1e9}


def written(tmp_path, content):
    path = tmp_path / "comm.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_latency_and_bandwidth_are_scaled_to_other_ranks(tmp_path):
    interval = {"latency_s_interval": [9e-5, 2e-4], "bandwidth_bytes_per_s_interval": [9e8, 2e9]}
    other = ENTRY | {"operation": "broadcast"}
    path = written(tmp_path, {"fits": [other, ENTRY | {"ranks": 2}, ENTRY | interval], "more": 1})
    fits = read_communication(path)
    assert len(fits) == 3
    found = allreduce_of(path, fits)
    assert (found.num_ranks, found.latency_interval_s) == (4, (9e-5, 2e-4))
    shape = shape_of(4, weight_bytes=10**9)
    assert found.allreduce_s(shape) == pytest.approx(1e-4 + 1)
    assert found.allreduce_s(shape_of(1)) == 0
    # log2(16) / log2(4) messages, (15 / 16) / (3 / 4) bytes
    assert found.allreduce_s(shape_of(16, weight_bytes=10**9)) == pytest.approx(2e-4 + 1.25)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ([], "no list of fits"),
        ({"fits": []}, "no list of fits"),
        ({"fits": [3]}, r"fits\[0\] has no operation"),
        ({"fits": [ENTRY | {"latency_s": "1"}]}, r"fits\[0\].latency_s is '1'"),
        ({"fits": [ENTRY | {"latency_s": True}]}, "latency_s is True"),
        ({"fits": [ENTRY | {"bandwidth_bytes_per_s": 0}]}, "bandwidth_bytes_per_s is 0"),
        ({"fits": [ENTRY, ENTRY | {"ranks": 1}]}, r"fits\[1\].ranks is 1"),
        ({"fits": [ENTRY | {"latency_s_interval": [1]}]}, "two numbers"),
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
