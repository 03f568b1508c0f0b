"""What a run measures: phases, communication, efficiency, energy, profiles; and candle-p1 show."""

from __future__ import annotations

import csv
import math
import pstats
import re
from pathlib import Path

import pytest

from candle_p1.reports.timeline.summary import summarize
from tests.conftest import NT3_SCRIPT, await_end, shell_environment, start_group
from tests.records import per_rank, read_record

pytestmark = pytest.mark.extended

HERE = Path(__file__).parent
SMALL_MODEL = ["--conv", "8", "20", "1", "--pool", "10", "--dense", "16"]


SLOW_S = 0.2
"""By how much the second rank is slower in every step."""


@pytest.fixture(scope="module")
def slow(mpirun, data_directory, tmp_path_factory):
    """Trains NT3 on two ranks, of which the second is slow; returns (directory, output)."""
    directory = tmp_path_factory.mktemp("slow")
    slow = {"NT3_FOLDER": str(NT3_SCRIPT.parent), "SLOW_RANKS": "1", "SLOW_S": str(SLOW_S)}
    argv = [HERE / "slow_nt3.py", "--output_dir", ".", *SMALL_MODEL]
    argv += ["--epochs", "4", "--timeline", "timeline.json"]
    environment = shell_environment(data_directory) | slow
    process = start_group(mpirun(2, *argv), directory, env=environment)
    code, output = await_end(process, 600)
    print(output)
    assert code == 0, output
    return directory, output


def write_recording(path, seconds=300, hz=20):
    """Writes a recording of a processor's energy counter and of its memory's power."""
    energy_j = 0.0
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        columns = "time_s,node,device,label,domain,source,reading,resolution_s,value"
        writer.writerow(columns.split(","))
        for i in range(seconds * hz):
            power_w = 80 + 30 * math.sin(i / hz)
            energy_j += power_w / hz
            writer.writerow([i / hz, 0, "package-0", "CPU", "cpu", "rapl", "energy", "", energy_j])
            writer.writerow([i / hz, 0, "dram-0", "DRAM", "memory", "rapl", "power", "", 11.5])


@pytest.mark.parallel
def test_timeline_and_record_of_a_run_agree(slow):
    directory, _ = slow
    path = directory / "run.json"
    record = read_record(path)
    assert record["training"]["traced"]
    timeline = summarize(directory / "timeline.json").to_dict()
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


@pytest.mark.parallel
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
    fast, slow = per_rank(path, "efficiency.useful")
    num_steps = sum(epoch["steps"]["num"] for epoch in record["training"]["epochs"])
    assert slow - fast > 0.1 * SLOW_S * num_steps  # a busy machine delays the imports of either
    assert run["load_balance"] == pytest.approx((fast + slow) / 2 / slow)
    assert re.search(r"POP efficiency 0\.\d+ = load balance", output)


@pytest.mark.parallel
def test_phases_fill_the_run_and_energies_add_up(mpirun, execute, nt3_script, tmp_path):
    write_recording(tmp_path / "recording.csv")
    argv = [nt3_script, "--output_dir", ".", *SMALL_MODEL, "--epochs", "4"]
    argv += ["--power", "replay:recording.csv", "--power_hz", "20", "--profiling", "True"]
    code, output = execute(mpirun(2, *argv))
    assert code == 0, output
    path = tmp_path / "run.json"
    record = read_record(path)

    phases = record["phases"]
    for rank in range(2):
        in_phases_s = sum(per_rank(path, f"phases.{name}")[rank] for name in phases)
        assert 0.98 * record["total_s"] < in_phases_s < 1.02 * record["total_s"]
    begins = [per_rank(path, f"phases.{name}.begin")[0] for name in phases]
    assert begins == sorted(begins)
    assert begins[0] == 0
    for phase in phases.values():
        parts_s = sum(part["mean_s"] for part in phase.get("parts", {}).values())
        assert parts_s <= phase["mean_s"]
    assert {"read", "parse", "communicate"} <= set(phases["load"]["parts"])
    assert "scale" in phases["preprocess"]["parts"]
    for file in record["data"]["files"].values():
        # The ranks have read all bytes behind the header, if any, between them, while they loaded.
        read = file["reading"]["read"]["mean_bytes"] * 2
        assert 0.9 * file["file_bytes"] < read <= file["file_bytes"]
        assert file["reading"]["begin"]["min_s"] >= phases["load"]["begin"]["min_s"]
        assert len(file["reading"]["num_ranks"]) > 1
    assert phases["load"]["usage"]["read"]["max_bytes"] > 1000
    assert phases["train"]["usage"]["peak_rss"]["max_bytes"] <= record["peak_rss"]["max_bytes"]

    energy = record["energy"]
    assert energy["kind"] == "simulated"
    assert energy["covers"] == ["cpu", "memory"]
    # A phase in which the sampler could not run has no energy, and there is time between phases,
    # the more the busier the machine is. The recorded power is between these limits.
    known = {name: phase for name, phase in energy["phases"].items() if "energy_j" in phase}
    assert "train" in known
    rest_j = energy["total_j"] - sum(phase["energy_j"] for phase in known.values())
    rest_s = energy["total_s"] - sum(per_rank(path, f"phases.{name}")[0] for name in known)
    assert 61.5 * rest_s < rest_j + 1e-3 * energy["total_j"]
    assert 121.5 * rest_s > rest_j - 1e-3 * energy["total_j"]
    memory = next(group for group in energy["devices"] if group["domain"] == "memory")
    assert memory["power"]["mean_w"] == pytest.approx(11.5, rel=1e-3)
    assert (tmp_path / energy["traces"][0]).exists()

    assert record["training"]["profiled"]
    profiles = sorted((tmp_path / "profile").glob("rank-*.prof"))
    assert len(profiles) == 2
    calls = sum(pstats.Stats(str(profile)).total_calls for profile in profiles)
    assert f"{calls} function calls" in (tmp_path / "profile/top.txt").read_text()

    code, output = execute(["candle-p1", "show", ".", "--full", "--html", "page.html"])
    assert code == 0, output
    assert "simulated" in output
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 2
    assert not re.search(r'(src|href)="(?!data:|#)', page)


def test_a_run_of_one_rank_traces_its_steps_and_says_why_energy_is_absent(
    execute, nt3_script, tmp_path
):
    argv = ["python", nt3_script, "--output_dir", ".", *SMALL_MODEL, "--epochs", "1"]
    code, output = execute([*argv, "--power", "none", "--step_trace", "True"])
    assert code == 0, output
    record = read_record(tmp_path / "run.json")
    assert record["training"]["profiled"]
    assert any(path.is_file() for path in (tmp_path / "step_trace").rglob("*"))
    energy = record["energy"]
    assert energy["kind"] == "absent"
    assert "--power none" in energy["reason"]
    assert "total_j" not in energy


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--power", "cray"], "power cray"),
        (["--power", "solar"], "power: 'solar'"),
        (["--power", "replay:missing.csv"], "missing.csv"),
        (["--timeline", "t.json"], "timeline t.json"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_run(
    execute, nt3_script, tmp_path, flags, named
):
    code, output = execute(["python", nt3_script, "--output_dir", ".", *flags])
    assert code == 2, output
    assert output.count("error: ") == 1
    assert named in output
    assert not (tmp_path / "run.json").exists()
