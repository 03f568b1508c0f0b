"""A study as users start it, with a kill -9 half-way."""

import psutil
import pytest

from tests.conftest import CANDLE_P1, wait_until
from tests.records import read_record

pytestmark = [pytest.mark.extended, pytest.mark.parallel]

STUDY = """
title = "NT3 in a small network"
benchmark = "nt3"
repeats = 1
minutes = 3
threads = 1
timeline = true
vary.loader = ["original", "parallel"]
sizes.tiny.ranks = [2]

[flags]
size = "small"
epochs = 2
train_steps = 2
val_steps = 1
test_steps = 1
conv = [4, 20, 1]
pool = 10
dense = 8
"""


def test_a_study_that_was_killed_resumes_and_repeats_no_finished_run(
    mpirun, start, succeed, tmp_path
):
    (tmp_path / "tiny.toml").write_text(STUDY)
    command = [*CANDLE_P1, "study", "run", "tiny.toml"]
    place = tmp_path / "output/tiny-tiny"

    def records():
        return {path.parent.name: path for path in place.glob("*/run.json")}

    def is_half_way():
        found = records().values()
        statuses = [read_record(path)["status"] for path in found if path.stat().st_size]
        return len(found) == 2 and "running" in statuses

    def are_gone():
        """Whether nothing works on the study's runs, their watchdog servers included."""
        lines = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
        return not any(word.startswith(str(place)) for line in lines for word in line)

    process = start(command)
    wait_until(is_half_way, 120, process)
    process.kill()
    process.wait()
    wait_until(are_gone, 40)
    before = records()
    (done,) = (name for name in before if read_record(before[name])["status"] == "ok")
    (killed,) = before.keys() - {done}
    written = before[done].stat().st_mtime_ns

    output = succeed(command)
    assert "1 of 2 runs are already done" in output
    assert "2 of 2 runs are done" in output
    found = records()
    assert found[done].stat().st_mtime_ns == written
    assert found.keys() == {*before, f"{killed}-attempt2"}
    for name in (done, f"{killed}-attempt2"):
        record, timeline = read_record(found[name]), found[name].with_name("timeline.json")
        assert (record["status"], record["num_ranks"]) == ("ok", 2)
        assert {rank["threads"] for rank in record["ranks"]} == {1}
        assert (record["data"]["loader"] == "parallel") == ("parallel" in name)
        assert (record["training"]["traced"], record["timeline"]["file"]) == (True, str(timeline))
        assert "NEGOTIATE_BROADCAST" in timeline.read_text()
