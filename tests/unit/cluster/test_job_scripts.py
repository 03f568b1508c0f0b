"""The text of job scripts: tests/files/jobs holds one for each machine and scaling mode."""

from __future__ import annotations

import shutil
import stat
import subprocess
from dataclasses import replace

import pytest

from candle_p1.benchmark import SCALING_MODES, find_benchmark
from candle_p1.cluster import launchers
from candle_p1.cluster.job import JobOptions
from candle_p1.cluster.machine import load_machine
from candle_p1.cluster.schedulers import find_scheduler
from candle_p1.cluster.submission import JobArray
from tests.conftest import ROOT
from tools.job_scripts import paper_job, ready_scripts, write_all

GOLDEN = ROOT / "tests/files/jobs"
SIZES = {"local": 1, "polaris": 12}
"""Nodes of a machine's golden scripts; usually 8."""
QUEUES = {"aurora": "debug-scaling"}
"""Their queues, where the default one takes no job of that size."""
MACHINES = sorted(path.stem for path in ROOT.glob("candle_p1/cluster/machines/*.toml"))


@pytest.fixture(autouse=True)
def not_root(monkeypatch):
    monkeypatch.setattr(launchers.os, "geteuid", lambda: 1000)


@pytest.mark.parametrize("machine_name", MACHINES)
@pytest.mark.parametrize("mode", SCALING_MODES)
def test_the_script_of_nt3(machine_name, mode):
    machine, num_nodes = load_machine(machine_name), SIZES.get(machine_name, 8)
    job = paper_job(find_benchmark("nt3"), machine, mode, num_nodes, 60)
    options = JobOptions(queue=QUEUES.get(machine_name))
    replace(job, options=replace(options, project="PROJECT")).check()
    (golden,) = GOLDEN.glob(f"{machine_name}_{mode}.*")
    assert golden.suffix == find_scheduler(machine.scheduler).suffix
    assert replace(job, options=options).script() == golden.read_text()


def test_the_ready_scripts_are_up_to_date(tmp_path):
    """To update them: make job-scripts."""
    texts = ready_scripts()
    names = {str(path.relative_to(ROOT)) for path in ROOT.glob("jobs/*/*")}
    write_all(tmp_path)
    assert names == set(texts) == {str(p.relative_to(tmp_path)) for p in tmp_path.glob("*/*/*")}
    for name in names:
        for path in (ROOT / name, tmp_path / name):
            assert path.read_text() == texts[name], path
            assert path.stat().st_mode & stat.S_IXUSR, path


@pytest.mark.parametrize(
    ("path", "size"),
    [
        ("summit/p1b1_strong.lsf", "16 nodes, 96 ranks"),  # 4 epochs on each rank
        ("summit/nt3_weak.lsf", "512 nodes, 3072 ranks"),
        ("theta/nt3_strong.sh", "384 nodes, 384 ranks"),
    ],
)
def test_the_ready_scripts_have_the_sizes_of_the_paper(path, size):
    assert size in (ROOT / "jobs" / path).read_text()


def others(directory):
    """Writes scripts with what the golden ones do not have, for each scheduler and runtime."""
    written = []
    for machine_name in ("frontier", "perlmutter", "polaris", "summit"):
        machine = load_machine(machine_name)
        job = paper_job(find_benchmark("nt3"), machine, "weak", SIZES.get(machine_name, 8), 60)
        texts = {
            "staged": JobOptions(staged="/a/env.tar", exclude=["n1", "n2"]),
            "container": JobOptions(container="/a/candle.sif"),
        }
        texts = {kind: replace(job, options=each).script() for kind, each in texts.items()}
        scripts = [directory / "a/job.sh", directory / "b/job.sh"]
        texts["array"] = JobArray("two", [job, job], scripts, 1, directory).text()
        for kind, text in texts.items():
            written.append(directory / f"{machine_name}_{kind}.sh")
            written[-1].write_text(text)
    return written


@pytest.mark.extended
@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say(tmp_path):
    files = [*ROOT.glob("common/*.sh"), *GOLDEN.glob("*_strong.*"), *others(tmp_path)]
    done = subprocess.run(["shellcheck", "-x", *files], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
