"""candle-p1 bench comm as users start it, on two and three ranks."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from candle_p1.bench.transports import OPERATIONS, TRANSPORTS
from tests.conftest import CANDLE_P1

pytestmark = [pytest.mark.extended, pytest.mark.parallel]

LIMIT_S = 300
FEW = ["--max_bytes", "65536", "--seconds", "0.02", "--json", "comm.json"]
# Only between nodes, and JAX's reduce-scatter, whose values are not reliable on CPUs.
NOT_HERE = {("mpi", "point_to_point_on_node"), ("jax", "reduce_scatter")}
EITHER = [
    pytest.param(
        ["mpi", "shared_memory", "horovod", "horovod_fusion", "horovod_paper"],
        marks=pytest.mark.horovod,
    ),
    pytest.param(["mpi", "jax"], marks=pytest.mark.jax_engine),
]


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
        kind, sizes = OPERATIONS[operation], results["bytes"]
        assert sizes.is_monotonic_increasing
        assert sizes.is_unique
        assert 0 <= sizes.max() - 65536 < 4 * num_ranks
        assert sizes.min() == 4 * kind.num_elements(4, num_ranks)
        assert (results["min_s"] > 0).all()
        assert (results["min_s"] <= results["mean_s"]).all()
        assert (results["mean_s"] <= results["max_s"]).all()
        rates = results["algorithm_bytes_per_s"]
        assert list(rates) == pytest.approx(list(sizes / results["mean_s"]))
        assert list(results["bus_bytes_per_s"] / rates) == pytest.approx(
            [kind.bus_factor(num_ranks)] * len(results)
        )
    assert {each["transport"] for each in report["overlaps"]} == set(names)
    assert {each["bytes"] for each in report["overlaps"]} == {1 << 16}


@pytest.mark.parametrize("names", EITHER)
def test_every_library_is_measured(mpirun, execute, tmp_path, names):
    # An environment has one of the engines, and measures it without being told.
    given = ["--np", 2, "--picture", "comm.png"]
    code, output = execute([*CANDLE_P1, "bench", "comm", *given, *FEW], LIMIT_S)
    assert code == 0, output
    check(tmp_path / "comm.json", names, 2)
    for name in set(TRANSPORTS) - set(names):
        assert f"{name}: not measured, because not installed here" in output
    assert all(f"\n{name}: allreduce\n" in output for name in names)
    assert (tmp_path / "comm.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("names", EITHER)
def test_a_launcher_starts_it_on_every_rank(mpirun, execute, tmp_path, monkeypatch, names):
    """Their number need not be a power of two."""
    argv = ["-m", "candle_p1.cli", "bench", "comm", *FEW]
    code, output = execute(mpirun(3, *argv, "--transport", ",".join(names[:2])), LIMIT_S)
    assert code == 0, output
    assert output.count("communication of 3 ranks on 1 node") == 1
    check(tmp_path / "comm.json", names[:2], 3)
    code, output = execute(mpirun(2, *argv, "--np", 2), LIMIT_S)
    assert code == 2, output
    assert "call it without a launcher" in output
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    code, output = execute(mpirun(2, *argv, "--transport", names[1]), LIMIT_S)
    assert code == 2, output
    assert output.count("OMP_NUM_THREADS='many'") == 1
