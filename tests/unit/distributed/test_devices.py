import json
import os
import sys
from math import inf

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.distributed.devices import NodeCores
from candle_p1.distributed.engine import warn_of_horovod
from candle_p1.records.environment import core_quota, core_topology, memory_limit_bytes


@pytest.mark.parametrize(
    ("own_groups", "files", "cores", "num_bytes"),
    [
        ("0::/", {"cpu.max": "max 100000", "memory.max": "max"}, inf, None),
        (  # of nested groups, any may limit
            "0::/a/b",
            {"a/cpu.max": "200000 100000", "a/b/cpu.max": "400000 100000"}
            | {"memory.max": "8192", "a/memory.max": "4096", "other/memory.max": "1"},
            2,
            4096,
        ),
        (  # version 1: of a container, whose group is what is mounted, and of nested groups
            "4:memory:/docker/1\n2:cpu,cpuacct:/a/b\n0::/docker/1",
            {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"}
            | {"cpu/cpu.cfs_quota_us": "-1", "memory/memory.limit_in_bytes": "4096"},
            0.5,
            4096,
        ),
    ],
)
def test_limits_of_all_control_groups_count(tmp_path, own_groups, files, cores, num_bytes):
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    write(tmp_path, files | {"proc/self/cgroup": own_groups})
    assert core_quota(tmp_path) == cores
    assert memory_limit_bytes(tmp_path) == (num_bytes or psutil.virtual_memory().total)


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")


def smt2(num_cores, num_sockets=1):
    """Returns (socket, siblings) by CPU, as Linux numbers them: a core's second thread later."""
    first = [(k * num_sockets // num_cores, f"{k},{k + num_cores}") for k in range(num_cores)]
    return dict(enumerate(first * 2))


@pytest.mark.parametrize(
    ("places", "cores", "shares"),
    [
        ({}, range(8), [[0, 1, 2, 3], [4, 5, 6, 7]]),  # a kernel that tells nothing
        (smt2(4), range(8), [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (smt2(4, 2), range(8), [[0, 4], [1, 5], [2, 3, 6, 7]]),  # no rank on both sockets
        (smt2(4, 4), range(8), [[0, 4], [1, 5], [2, 3, 6, 7]]),  # more sockets than ranks
        ({cpu: (cpu % 2, str(cpu)) for cpu in range(4)}, range(4), [[0, 2], [1, 3]]),
        (smt2(4), [0, 1, 2, 4, 5], [[0, 4], [1, 2, 5]]),  # the others are offline, or not allowed
        (smt2(2), range(4), [[0], [2], [1, 3]]),  # more ranks than cores
        (smt2(1), range(2), [[], [0], [1]]),
    ],
)
def test_ranks_get_whole_cores_within_sockets(tmp_path, places, cores, shares):
    for cpu, (socket, siblings) in places.items():
        facts = {"physical_package_id": socket, "thread_siblings_list": siblings}
        write(tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology", facts)
    node = NodeCores([cores] * len(shares), topology=core_topology(cores, tmp_path))
    assert node.divide() == shares
    assert node.threads(0)[0] == (threads := max(1, min(map(len, shares))))
    for rank, share in enumerate(shares):
        assert node.own(rank, threads, {}) == (share if all(shares) else [])


@pytest.mark.parametrize(
    ("node_cores", "options", "mine"),
    [
        ([range(8)] * 2, {}, [4, 5, 6, 7]),
        ([[2, 3, 7, 9, 11]] * 2, {"threads": 2}, [7, 9, 11]),
        ([range(8)] * 2, {"threads": 5}, []),  # more threads than cores
        ([range(4), range(4, 8)], {}, []),  # bound by the launcher
        ([range(8)] * 2, {"quota": 4}, []),
        ([range(8)], {"threads": 8}, []),  # alone
        ([range(8)] * 2, {"environ": {"OMP_PROC_BIND": "FALSE"}}, []),
        ([range(8)] * 2, {"environ": {"OMP_PROC_BIND": "close"}}, [4, 5, 6, 7]),
    ],
)
def test_unbound_ranks_bind_themselves_to_their_cores(node_cores, options, mine):
    options = {"threads": 4, "environ": {}} | options
    cores = NodeCores(node_cores, options.pop("quota", inf))
    assert cores.own(len(node_cores) > 1, **options) == mine


SHARED = {"backend": "horovod", "settings": {"averaging": "shared memory"}}
USED = {"backend": "horovod", "settings": {"averaging": "horovod"}}


@pytest.mark.parametrize(
    ("started", "name", "value", "why"),
    [
        (SHARED, "HOROVOD_CYCLE_TIME", "5", "shared memory averages the gradients, unless --av"),
        (USED, "HOROVOD_CYCLE_TIME", "5", None),
        (USED, "HOROVOD_ENABLE_XLA_OPS", "1", "several ranks train without XLA"),
        ({"backend": "jax", "settings": {}}, "HOROVOD_CYCLE_TIME", "5", "JAX averages"),
        ({"backend": "serial"}, "HOROVOD_CYCLE_TIME", "0", None),
        ({"backend": "serial"}, "HOROVOD_LOG_LEVEL", "info", None),
    ],
)
def test_horovods_variables_that_have_no_effect_are_said_to_have_none(started, name, value, why):
    warnings = "".join(warn_of_horovod(started, {name: value}))
    assert warnings.startswith(f"{name}: no effect, because {why}" if why else "")
    assert bool(warnings) == bool(why)


@pytest.mark.parametrize(
    ("node_cores", "quota", "threads"),
    [
        ([range(7 * i, 7 * i + 7) for i in range(6)], inf, 7),  # Summit, bound by jsrun
        ([range(64)] * 2, 2.5, 1),  # a container's
        ([range(64)], 0.5, 1),
    ],
)
def test_a_rank_gets_its_share_of_the_node(node_cores, quota, threads):
    assert NodeCores(node_cores, quota=quota).threads(0) == (threads, None)


@given(st.lists(st.sets(st.integers(0, 15), min_size=1), min_size=1, max_size=20))
def test_threads_never_outnumber_cores_unless_ranks_do(node_cores):
    node = NodeCores([sorted(cores) for cores in node_cores])
    shares = [node.threads(rank) for rank in range(len(node_cores))]
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
from candle_p1.distributed.devices import _import_keras
_import_keras("whichever")
import keras
print(keras.config.floatx(), keras.config.epsilon(), keras.config.image_data_format())
"""


@pytest.mark.parametrize(
    ("name", "value", "printed"),
    [
        ("KERAS_MAX_EPOCHS_OF_NONE", "1", "float32 1e-07 channels_last\n"),
        ("KERAS_MAX_STEPS_PER_EPOCH", "", "KERAS_MAX_STEPS_PER_EPOCH is set"),
    ],
)
def test_keras_own_file_and_limits_change_no_run(execute, tmp_path, name, value, printed):
    keras = pytest.importorskip("keras", reason="no Keras backend is installed")
    file = {"floatx": "float64", "epsilon": 0.1, "image_data_format": "channels_first"}
    (tmp_path / "keras.json").write_text(json.dumps(file))
    settings = {"KERAS_HOME": str(tmp_path), "KERAS_BACKEND": keras.backend.backend()}
    environment = os.environ | settings | {name: value}
    assert printed in execute([sys.executable, "-c", KERAS], env=environment)[1]
