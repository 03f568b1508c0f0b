"""The preflight of a job whose ranks pretend to be on two nodes, a and b."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from unittest.mock import patch

import pytest
from harness import named, run_checks

from candle_p1.cluster import checks, preflight
from candle_p1.cluster.checks import Needs
from candle_p1.cluster.preflight import examine
from candle_p1.distributed.comm import NODE_VARIABLE, check_ranks
from candle_p1.distributed.launch_environment import launched_rank
from candle_p1.errors import SetupError
from candle_p1.records import environment

NODE = "ab"[launched_rank().rank % 2]
NOTHING = {"shm_gib": 0, "memory_gib": 0, "disk_gib": 0}
NO_OPTION = ["--shm_gib", "0", "--memory_gib", "0", "--disk_gib", "0"]


def only_on_b(variables):
    return patch.dict(os.environ, variables if NODE == "b" else {})


def the_launcher_and_mpi_agree_on_ranks(comm):
    layout = launched_rank()
    assert layout.launcher == "mpirun"
    assert (layout.rank, layout.size) == (comm.rank, comm.size)
    assert (layout.local_rank, layout.local_size) == (comm.rank, comm.size)  # it is one machine
    assert comm.num_nodes == 2
    check_ranks(layout, comm)


def identical_nodes_pass(comm):
    findings = examine(comm, Needs(**NOTHING), NODE)
    values = {finding.name: finding.value for finding in findings}
    assert comm.allgather(values) == [values] * comm.size
    assert values["ranks"] == f"{comm.size} on 2 nodes"
    engine, packages = values["engine"], environment.package_versions()
    assert engine in {"horovod", "jax"}
    assert values[engine] == packages[engine]
    assert ("horovod" in values) == (engine == "horovod")
    assert values["keras"] == packages["keras"]
    assert values["MPI"].startswith("Open MPI")
    assert len(checks.loaded_mpi_libraries()) == 1


def a_problem_of_one_node_is_an_error_of_all_ranks(comm):
    file = Path(__file__)
    with only_on_b({"CANDLE_DATA_DIR": str(file / "below")}):
        needs = Needs(**NOTHING)
        with pytest.raises(SetupError) as raised:
            examine(comm, needs, NODE)
    message = str(raised.value)
    assert raised.value.agreed
    assert comm.allgather(message) == [message] * comm.size
    assert message.startswith(f"node b: data: {file} is not a directory. Fix: ")


def different_versions_are_an_error(comm):
    versions = environment.package_versions()
    if NODE == "b":
        versions["keras"] = "3.0"
    with (
        patch.object(environment, "package_versions", lambda: versions),
        pytest.raises(SetupError, match=r"^node b: keras: 3\.0, "),
    ):
        examine(comm, Needs(**NOTHING), NODE)


def the_command_exits_with_2_and_one_message(comm):
    errors = io.StringIO()
    with (
        only_on_b({"CANDLE_DATA_DIR": "/dev/null/below"}),
        contextlib.redirect_stderr(errors),
        pytest.raises(SystemExit) as ended,
    ):
        preflight.main(NO_OPTION)
    assert ended.value.code == 2
    printed = comm.allgather(errors.getvalue())
    assert printed[0].startswith("error: node b: data: /dev/null is not a directory. Fix: ")
    assert printed[0].count("\n") == 1
    assert not any(printed[1:])


CHECKS = (
    the_launcher_and_mpi_agree_on_ranks,
    identical_nodes_pass,
    a_problem_of_one_node_is_an_error_of_all_ranks,
    different_versions_are_an_error,
    the_command_exits_with_2_and_one_message,
)

if __name__ == "__main__":
    os.environ[NODE_VARIABLE] = NODE
    run_checks(named(CHECKS), trains=False)
