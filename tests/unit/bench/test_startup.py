from datetime import datetime

import pytest

from candle_p1.bench import startup_baseline
from candle_p1.bench.startup import outcome_of, start_baseline
from candle_p1.records.rank_stats import Seconds
from candle_p1.records.record import make_record
from tests.planted_records import planted_record

NUM_RANKS = 2
BEFORE = {"process": [0.8, 0.9], "mpi": [0.1, 0.2]}
STARTUP = {"devices": 2.5, "engine": 0.25, "self_test": 0.5, "files": 0.125}
IMPORT_S = 2.0
PHASES = {"digest": 0.1, "preprocess": 0.2, "build": 0.3}


def of(*seconds):
    return Seconds.over([*seconds] * (NUM_RANKS // len(seconds))).model_dump()


@pytest.fixture
def record():
    """The record of a run whose first step ends 7 s after its start, on the slowest rank."""
    content = planted_record(
        "nt3", NUM_RANKS, startup_s=3.5, load_s=1.0, wait_s=0.5, epochs_per_rank=1
    ).model_dump(exclude_unset=True)
    startup, epoch = content["phases"]["startup"], content["training"]["epochs"][0]
    startup["regions"] = {name: of(seconds) for name, seconds in STARTUP.items()}
    startup["regions"]["devices"]["regions"] = {"import": of(IMPORT_S)}
    content["phases"] |= {name: of(seconds) for name, seconds in PHASES.items()}
    content["launch"] = {name: of(*each) for name, each in BEFORE.items()}
    content["phases"]["train"]["begin"], epoch["begin"] = of(5.75), of(5.9, 6.0)
    epoch["steps"] |= {"first": of(0.5, 1.0), "median": of(0.02, 0.03)}
    return make_record(content)


def seconds_of(moment):
    return datetime.fromisoformat(moment).timestamp()


def test_the_parts_of_a_start_follow_from_its_record_and_add_up(record):
    began_s, ended_s = seconds_of(record.started) - 1.5, seconds_of(record.ended) + 2
    found = outcome_of(record, began_s, ended_s)
    assert found["elapsed_s"] == pytest.approx(1.5 + 6.0 + 1.0)
    assert (found["step_s"], found["end_s"]) == (pytest.approx(0.03), pytest.approx(2))
    parts_s = dict(found["parts_s"])
    rest_s = parts_s.pop("other, and waiting for the slowest rank")
    expected = {"launch": 1.5 - 0.85, "Python, candle_p1, parameters": 0.85 - 0.15, "MPI": 0.15}
    expected |= {"import of Keras and framework": IMPORT_S}
    expected |= {"devices": STARTUP["devices"] - IMPORT_S, "engine": STARTUP["engine"]}
    expected |= {"self-test": STARTUP["self_test"], "locating files": STARTUP["files"]}
    expected |= PHASES | {"load": 1.0, "broadcast": 0.5}
    expected |= {"preparing to train": 5.95 - 5.75, "tracing and first step": 0.75}
    assert parts_s == pytest.approx(expected)
    assert rest_s + sum(parts_s.values()) == pytest.approx(found["elapsed_s"])
    unknown = make_record(record.model_dump(exclude_unset=True) | {"launch": None})
    found = outcome_of(unknown, began_s, ended_s)
    assert found["parts_s"]["launch, Python, MPI"] == pytest.approx(1.5)
    assert sum(found["parts_s"].values()) == pytest.approx(found["elapsed_s"])


@pytest.mark.parametrize("num_bytes", [0, startup_baseline.BLOCK_BYTES + 5])
def test_the_shares_of_a_file_are_all_of_it(tmp_path, num_bytes):
    path = tmp_path / "file"
    path.write_bytes(bytes(num_bytes))
    shares = [startup_baseline.read_share(str(path), share, 3) for share in range(3)]
    assert sum(shares) == num_bytes
    assert max(shares) - min(shares) <= 1


def test_the_baseline_says_when_it_was_done_or_why_not(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"1,2\n")
    found = start_baseline("json", [path], 2)
    assert list(found["parts_s"]) == ["Python", "import json", "reading the files' bytes"]
    assert min(found["parts_s"].values()) >= 0
    with pytest.raises(RuntimeError, match="no_such_framework"):
        start_baseline("no_such_framework", [], 1)
