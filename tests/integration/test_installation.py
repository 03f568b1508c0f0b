"""What `make test` asks of an installation: the command line, and every benchmark on two ranks."""

from __future__ import annotations

import csv
import json
from importlib.util import find_spec

import psutil
import pytest

from tests.conftest import CANDLE_P1, await_end, wait_until
from tests.records import read_record

STEPS = "--train_steps 2 --val_steps 1 --test_steps 1 --epochs 4 --check_replicas True"
NT3 = "--data_dir made --conv 8 20 1 --pool 10 --dense 16"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The directory in which the commands run."""
    return tmp_path_factory.mktemp("place")


@pytest.fixture
def candle_p1(execute, place):
    """Runs a command, which must succeed; returns what it prints."""

    def candle_p1(*argv):
        code, output = execute([*CANDLE_P1, *argv], cwd=place)
        assert code == 0, output
        return output

    return candle_p1


@pytest.fixture
def made(candle_p1, place):
    """The directory of NT3's synthetic files."""
    if not (place / "made").exists():
        candle_p1("data", "make", "nt3", "--size", "small", "--out", "made")
    return place / "made"


@pytest.fixture
def directory_of(candle_p1, made, mpirun, place, request):
    """Returns the directory of a benchmark's run; that of NT3 is started by the command."""

    def directory_of(name):
        if name != "nt3":
            return request.getfixturevalue("trained") / name
        directory = place / "output/EXP000/RUN000"
        if not directory.exists():
            flags = f"{NT3} {STEPS} --output_dir output"
            candle_p1("run", "nt3", "--np", 2, "--", *flags.split())
        return directory

    return directory_of


@pytest.mark.parallel
@pytest.mark.parametrize("name", ["nt3", "p1b1", "p1b2", "p1b3"])
def test_every_benchmark_trains_on_two_ranks(name, directory_of, made):
    directory = directory_of(name)
    record = read_record(directory / "run.json")
    assert (record["benchmark"], record["status"]) == (name, "ok")
    assert (record["num_ranks"], record["launcher"]) == (2, "mpirun")
    assert record["distributed"]["averaging_checked"]
    assert record["data"]["synthetic"]
    assert record["plan"]["epochs_per_rank"] == len(record["training"]["epochs"]) == 2
    assert record["quality"]["loss"]["value"] > 0
    for phase in ("load", "preprocess", "build", "broadcast", "train", "evaluate"):
        assert record["phases"][phase]["max_s"] >= record["phases"][phase]["min_s"] > 0
    assert {"history.csv", "history.png", "final_params.txt"} <= {
        path.name for path in directory.iterdir()
    }
    if name == "nt3":
        path = made / "nt_train2.csv"
        assert record["parameters"]["train_data"]["value"] == str(path)
        file = record["data"]["files"]["train"]
        assert (file["path"], file["file_bytes"]) == (str(path), path.stat().st_size)


@pytest.mark.parallel
def test_a_rank_that_is_killed_ends_the_job_and_is_named(start, made, mpirun, place):
    flags = f"{NT3} --epochs 2000 --epochs_scaling weak --output_dir killed"
    argv = ["run", "nt3", "--np", 2, "--", *flags.split()]
    job = start([*CANDLE_P1, *argv], cwd=place)
    directory = place / "killed/EXP000/RUN000"
    table = directory / "history.csv"
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
    record = read_record(directory / "run.json")
    assert record["status"] == "failed"
    failure = record["failure"]
    assert (failure["rank"], failure["pid"], failure["phase"]) == (1, victim.pid, "train")
    assert f"rank 1 (host {failure['host']}, pid {victim.pid})" in output


@pytest.mark.parallel
def test_a_run_is_shown(candle_p1, directory_of, place):
    output = candle_p1("show", directory_of("nt3"), "--full", "--html", "run.html")
    for phase in ("load", "train", "evaluate"):
        assert phase in output
    assert (place / "run.html").read_text().count("<svg") == 2


@pytest.mark.parallel
def test_runs_are_reported_and_compared(candle_p1, directory_of, place):
    names = ["nt3", "p1b1"]
    directories = [directory_of(name) for name in names]
    candle_p1("report", *directories, "-o", "report")
    assert "<svg" in (place / "report/index.html").read_text()
    rows = list(csv.DictReader((place / "report/runs.csv").read_text().splitlines()))
    assert sorted(row["benchmark"] for row in rows) == names
    candle_p1("compare", directories[0], directories[0], "--json", "compare.json")
    assert json.loads((place / "compare.json").read_text())


def test_loaders_are_compared(candle_p1, made, place):
    methods = ["original", "parallel"]
    argv = ["nt3", "--data_dir", made, "--repeats", 1, "--json", "load.json"]
    candle_p1("bench", "load", *argv, "--methods", ",".join(methods))
    results = json.loads((place / "load.json").read_text())["results"]
    assert [result["method"] for result in results] == methods
    assert all(result["median_s"] > 0 for result in results)


def test_a_study_is_planned(candle_p1):
    assert "strong-nt3" in candle_p1("study", "list")
    assert "--loader original" in candle_p1("study", "show", "strong-nt3", "--ranks", "1")


def test_a_job_script_is_written(candle_p1):
    script = candle_p1("submit", "nt3", "--machine", "slurm", "--nodes", 2, "--dry_run")
    assert "#SBATCH" in script
    assert "--nodes=2" in script


@pytest.mark.horovod
@pytest.mark.jax_engine
@pytest.mark.parallel
def test_the_doctor_finds_no_problem(candle_p1, mpirun):
    output = candle_p1("doctor")
    for name in ("keras", "engine", "MPI", "MPI threads", "launcher", "cores", "memory"):
        assert f"\n{name}" in "\n" + output
    assert ("\nHorovod" in output) == bool(find_spec("horovod"))
