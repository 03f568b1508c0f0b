"""candle-p1 bench comm as users start it, on two and three ranks."""

import json

import pandas as pd
import pytest

from candle_p1.bench.transports import OPERATIONS, TRANSPORTS
from tests.conftest import CANDLE_P1

pytestmark = [pytest.mark.extended, pytest.mark.parallel]

FEW = ["--max_bytes", "65536", "--seconds", "0.02", "--json", "comm.json"]
PAPERS = ["--transport", "horovod_paper"]
# Only between nodes, and JAX's reduce-scatter, whose values are not reliable on CPUs.
NOT_HERE = {("mpi", "point_to_point_on_node"), ("jax", "reduce_scatter")}


def check(path, names, num_ranks):
    """Every transport has all sizes of its operations, and a fit of each."""
    report = json.loads(path.read_text())
    assert report["num_ranks"] == num_ranks
    assert list(report["transports"]) == names
    offered = {(name, each) for name in names for each in TRANSPORTS[name].operations} - NOT_HERE
    measured = pd.DataFrame(report["results"]).groupby(["transport", "operation"])
    assert set(measured.groups) == offered
    assert {(fit["transport"], fit["operation"]) for fit in report["fits"]} == offered
    for (_, operation), results in measured:
        sizes = results["bytes"]
        assert sizes.is_monotonic_increasing
        assert sizes.is_unique
        assert 0 <= sizes.max() - 65536 < 4 * num_ranks
        assert sizes.min() == 4 * OPERATIONS[operation].num_elements(4, num_ranks)
        assert results["min_s"].between(0, results["mean_s"], inclusive="right").all()
        assert (results["mean_s"] <= results["max_s"]).all()
    assert {each["transport"] for each in report["overlaps"]} == set(names)
    assert {each["bytes"] for each in report["overlaps"]} == {1 << 16}


@pytest.mark.parametrize(
    ("given", "names"),
    [
        pytest.param(PAPERS, ["horovod_paper"], marks=pytest.mark.horovod),
        pytest.param([], ["mpi", "jax"], marks=pytest.mark.jax_engine),
    ],
)
def test_libraries_are_measured(mpirun, succeed, tmp_path, given, names):
    """In an environment with the engine jax, all there are."""
    options = ["--np", 2, "--picture", "comm.png", *given]
    output = succeed([*CANDLE_P1, "bench", "comm", *options, *FEW])
    check(tmp_path / "comm.json", names, 2)
    assert all(f"\n{name}: allreduce\n" in output for name in names)
    assert (tmp_path / "comm.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.horovod
def test_a_launcher_starts_it_on_every_rank(mpirun, succeed, tmp_path):
    """Their number need not be a power of two."""
    names = ["mpi", "shared_memory", "horovod"]
    argv = ["-m", "candle_p1.cli", "bench", "comm", *FEW, "--transport", ",".join(names)]
    output = succeed(mpirun(3, *argv))
    assert output.count("communication of 3 ranks on 1 node") == 1
    check(tmp_path / "comm.json", names, 3)
