"""candle-p1 bench comm as users start it, on two and three ranks."""

from __future__ import annotations

import json

import pytest

from candle_p1.bench.transports import TRANSPORTS
from tests.conftest import CANDLE_P1

pytestmark = [pytest.mark.extended, pytest.mark.parallel]

LIMIT_S = 300
SIZES = [4, 16, 64, 256, 1024, 4096, 1 << 14, 1 << 16]
FEW = ["--max_bytes", "65536", "--seconds", "0.02", "--json", "comm.json"]
OF_HOROVOD = ("horovod", "horovod_fusion", "horovod_paper")
COLLECTIVES = {"allreduce", "broadcast", "allgather", "reduce_scatter"}
OFFERED = {
    "mpi": COLLECTIVES | {"point_to_point", "stream"},
    "shared_memory": {"allreduce", "allreduce_of_16", "broadcast"},
    "horovod": COLLECTIVES | {"allreduce_of_16"},
    "horovod_fusion": {"allreduce", "allreduce_of_16"},
    "horovod_paper": {"allreduce", "allreduce_of_16"},
    # Not JAX's reduce-scatter, whose values are not reliable on CPUs.
    "jax": COLLECTIVES - {"reduce_scatter"} | {"allreduce_of_16"},
}
EITHER = [
    pytest.param(["mpi", "shared_memory", *OF_HOROVOD], marks=pytest.mark.horovod),
    pytest.param(["mpi", "jax"], marks=pytest.mark.jax_engine),
]


def check(report, names, num_ranks):
    """Every transport has all sizes of its operations, and a fit of each."""
    assert report["num_ranks"] == num_ranks
    assert list(report["transports"]) == names
    measured = {}
    for each in report["results"]:
        measured.setdefault((each["transport"], each["operation"]), []).append(each)
    assert set(measured) == {(name, each) for name in names for each in OFFERED[name]}
    for (_, operation), results in measured.items():
        sizes = [each["bytes"] for each in results]
        assert sizes == sorted(set(sizes))
        assert sizes[-1] - SIZES[-1] < 4 * num_ranks
        least = {"allreduce_of_16": 64, "allgather": 4 * num_ranks, "reduce_scatter": 4 * num_ranks}
        assert sizes[0] == least.get(operation, 4)
        for each in results:
            assert 0 < each["min_s"] <= each["mean_s"] <= each["max_s"]
            assert each["algorithm_bytes_per_s"] == pytest.approx(each["bytes"] / each["mean_s"])
            factor = each["bus_bytes_per_s"] / each["algorithm_bytes_per_s"]
            if operation.startswith("allreduce"):
                assert factor == pytest.approx(2 * (num_ranks - 1) / num_ranks)
    fitted = {(fit["transport"], fit["operation"]) for fit in report["fits"]}
    assert fitted == set(measured)
    assert {each["transport"] for each in report["overlaps"]} == set(names)
    assert {each["bytes"] for each in report["overlaps"]} == {1 << 16}


@pytest.mark.parametrize("names", EITHER)
def test_every_library_is_measured(mpirun, execute, tmp_path, names):
    # An environment has one of the engines, and measures it without being told.
    given = ["--np", 2, "--picture", "comm.png", "--html", "comm.html"]
    code, output = execute([*CANDLE_P1, "bench", "comm", *given, *FEW], LIMIT_S)
    print(output)
    assert code == 0, output
    report = json.loads((tmp_path / "comm.json").read_text())
    check(report, names, 2)
    for name in set(TRANSPORTS) - set(names):
        assert f"{name}: not measured, because not installed here" in output
    for name in names:
        assert f"\n{name}: allreduce\n" in output
    assert "\nfitted\n" in output
    assert (tmp_path / "comm.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "comm.html").read_text()


@pytest.mark.parametrize("names", EITHER)
def test_their_number_need_not_be_a_power_of_two(mpirun, execute, tmp_path, names):
    names = names[:2]
    given = ["--transport", ",".join(names)]
    code, output = execute([*CANDLE_P1, "bench", "comm", "--np", 3, *given, *FEW], LIMIT_S)
    assert code == 0, output
    check(json.loads((tmp_path / "comm.json").read_text()), names, 3)


@pytest.mark.parametrize("names", EITHER)
def test_a_launcher_starts_it_on_every_rank(mpirun, execute, tmp_path, names):
    names = [name for name in names if name not in OF_HOROVOD[1:]]
    argv = ["-m", "candle_p1.cli", "bench", "comm", *FEW]
    code, output = execute(mpirun(2, *argv), LIMIT_S)
    print(output)
    assert code == 0, output
    assert output.count("communication of 2 ranks on 1 node") == 1
    check(json.loads((tmp_path / "comm.json").read_text()), names, 2)
    code, output = execute(mpirun(2, *argv, "--np", 2), LIMIT_S)
    assert code == 2, output
    assert "call it without a launcher" in output


@pytest.mark.parametrize("names", EITHER)
def test_an_error_of_all_ranks_is_one_message(mpirun, execute, monkeypatch, names):
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    argv = ["-m", "candle_p1.cli", "bench", "comm", *FEW, "--transport", names[1]]
    code, output = execute(mpirun(2, *argv), LIMIT_S)
    assert code == 2, output
    assert output.count("OMP_NUM_THREADS='many'") == 1
