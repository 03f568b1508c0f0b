"""The reader of a measurement of communication."""

import json
from types import SimpleNamespace

import pytest

from candle_p1.modelling.communication import measured_for
from tests.modelled_runs import shape_of

ENTRY = {
    **{"transport": "horovod", "operation": "allreduce", "num_ranks": 4},
    **{"latency_s": 1e-4, "latency_ci95_s": [9e-5, 2e-4]},
    **{"bandwidth_bytes_per_s": 1e9, "bandwidth_ci95_bytes_per_s": [9e8, None]},
}


def measured(tmp_path, content, records=()):
    path = tmp_path / "comm.json"
    path.write_text(json.dumps(content))
    return measured_for(path, records)


def test_latency_and_bandwidth_are_scaled_to_other_ranks(tmp_path):
    others = [ENTRY | {"operation": "broadcast"}, ENTRY | {"transport": "mpi", "num_ranks": 8}]
    found = measured(tmp_path, {"fits": [*others, ENTRY | {"num_ranks": 2}, ENTRY], "more": 1})
    assert (found.transport, found.num_ranks) == ("horovod", 4)
    assert str(found).endswith("bandwidth 1e+09 bytes/s (9e+08 to inf)")
    assert found.allreduce_s(shape_of(4, weight_bytes=10**9)) == pytest.approx(1e-4 + 1)
    assert found.allreduce_s(shape_of(1)) == 0
    # log2(16) / log2(4) messages, (15 / 16) / (3 / 4) bytes
    assert found.allreduce_s(shape_of(16, weight_bytes=10**9)) == pytest.approx(2e-4 + 1.25)
    whatever_bytes = ENTRY | {"bandwidth_bytes_per_s": None, "num_ranks": None}
    found = measured(tmp_path, {"fits": [whatever_bytes], "num_ranks": 2})
    assert found.allreduce_s(shape_of(2)) == 1e-4


def averaged_by(num_ranks, backend="horovod", **settings):
    """What a model needs of a record."""
    facts = SimpleNamespace(backend=backend, settings=settings or None)
    return SimpleNamespace(num_ranks=num_ranks, distributed=facts)


def test_what_is_taken_is_how_the_runs_have_averaged(tmp_path):
    every = {"fits": [ENTRY | {"transport": t} for t in ("mpi", "shared_memory", "horovod", "jax")]}
    alone, shared = averaged_by(1, "serial"), averaged_by(2, averaging="shared memory")
    by_horovod = averaged_by(2, averaging="horovod", HOROVOD_CYCLE_TIME="1")
    for records, transport in (
        ([alone, shared, shared], "shared_memory"),
        ([averaged_by(2, "jax")], "jax"),
        ([shared, by_horovod], "horovod"),  # neither stands for all
        ([alone], "horovod"),
    ):
        assert measured(tmp_path, every, records).transport == transport
    others = {"fits": [ENTRY | {"transport": "horovod_fusion"}]}
    assert measured(tmp_path, others, [shared]).transport == "horovod_fusion"
