"""What is measured of ranks that wait for a slow one."""

import re
from pathlib import Path

import pytest

from candle_p1.reports.horovod_timeline import summarize
from tests.conftest import NT3_SCRIPT, await_end, shell_environment, start_group
from tests.integration.conftest import NARROW
from tests.records import per_rank, read_record

pytestmark = [pytest.mark.extended, pytest.mark.parallel]

HERE = Path(__file__).parent
SLOW_S = 0.2
"""By how much the second rank is slower in every step."""
SLACK_S = 2e-3


@pytest.fixture(scope="module")
def slow(mpirun, data_directory, tmp_path_factory):
    """Trains NT3 on two ranks, of which the second is slow; returns (directory, output)."""
    directory = tmp_path_factory.mktemp("slow")
    slow = {"NT3_FOLDER": str(NT3_SCRIPT.parent), "SLOW_RANKS": "1", "SLOW_S": str(SLOW_S)}
    argv = [HERE / "slow_nt3.py", "--output_dir", ".", *NARROW.split()[1:]]
    argv += ["--epochs", "4", "--timeline", "timeline.json"]
    environment = shell_environment(data_directory) | slow
    process = start_group(mpirun(2, *argv), directory, env=environment)
    code, output = await_end(process, 600)
    print(output)
    assert code == 0, output
    return directory, output


def test_timeline_and_record_of_a_run_agree(slow):
    directory, _ = slow
    path = directory / "run.json"
    record = read_record(path)
    assert record["training"]["traced"]
    timeline = summarize(directory / "timeline.json").to_dict()
    transfer = "phases.broadcast.regions.transfer"
    begin_s, lasted_s = per_rank(path, f"{transfer}.begin")[0], per_rank(path, transfer)[0]
    anchor = record["timeline"]
    elapsed_us = timeline["origin_epoch_us"] - anchor["anchor_epoch_us"]
    origin_s = anchor["anchor_s"] + elapsed_us / 1e6
    assert begin_s <= origin_s + timeline["broadcast"]["begin_s"] + SLACK_S
    assert origin_s + timeline["broadcast"]["end_s"] <= begin_s + lasted_s + SLACK_S
    collectives = record["communication"]["collectives"]
    names = [(each["library"], each["name"]) for each in collectives]
    place = f"communication.collectives.{names.index(('horovod', 'broadcast'))}.time"
    # The first rank is always ready first, so its communication covers that of both.
    broadcast_s = per_rank(path, place)[0]
    assert broadcast_s > 0.5
    assert timeline["broadcast"]["overhead_s"] == pytest.approx(broadcast_s, rel=0.05)
    # Not the first epoch, in which either rank may be the first to have traced the model.
    later = dict(enumerate(record["training"]["epochs"][1:], start=1))
    allreduce_s = sum(per_rank(path, f"training.epochs.{i}.allreduce")[0] for i in later)
    num_steps = sum(epoch["steps"]["num"] for epoch in later.values())
    steps_s = timeline["steps"]["communication_s"][-num_steps:]
    assert sum(steps_s) == pytest.approx(allreduce_s, rel=0.05)
    assert set(timeline["steps"]["num_tensors"][-num_steps:]) == {6}
    num_bytes = 4 * record["model"]["num_parameters"]
    assert set(timeline["steps"]["bytes"][-num_steps:]) == {num_bytes}


def test_a_slow_rank_shows_in_the_efficiencies(slow):
    directory, output = slow
    path = directory / "run.json"
    record = read_record(path)
    for i, epoch in enumerate(record["training"]["epochs"][1:], start=1):
        fast, slow = per_rank(path, f"training.epochs.{i}.exposed_communication")
        delay_s = SLOW_S * epoch["steps"]["num"]
        assert fast > 0.9 * delay_s
        assert fast - slow > 0.5 * delay_s  # a busy machine delays both
        efficiency = epoch["efficiency"]
        assert efficiency["load_balance"] < 0.95
        product = efficiency["load_balance"] * efficiency["communication_efficiency"]
        assert efficiency["parallel_efficiency"] == pytest.approx(product)
    run = record["efficiency"]
    spent, waited = (per_rank(path, f"phases.train{each}") for each in ("", ".communication"))
    fast, slow = (took - wait for took, wait in zip(spent, waited, strict=True))
    num_steps = sum(epoch["steps"]["num"] for epoch in record["training"]["epochs"])
    assert slow - fast > 0.1 * SLOW_S * num_steps  # a busy machine delays the imports of either
    assert 0 < run["load_balance"] < 1
    product = run["load_balance"] * run["communication_efficiency"]
    assert run["parallel_efficiency"] == pytest.approx(product)
    assert re.search(r"POP efficiency 0\.\d+ = load balance", output)
