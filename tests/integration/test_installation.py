"""What `make test` asks of an installation: every benchmark trains, and a rank's end ends a job."""

from importlib.util import find_spec

import psutil
import pytest

from tests.conftest import CANDLE_P1, await_end, wait_until
from tests.records import read_record


@pytest.mark.parallel
@pytest.mark.parametrize("name", ["nt3", "p1b1", "p1b2", "p1b3"])
def test_every_benchmark_trains_on_two_ranks(trained, name):
    record = read_record(trained / name / "run.json")
    assert (record["benchmark"], record["status"]) == (name, "ok")
    assert (record["num_ranks"], record["launcher"]) == (2, "mpirun")
    assert record["distributed"]["averaging_checked"]
    assert record["data"]["synthetic"]
    assert record["plan"]["epochs_per_rank"] == len(record["training"]["epochs"]) == 2
    assert record["quality"]["loss"]["value"] > 0
    for phase in ("load", "preprocess", "build", "broadcast", "train", "evaluate"):
        assert record["phases"][phase]["max_s"] >= record["phases"][phase]["min_s"] > 0
    written = {path.name for path in (trained / name).iterdir()}
    assert {"history.csv", "history.png", "final_params.txt"} <= written


@pytest.mark.parallel
def test_a_rank_that_is_killed_ends_the_job_and_is_named(start, succeed, mpirun, tmp_path):
    succeed([*CANDLE_P1, "data", "make", "nt3", "--size", "small", "--out", "made"])
    flags = "--data_dir made --conv 8 20 1 --pool 10 --dense 16 --output_dir ."
    flags += " --epochs 2000 --epochs_scaling weak"
    job = start([*CANDLE_P1, "run", "nt3", "--np", 2, "--", *flags.split()])
    table = tmp_path / "history.csv"
    # Its second line is written after an epoch, in which both ranks have trained.
    wait_until(lambda: table.exists() and table.read_text().count("\n") > 1, 120, job)
    family = psutil.Process(job.pid).children(recursive=True)
    victim = next(
        process for process in family if process.environ().get("OMPI_COMM_WORLD_RANK") == "1"
    )
    victim.kill()
    code, output = await_end(job, 60)
    assert code != 0
    wait_until(lambda: not any(process.is_running() for process in family), 30)
    record = read_record(tmp_path / "run.json")
    assert record["status"] == "failed"
    failure = record["failure"]
    assert (failure["rank"], failure["pid"], failure["phase"]) == (1, victim.pid, "train")
    assert f"rank 1 (host {failure['host']}, pid {victim.pid})" in output
    path = tmp_path / "made/nt_train2.csv"
    file = record["data"]["files"]["train"]
    assert (file["path"], file["file_bytes"]) == (str(path), path.stat().st_size)


@pytest.mark.horovod
@pytest.mark.jax_engine
@pytest.mark.parallel
def test_the_doctor_finds_no_problem(succeed, mpirun):
    output = succeed([*CANDLE_P1, "doctor"])
    for name in ("keras", "engine", "MPI", "MPI threads", "launcher", "cores", "memory"):
        assert f"\n{name}" in "\n" + output
    assert ("\nHorovod" in output) == bool(find_spec("horovod"))
