"""Ranks of several nodes load the matrices that one process loads."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from candle_p1.benchmark import find_benchmark
from candle_p1.datasets.synthetic import ensure
from tests.cluster.nodes import in_container
from tests.conftest import ROOT
from tests.records import read_record

pytestmark = pytest.mark.cluster

HERE = Path(__file__).parent
LIMIT_S = 120
LINKS = {
    "fast": [],
    "100 Mbit/s": ["tbf", "rate", "100mbit", "burst", "64kb", "latency", "50ms"],
    "delayed by 5 ms": ["netem", "delay", "5ms"],
}


@pytest.mark.parametrize(
    ("num_ranks_of_nodes", "link"),
    [([2, 2], "fast"), ([2, 1, 1], "100 Mbit/s"), ([1, 1], "delayed by 5 ms")],
)
def test_all_nodes_load_what_one_process_loads(cluster, execute, num_ranks_of_nodes, link):
    nodes = cluster(len(num_ranks_of_nodes))
    for node in nodes.nodes:
        if LINKS[link] and not node.shape(*LINKS[link]):
            pytest.skip(f"this kernel has no {LINKS[link][0]} (tc)")
    of_nodes = zip(nodes.nodes, num_ranks_of_nodes, strict=True)
    layout = ",".join(node.name for node, num_ranks in of_nodes for _ in range(num_ranks))
    argv = [ROOT / "tests/parallel/harness.py", "check_loading", layout]
    code, output = execute(nodes.mpirun(num_ranks_of_nodes, *argv), LIMIT_S)
    print(output)
    assert code == 0, output
    assert output.count("ok ") == 11
    assert nodes.await_silence(LIMIT_S) == ""
    assert [node.shared_memory() for node in nodes.nodes] == [[]] * len(nodes.nodes)


def digests(directory):
    """Returns the digests of the scaled samples, by rank."""
    return [path.read_text() for path in sorted(directory.glob("rank*.sha256"))]


@pytest.mark.parametrize(
    ("wrap", "loader", "num_copies"),
    [
        (list, "parallel", 2),
        (in_container, "cached", 2),
        (partial(in_container, private_tmpdir=True), "cached", 4),
    ],
)
def test_ranks_share_a_file_or_have_a_matrix_each_and_say_so(
    cluster, execute, tables, tmp_path, monkeypatch, wrap, loader, num_copies
):
    monkeypatch.setenv("STEPS", "2")
    nodes = cluster(2)
    argv = [HERE / "watched_run.py", *tables, "--loader", loader, "--cache_dir", "cache"]
    together = nodes.mpirun([2, 2], *argv, wrap=wrap)
    jobs = {"alone": [sys.executable, *argv], "together": together}
    found = {}
    for run, command in jobs.items():
        code, output = execute([*command, "--run_id", run], LIMIT_S)
        print(output)
        assert code == 0, output
        found[run] = read_record(tmp_path / f"out/EXP000/{run}/run.json"), digests(tmp_path)
    (alone, of_one), (together, of_all) = found.values()
    assert of_one * 4 == of_all
    for role, facts in alone["data"]["files"].items():
        assert together["data"]["files"][role]["values_sha256"] == facts["values_sha256"]
    assert [record["data"]["num_copies"] for record in (alone, together)] == [1, num_copies]
    assert (together["num_nodes"], together["num_ranks"]) == (2, 4)
    assert [rank["host"] for rank in together["ranks"]] == ["node1"] * 2 + ["node2"] * 2
    if wrap is list:
        assert together["warnings"] == []
    else:
        (warning,) = together["warnings"]
        assert ("will hold 4 copies" in warning) == (num_copies == 4)
    assert nodes.await_silence(LIMIT_S) == ""
    assert [node.shared_memory() for node in nodes.nodes] == [[], []]


@pytest.mark.horovod
def test_tables_of_full_shape_train_in_the_memory_that_docker_gives(
    missing, mpirun, execute, environment, monkeypatch, tmp_path
):
    """P1B2's tables would fill /dev/shm, which ends MPI by SIGBUS: its messages are there."""
    if missing:
        pytest.skip(missing)
    monkeypatch.setenv("CANDLE_DATA_DIR", str(tmp_path))
    recipe = find_benchmark("p1b2").recipe
    sizes = vars(sys.modules[type(recipe).__module__])["SIZES"]
    full = replace(sizes["full"], num_patients={"train": 800, "test": 300})
    monkeypatch.setitem(sizes, "full", full)
    ensure(recipe, "full", 2019)
    run = "p1b2 --size full --dense 16 --epochs 1 --train_steps 2 --val_steps 1 --test_steps 1"
    command = in_container(mpirun(2, ROOT / "tests/train_all.py", run), shm="64m")
    code, output = execute(command, 900)
    print(output)
    assert code == 0, output
    assert "/dev/shm: no space for the data" in output
