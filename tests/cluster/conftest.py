from __future__ import annotations

from contextlib import ExitStack

import numpy as np
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
def tables(tmp_path):
    """The flags that name two small tables for NT3."""
    random = np.random.default_rng(2017)
    for name, num_rows in (("train", 200), ("test", 50)):
        rows = (",".join(f"{each:.7g}" for each in random.random(300)) for _ in range(num_rows))
        lines = [f"{i % 2},{row}\n" for i, row in enumerate(rows)]
        (tmp_path / f"{name}.csv").write_text("".join(lines))
    flags = "--train_data train.csv --test_data test.csv --output_dir out --epochs 12 --power none"
    return flags.split()
