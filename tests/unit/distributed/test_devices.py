from __future__ import annotations

import json
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.distributed.devices import own_cores, share_cores, warn_of_xla


@pytest.mark.parametrize(
    ("node_cores", "threads"),
    [
        ([range(64)], 64),  # Theta: one rank per node
        ([range(42)] * 6, 7),  # Summit, unbound
        ([range(7 * i, 7 * i + 7) for i in range(6)], 7),  # Summit, bound by jsrun
        ([range(4)] * 3, 1),
        ([[0], [1]], 1),  # each bound to one core
    ],
)
def test_a_rank_gets_its_share_of_the_node(node_cores, threads):
    assert share_cores(node_cores, 0) == (threads, None)


def test_a_containers_quota_limits_the_cores():
    assert share_cores([range(64)] * 2, 0, quota=2.5) == (1, None)
    assert share_cores([range(64)], 0, quota=0.5) == (1, None)


@pytest.mark.parametrize(
    ("node_cores", "options", "mine"),
    [
        ([range(8)] * 2, {}, [4, 5, 6, 7]),
        ([[2, 3, 7, 9, 11]] * 2, {"threads": 2}, [7, 9, 11]),
        ([range(8)] * 2, {"threads": 5}, []),  # more threads than cores
        ([range(2)] * 3, {"threads": 1}, []),
        ([range(4), range(4, 8)], {}, []),  # bound by the launcher
        ([range(8)] * 2, {"quota": 4}, []),
        ([range(8)] * 2, {"environ": {"OMP_PROC_BIND": "FALSE"}}, []),
        ([range(8)] * 2, {"environ": {"OMP_PROC_BIND": "close"}}, [4, 5, 6, 7]),
    ],
)
def test_unbound_ranks_bind_themselves_to_their_cores(node_cores, options, mine):
    options = {"threads": 4, "environ": {}} | options
    assert own_cores(node_cores, 1, **options) == mine


def test_a_rank_that_is_alone_is_not_bound():
    assert own_cores([range(8)], 0, 8, {}) == []


def test_horovods_operations_for_xla_are_not_asked_for_in_vain():
    for value, num_ranks, warns in (("1", 2, True), ("1", 1, False), ("0", 2, False)):
        warning = warn_of_xla(num_ranks, {"HOROVOD_ENABLE_XLA_OPS": value})
        assert (warning is not None) == warns
    assert warn_of_xla(2, {}) is None


@given(st.lists(st.sets(st.integers(0, 15), min_size=1), min_size=1, max_size=20))
def test_threads_never_outnumber_cores_unless_ranks_do(node_cores):
    shares = [
        share_cores([sorted(cores) for cores in node_cores], r) for r in range(len(node_cores))
    ]
    num_cores = len(set().union(*node_cores))
    assert all(
        1 <= threads <= len(cores) for (threads, _), cores in zip(shares, node_cores, strict=True)
    )
    if len(node_cores) <= num_cores:
        assert sum(threads for threads, _ in shares) <= num_cores
        assert all(warning is None for _, warning in shares)
    else:
        assert all(f"{num_cores} cores" in warning for _, warning in shares)


KERAS = """
from candle_p1.distributed.devices import _check_backend
_check_backend("whichever")
import keras
print(keras.config.floatx(), keras.config.epsilon(), keras.config.image_data_format())
"""


@pytest.mark.parametrize(
    ("variables", "code", "printed"),
    [
        ({}, 0, "float32 1e-07 channels_last\n"),
        ({"KERAS_MAX_EPOCHS": "1"}, 1, "KERAS_MAX_EPOCHS is set"),
        ({"KERAS_MAX_STEPS_PER_EPOCH": ""}, 1, "KERAS_MAX_STEPS_PER_EPOCH is set"),
    ],
)
def test_keras_own_file_and_limits_change_no_run(execute, tmp_path, variables, code, printed):
    pytest.importorskip("keras", reason="no Keras backend is installed")
    file = {"floatx": "float64", "epsilon": 0.1, "image_data_format": "channels_first"}
    (tmp_path / "keras.json").write_text(json.dumps(file))
    environment = os.environ | {"KERAS_HOME": str(tmp_path)} | variables
    ended, output = execute([sys.executable, "-c", KERAS], env=environment)
    assert ended == code
    assert printed in output
