from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

ROOT = Path(__file__).resolve().parent.parent
NT3_SCRIPT = ROOT / "benchmarks/nt3/nt3_baseline_keras2.py"


@pytest.fixture(scope="session")
def data_directory(tmp_path_factory):
    """Where the synthetic data of the test session lie."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def environment(data_directory, monkeypatch):
    """The environment of a user's shell, with data in the session's directory."""
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMIX_", "PMI_", "HOROVOD_", "OMP_NUM_THREADS")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CANDLE_DATA_DIR", str(data_directory))
    return os.environ


@pytest.fixture
def start(environment, tmp_path):
    """Starts a command in a directory of its own, in a process group that ends with the test."""
    started = []
    # Under nohup or in the background of a shell script SIGINT is ignored, and children inherit it.
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)

    def start(command, **options):
        process = subprocess.Popen(
            [str(word) for word in command],
            **{
                "stdout": subprocess.PIPE,
                "stderr": subprocess.STDOUT,
                "text": True,
                "cwd": tmp_path,
                "start_new_session": True,
            }
            | options,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    signal.signal(signal.SIGINT, interrupt)


@pytest.fixture
def execute(start):
    """Runs a command to its end, within a time limit; returns (exit code, output)."""

    def execute(command, limit_s=240, **options):
        process = start(command, **options)
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            pytest.fail(f"still running after {limit_s} s: {command}\n{output}")
        return process.returncode, output

    return execute


@pytest.fixture
def mpirun():
    """Returns the command that starts ranks of a Python script; skips where there is no MPI."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    pytest.importorskip("horovod", reason="Horovod is not installed")
    from candle_p1.cluster import launchers

    def command(num_ranks, *words):
        return launchers.mpirun(num_ranks, [sys.executable, *map(str, words)]).command

    return command


@pytest.fixture
def benchmark_folders():
    """The folder that holds the benchmarks' folders."""
    return ROOT / "benchmarks"


@pytest.fixture
def nt3_script():
    """The path of NT3's script."""
    return NT3_SCRIPT
