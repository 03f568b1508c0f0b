"""The text of job scripts: tests/files/jobs holds one for each machine and scaling mode."""

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
from tools.job_scripts import paper_job, write_all

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
    write_all(tmp_path)
    names = {str(path.relative_to(ROOT)) for path in ROOT.glob("jobs/*/*")}
    assert names == {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*/*")}
    for name in names:
        ours, made = ROOT / name, tmp_path / name
        assert ours.read_text() == made.read_text(), name
        assert ours.stat().st_mode & made.stat().st_mode & stat.S_IXUSR, name


def others(directory):
    """Writes scripts with what the golden ones do not have, for each scheduler and runtime."""
    staged = JobOptions(staged="/a/env.tar", exclude=["n1", "n2"])
    scripts = [directory / "a/job.sh", directory / "b/job.sh"]
    for name in ("frontier", "perlmutter", "polaris", "summit"):
        job = paper_job(find_benchmark("nt3"), load_machine(name), "weak", SIZES.get(name, 8), 60)
        texts = [
            replace(job, options=staged).script(),
            replace(job, options=JobOptions(container="/a/candle.sif")).script(),
            JobArray("two", [job, job], scripts, 1, directory).text(),
        ]
        for i, text in enumerate(texts):
            path = directory / f"{name}{i}.sh"
            path.write_text(text)
            yield path


@pytest.mark.extended
@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say(tmp_path):
    files = [*ROOT.glob("common/*.sh"), *GOLDEN.glob("*_strong.*"), *others(tmp_path)]
    done = subprocess.run(["shellcheck", "-x", *files], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
