"""candle-p1 bench as users start it."""

import json
import os
import re
import signal
import sys
from contextlib import suppress

import psutil
import pytest

from tests.conftest import CANDLE_P1, ROOT, await_end, wait_until

pytestmark = pytest.mark.extended

BENCH = [*CANDLE_P1, "bench"]
LIMIT_S = 60
SMALL_MODEL = ["--conv", "8", "20", "1", "8", "10", "1", "--dense", "20"]
STEP = ["step", "nt3", "--size", "small", "--steps", "1", "--rounds", "1", *SMALL_MODEL]


@pytest.fixture
def bench(succeed, tmp_path):
    """Measures, as the arguments of candle-p1 bench say; returns (report, output)."""

    def bench(*argv, **options):
        files = ("--json", "found.json", "--markdown", "found.md")
        output = succeed([*BENCH, *argv, *files], **options)
        assert (tmp_path / "found.md").read_text().startswith(f"# candle-p1 bench {argv[0]} ")
        return json.loads((tmp_path / "found.json").read_text()), output

    return bench


def test_formats_are_compared_with_what_converting_costs(bench):
    methods = ["parallel", "npy", "parallel-gz"]
    argv = ["load", "p1b2", "--size", "small", "--repeats", "1", "--methods", ",".join(methods)]
    report, _ = bench(*argv)
    assert [result["method"] for result in report["results"]] == methods  # of the same values
    one, *converted = report["results"]
    assert (one["convert_s"], one["stored_bytes"]) == (None, None)
    for result in converted:
        assert result["convert_s"] > 0
        is_text = result["method"] == "parallel-gz"
        assert result["stored_bytes"] > result["matrix_bytes"] / (100 if is_text else 10)
        assert is_text == (result["stored_bytes"] < result["file_bytes"] / 2)
        assert result["pays_after"].keys() == {"parallel"}


@pytest.mark.parallel
def test_the_papers_methods_are_compared(mpirun, bench, tmp_path):
    loaders = ["original", "chunked"]
    argv = ["load", "nt3", "--size", "small", "--repeats", "2", "--methods", ",".join(loaders)]
    report, output = bench(*argv, "--np", "2", "--picture", "load.png")
    assert [result["method"] for result in report["results"]] == loaders
    for result in report["results"]:
        assert result["repeats_s"] == list(map(max, result["per_rank_s"]))
        assert [len(per_rank_s) for per_rank_s in result["per_rank_s"]] == [2, 2]
        assert result["matrix_bytes"] <= result["peak_rank_bytes"] <= result["peak_bytes"]
        assert result["peak_bytes"] <= 2 * result["peak_rank_bytes"]
        assert result["bytes_read"] >= 2 * result["file_bytes"]
        assert set(result["per_file_median_s"]) == {"train", "test"}
    timed = [job["method"] for job in report["jobs"] if job["purpose"] == "time"]
    assert timed == loaders + loaders[::-1]
    assert report["synthetic"]
    assert "Summit (published)" in output
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parallel
def test_ranks_read_at_the_same_time_from_a_slow_source(mpirun, bench):
    """What depends on time here is the delay, and not how fast the machine is."""
    argv = ["nt3", "--size", "small", "--np", "1,2", "--delay", "0.2", "--repeats", "1"]
    report, _ = bench("read", *argv, "--blocks", "8")
    one, two = report["results"]
    assert (one["num_ranks"], two["num_ranks"]) == (1, 2)
    for result in (one, two):
        for role, num_bytes in report["files"].items():
            assert sum(result["per_rank"][role]["num_bytes"]) == num_bytes
        assert result["median_s"] >= 0.2 * 8 / result["num_ranks"]
    assert one["mean_ranks"] == pytest.approx(1)
    assert two["mean_ranks"] > 1


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["load", "nt3", "--data_dir", ".", "--methods", "chunked"], "error: chunked: .*line 2"),
        (["startup", "nt3", "--data_dir", "."], "error: candle-p1 run: .*line 2, column 2"),
        (["checkpoint", "nt3", "--directory", "/proc/self", *SMALL_MODEL], "--directory"),
    ],
)
def test_a_job_that_cannot_do_its_work_ends_the_comparison(execute, tmp_path, argv, text):
    (tmp_path / "nt_train2.csv").write_text("0,1.5,2\n1,x,2\n")
    (tmp_path / "nt_test2.csv").write_text("0,1.5,2\n")
    code, output = execute([*BENCH, *argv, "--json", "found.json"])
    assert code == 2, output
    assert re.search(text, output), output
    assert not (tmp_path / "found.json").exists()


@pytest.mark.parallel
def test_a_signal_ends_the_comparison_and_its_jobs(mpirun, start):
    process = start([*BENCH, "load", "nt3", "--repeats", "1000", "--np", "2"])

    def running():
        with suppress(psutil.NoSuchProcess):
            found = psutil.Process(process.pid).children(recursive=True)
            return found if len(found) >= 3 else None  # with the launcher

    jobs = wait_until(running, LIMIT_S, process)
    process.send_signal(signal.SIGINT)
    assert await_end(process, LIMIT_S)[0] == 128 + signal.SIGINT
    assert not [job for job in jobs if job.is_running()]


@pytest.mark.horovod
def test_a_step_is_measured_here_and_in_another_environment(bench):
    """In test_own_files.py it is compared with plain Keras, in test_keras2.py also with Keras 2."""
    report, _ = bench(*STEP, "--baseline", "none", "--compare_env", sys.executable)
    here, there = report["results"]
    assert here["batch_size"] == there["batch_size"] == 20
    assert here["has_fast_kernels"]
    assert here["peak_bytes"] > here["state_bytes"] > 0
    assert here["matrix_bytes"] > 0
    assert report["roofline"]["total_s"] > 0
    assert (here["python"], there["python"]) == (None, sys.executable)
    assert set(here["speedup"]) == {there["variant"]}
    assert there["backend"] == here["backend"]


@pytest.mark.horovod
def test_a_step_by_tables_agrees_with_one_of_their_rows(bench):
    flags = "--size small --steps 3 --rounds 1 --dense 50 --momentum 0.9"
    report, output = bench("step", "p1b3", *flags.split())
    assert report["differences"]["plain Keras"]["update"] < 1e-3
    bound = report["roofline"]
    assert bound["used_total_s"] < bound["total_s"]
    assert bound["used_flops"] < bound["flops"]
    assert "as computed" in output


@pytest.mark.parallel
@pytest.mark.horovod
def test_a_step_of_ranks_is_compared_with_one_process(mpirun, bench):
    report, output = bench(*STEP, "--np", "2")
    together, _, one = report["results"]
    found = [(each["num_ranks"], each.get("averages_gradients")) for each in report["results"]]
    assert found[:2] == [(2, True), (2, False)]
    assert together["state_bytes"] == 2 * one["state_bytes"]
    assert "exposed communication" in output


@pytest.mark.jax_engine
def test_without_a_gpu_there_is_one_message(execute, tmp_path):
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "ROCR_VISIBLE_DEVICES": "-1"}
    code, output = execute([*BENCH, "gpu", "--json", "gpu.json"], env=hidden)
    assert code == 2, output
    assert output.startswith("error: ")
    assert "JAX finds no GPU" in output
    assert not list(tmp_path.iterdir())


@pytest.mark.jax_engine
def test_every_precision_is_measured(bench):
    argv = ["p1b2", "--device", "cpu", "--size", "small", "--seconds", "0", "--rounds", "1"]
    report, output = bench("gpu", *argv, "--steps", "3")
    assert "MEASURED ON CPUs" in output
    assert "p1b2, bfloat16, plain Keras:" in output
    assert min(report["device"]["flops_per_s"].values()) > 0
    found = [(each["precision"], each["variant"]) for each in report["results"]]
    ours, *others = ("candle_p1", "candle_p1, plain kernels", "plain Keras")
    every = [(name, kind) for name in ("tf32", "bfloat16", "float32") for kind in (ours, *others)]
    assert sorted(found) == sorted([*every, ("tf32", "candle_p1, deterministic")])
    assert report["absent"] == {}
    for result in report["results"]:
        assert len(result["blocks_s"]) >= 3
        assert min(*result["first_steps_s"], result["bound_s"], result["times_ours"]) > 0
        assert set(result["no_energy"]) == {"energy", "power"}


def test_checkpoints_are_compared_with_keras(bench, tmp_path):
    argv = ["checkpoint", "nt3", "--rounds", "1", "--directory", "."]
    report, output = bench(*argv, *SMALL_MODEL)
    ours, waiting, backup, model = report["results"]
    names = ["candle_p1", "candle_p1, waiting", "BackupAndRestore", "model.save"]
    assert [result["variant"] for result in report["results"]] == names
    for result in report["results"]:
        assert len(result["safe"]["repeats_s"]) == len(result["plain_write_s"]) == 2
        assert result["file_bytes"] > report["state_bytes"]
        assert min(result["plain_write_s"]) > 0
    assert ours["num_steps_beside"] >= 0  # 0 if the disk is faster than a step
    assert waiting["num_steps_beside"] == backup["num_steps_beside"] == 0
    assert min(model["median_s"], report["restart"]["restore_s"]) > 0
    assert "--ckpt_every_s" in output
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".candle")] == []


@pytest.mark.parallel
@pytest.mark.horovod
def test_a_start_is_divided_into_its_parts(mpirun, bench):
    report, _ = bench("startup", "nt3", "--np", "2", "--rounds", "1", *SMALL_MODEL)
    run, baseline = report["results"]
    parts_s = {part["part"]: part["median_s"] for part in run["parts"]}
    assert {"launch", "MPI", "self-test", "load", "build", "tracing and first step"} <= set(parts_s)
    assert all(seconds >= 0 for name, seconds in parts_s.items() if not name.startswith("other"))
    for result in (run, baseline):
        assert sum(p["median_s"] for p in result["parts"]) == pytest.approx(result["median_s"])


def test_a_verb_is_one_module_as_the_documentation_shows(bench, tmp_path):
    page = (ROOT / "CONTRIBUTING.md").read_text()
    (program,) = (each for each in re.findall(r"```python\n(.*?)```", page, re.S) if "VERB" in each)
    assert len(program.splitlines()) <= 40
    (tmp_path / "sort.py").write_text(program)
    here = f"import candle_p1.bench\ncandle_p1.bench.__path__.append({str(tmp_path)!r})\n"
    (tmp_path / "sitecustomize.py").write_text(here)
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    report, _ = bench("sort", "--size", "100", "--rounds", "2", env=env)
    found = [(each["variant"], each["repeats"]) for each in report["results"]]
    assert found == [("quicksort", 2), ("stable", 2)]


@pytest.mark.parallel
def test_the_overhead_of_measuring_has_an_interval(mpirun, succeed, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    options = ["--block_epochs", "1", "--rounds", "6"]
    model = ["--size", "small", "--epochs", "1", *SMALL_MODEL]
    output = succeed([sys.executable, "-m", "tools.overhead", *options, "nt3", "--", *model])
    assert "nt3: 2 ranks x" in output
    assert re.search(r"\(95 % interval [-+.\d]+% to [-+.\d]+% of 6 rounds\)", output)
