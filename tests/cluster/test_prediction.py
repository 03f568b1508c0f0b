"""Models of runs on fewer nodes predict how long gradients are averaged on more of them."""

import json
from statistics import mean

import pytest
from click.testing import CliRunner

from candle_p1 import cli
from candle_p1.modelling.laws import EXPOSED
from tests.conftest import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.horovod]

LIMIT_S = 300
SMALLER, LARGEST, REPEATS = (1, 2, 4), 8, 2
LINK = ["tbf", "rate", "200mbit", "burst", "64kb", "latency", "50ms"]
"""So slow that averaging takes most of a step, though the nodes share the cores of one machine."""
NT3 = "nt3 --conv 4 20 1 --pool 10 --dense 4000 200 --epochs 1 --epochs_scaling weak"
MOST_SHARE = 0.3
"""How far the prediction of the averaging may be from what is measured."""


@pytest.fixture
def runs(cluster, execute, nt3_tables, monkeypatch, tmp_path):
    """The directory of runs on one to eight nodes with slow links, of one rank each."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    nodes = cluster(LARGEST)
    for node in nodes.nodes:
        if not node.shape(*LINK):
            pytest.skip(f"this kernel has no {LINK[0]} (tc)")
    tables = " ".join(nt3_tables(200, 40, 300))
    lines = [f"{NT3} {tables} --rng_seed {repeat}" for repeat in range(REPEATS)]
    for num_nodes in (*SMALLER, LARGEST):
        command = nodes.mpirun([1] * num_nodes, ROOT / "tests/train_all.py", *lines)
        code, output = execute(command, LIMIT_S)
        print(output)
        assert code == 0, output
    return tmp_path / "out"


def held_out_phases(runs):
    """Returns what the command says of the runs on most nodes, by phase."""
    path = runs.parent / "model.json"
    words = ["model", runs, "--hold_out", LARGEST, "--json", path]
    result = CliRunner().invoke(cli.cli, list(map(str, words)))
    print(result.output)
    assert result.exit_code == 0, result.output
    (section,) = json.loads(path.read_text())["sections"]
    assert all(each["ranks"] == LARGEST for each in section["held_out"])
    return {each["phase"]: each for each in section["held_out"]}


def test_runs_on_fewer_nodes_predict_the_averaging_on_more(runs):
    """Of the averaging alone: of the rest, the nodes would have to have cores of their own."""
    averaging = held_out_phases(runs)[EXPOSED]
    assert averaging["inside"] >= REPEATS - 1, averaging
    predicted_s = averaging["predicted_s"]["value"]
    assert predicted_s == pytest.approx(mean(averaging["measured_s"]), rel=MOST_SHARE)
