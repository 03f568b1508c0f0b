"""A run that is interrupted and killed goes on by the same command, in one record."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest

from candle_p1.records.power_file import write_traces
from candle_p1.records.power_trace import Channel, Trace
from tests.conftest import NT3_SCRIPT, await_end, wait_until
from tests.records import read_record

pytestmark = [pytest.mark.extended, pytest.mark.parallel]

FLAGS = ["--epochs", "24", "--epochs_scaling", "weak", "--output_dir", "out"]
FLAGS += ["--conv", "4", "20", "1", "--pool", "10", "--dense", "8"]
FLAGS += ["--ckpt_every_steps", "5", "--power", "replay:power.csv"]
START_S, END_S = 180, 60
STEPS_PER_EPOCH = 14
NUM_STEPS = 24 * STEPS_PER_EPOCH
SLOW = Path(__file__).parent / "slow_nt3.py"
"""Takes half a second for an epoch, so that a run is not over before it is killed."""


@pytest.fixture
def command(mpirun, start, tmp_path, monkeypatch):
    """Returns a function that starts the same command, on a machine that always uses 100 W."""
    monkeypatch.setenv("NT3_FOLDER", str(NT3_SCRIPT.parent))
    monkeypatch.setenv("SLOW_RANKS", "0,1")
    monkeypatch.setenv("SLOW_S", "0.02")
    node = Channel("node", "node", "node", "cray", "power")
    times_s = np.arange(0.0, 2000.0)
    trace = Trace(node, times_s, np.full(len(times_s), 100.0), 1.0)
    write_traces(tmp_path / "power.csv", [trace], node=0, start_s=0.0)
    return lambda: start(mpirun(2, SLOW, *FLAGS))


def num_lines(path):
    with suppress(FileNotFoundError):
        return len(path.read_text().splitlines())
    return 0


def steps_before(position):
    """Returns how many steps each rank does before a position of the training."""
    return position["epoch"] * STEPS_PER_EPOCH + position["step"]


def ranks_of(process):
    launcher = psutil.Process(process.pid)
    return [each for each in launcher.children() if "nt3" in " ".join(each.cmdline())]


def test_interrupted_killed_and_continued_to_the_end(command, tmp_path):
    directory = tmp_path / "out/EXP000/RUN000"
    history = directory / "history.csv"
    process = command()
    wait_until(lambda: num_lines(history) > 2, START_S, process)
    process.send_signal(signal.SIGUSR1)
    code, output = await_end(process, END_S)
    print(output)
    assert code == 128 + signal.SIGUSR1
    first = read_record(directory / "run.json")
    assert (first["status"], first["failure"]["rank"]) == ("interrupted", 0)
    saved = directory / "ckpts" / first["checkpoints"]["newest"]
    assert saved.is_dir()
    assert str(saved) in output
    assert first["total_s"] > first["phases"]["train"]["min_s"] > 0

    process = command()
    wait_until(lambda: num_lines(history) > 5, START_S, process)
    for rank in ranks_of(process):
        os.kill(rank.pid, signal.SIGKILL)
    await_end(process, END_S)
    wait_until(lambda: read_record(directory / "run.json")["status"] != "running", END_S)
    lost = read_record(directory / "run.json")
    assert [part["status"] for part in lost["segments"]] == ["interrupted", "failed"]
    steps = lost["segments"][1]["steps"]
    assert steps == lost["failure"]["steps"] > 14

    code, output = await_end(command(), START_S)
    print(output)
    assert code == 0
    record = read_record(directory / "run.json")
    parts = record["segments"]
    assert [part["status"] for part in parts] == ["interrupted", "failed", "ok"]
    for earlier, later in pairwise(parts):
        assert earlier["end"] == later["begin"]
    assert parts[0]["lost_steps"] == 0
    done = steps_before(parts[1]["end"]) - steps_before(parts[1]["begin"])
    assert 0 <= parts[1]["lost_steps"] == steps - done
    kept = sum(part["steps"] - part.get("lost_steps", 0) for part in parts)
    assert kept == NUM_STEPS
    assert record["totals"]["total_s"] == pytest.approx(sum(part["total_s"] for part in parts))
    energies = [part["energy"] for part in parts]
    assert {energy["kind"] for energy in energies} == {"simulated"}
    for part, energy in zip(parts, energies, strict=True):
        assert energy["energy_j"] == pytest.approx(100.0 * part["total_s"], rel=0.2)
    whole_j = record["totals"]["energy"]["energy_j"]
    assert whole_j == pytest.approx(sum(energy["energy_j"] for energy in energies))
    assert [epoch["epoch"] for epoch in record["training"]["epochs"]] == list(range(1, 25))
    assert {epoch["segment"] for epoch in record["training"]["epochs"]} == {1, 2, 3}
    assert num_lines(directory / "history.csv") == 25
