from __future__ import annotations

import pytest

from candle_p1.distributed import mpi_start
from candle_p1.distributed.launch_environment import launched_rank

OF_ONE_NODE = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def prepared(environ):
    found = dict(environ)
    mpi_start.prepare(launched_rank(found), found)
    return found.get("OMPI_MCA_btl")


def test_ranks_of_one_node_do_without_libfabric():
    assert prepared(OF_ONE_NODE) == "^ofi"


@pytest.mark.parametrize(
    ("environ", "chosen"),
    [
        (OF_ONE_NODE | {"OMPI_MCA_btl": "tcp,self"}, "tcp,self"),
        (OF_ONE_NODE | {"OMPI_COMM_WORLD_SIZE": "4"}, None),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, None),
        ({"PMIX_RANK": "0"}, None),
    ],
)
def test_what_the_user_has_chosen_and_ranks_of_several_nodes_stay_as_they_are(environ, chosen):
    assert prepared(environ) == chosen
