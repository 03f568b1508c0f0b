from contextlib import ExitStack

import pytest

from tests.cluster.nodes import Cluster, what_is_missing


@pytest.fixture(scope="session")
def missing():
    """Why this machine cannot have nodes; None if it can."""
    return what_is_missing()


@pytest.fixture
def cluster(missing, mpirun, environment, tmp_path):
    """Returns a function that makes a cluster of so many nodes, which ends with the test."""
    if missing:
        pytest.skip(missing)
    with ExitStack() as stack:
        yield lambda num_nodes: stack.enter_context(Cluster(num_nodes, tmp_path))


@pytest.fixture
def tables(nt3_tables):
    """The flags that name two small tables for NT3."""
    return [*nt3_tables(200, 50, 300), "--epochs", "12"]
