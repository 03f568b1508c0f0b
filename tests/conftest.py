import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import numpy as np
import pytest

from candle_p1.distributed.backend import choose_backend

hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

ROOT = Path(__file__).resolve().parent.parent
NT3_SCRIPT = ROOT / "benchmarks/nt3/nt3_baseline_keras2.py"
CANDLE_P1 = (sys.executable, "-m", "candle_p1.cli")
"""The command line of this package, whichever environment is on PATH."""
NEEDS_HOROVOD = "needs TensorFlow and Horovod: make setup"
ENGINES = {
    "horovod": (("tensorflow", "horovod"), NEEDS_HOROVOD),
    "jax_engine": (("jax", "mpi4py"), "needs JAX and mpi4py: make test-jax"),
}
"""By marker: the packages of an engine, and why a test is skipped without them."""
EXTENDED = {"bench", "cluster", "modelling", "reports", "studies", "tools"}
EXTENDED_FOLDERS = {ROOT / "tests/unit" / each for each in EXTENDED}
"""Tests that `make test` omits, because what they test hardly depends on the installation."""

# Tests import Keras in this process, which takes TensorFlow unless it is told otherwise. Commands
# that they start have to find out for themselves.
TOLD_HERE = {"KERAS_BACKEND"} - os.environ.keys()
choose_backend()

# In the background of a shell script SIGINT is ignored, and what tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Tests start commands by their names, also if the environment has not been activated.
os.environ["PATH"] = f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}"


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(items):
    """Marks the tests that are extended by their folder, and skips those without their engine.

    A test with both markers runs with either engine; of several ranks, a test without a marker runs
    with Horovod.
    """
    installed = {name: all(map(find_spec, packages)) for name, (packages, _) in ENGINES.items()}
    for item in items:
        if item.path.parent in EXTENDED_FOLDERS:
            item.add_marker(pytest.mark.extended)
        wanted = [name for name in ENGINES if item.get_closest_marker(name)]
        if not wanted and item.get_closest_marker("parallel"):
            wanted = ["horovod"]
        if wanted and not any(installed[name] for name in wanted):
            reason = "; or ".join(ENGINES[name][1] for name in wanted)
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def session_directories(tmp_path_factory):
    """Keeps apart the directories that Open MPI names after pids, some left by killed launchers.

    JAX keeps what it compiles in this process: many tests train the same small networks.
    """
    directory = tmp_path_factory.mktemp("prte")
    if os.environ["KERAS_BACKEND"] == "jax":
        import jax

        jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("programs")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRTE_MCA_prte_tmpdir_base", str(directory))
        yield


@pytest.fixture(scope="session")
def data_directory(tmp_path_factory):
    """The directory of the session's synthetic data, which are made once."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def small_data(tmp_path_factory):
    """Returns the directory of a benchmark's small synthetic data, which are made once."""
    from candle_p1.benchmark import find_benchmark
    from candle_p1.datasets.synthetic import make

    @functools.cache
    def directory(name):
        directory = tmp_path_factory.mktemp(name)
        make(find_benchmark(name).recipe, "small", directory, seed=2019)
        return directory

    return directory


def _is_not_the_users(name):
    of_a_job = name.startswith(("OMPI_", "PMIX_", "PMI_", "HOROVOD_", "OMP_NUM_THREADS"))
    return of_a_job or name in TOLD_HERE


def shell_environment(data_directory):
    """Returns the environment of a user's shell, as it is now, for a job that tests share."""
    shell = {name: value for name, value in os.environ.items() if not _is_not_the_users(name)}
    return shell | {"CANDLE_DATA_DIR": str(data_directory)}


@pytest.fixture
def environment(data_directory, monkeypatch):
    """The environment of a user's shell, with data in the session's directory."""
    for name in filter(_is_not_the_users, list(os.environ)):
        monkeypatch.delenv(name)
    monkeypatch.setenv("CANDLE_DATA_DIR", str(data_directory))
    return os.environ


def start_group(command, directory, **options):
    """Starts a command as the leader of a process group of its own, and of unlimited width."""
    if "env" not in options:  # the readline module sets COLUMNS behind Python's back
        options["env"] = {name: os.environ[name] for name in os.environ.keys() - {"COLUMNS"}}
    usual = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": directory}
    words = [str(word) for word in command]
    return subprocess.Popen(words, start_new_session=True, **(usual | options))


def await_end(process, limit_s):
    """Waits until a process ends, or kills its group; returns (exit code, output)."""
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"still running after {limit_s} s: {process.args}\n{output}")
    return process.returncode, output


def wait_until(condition, limit_s, process=None):
    """Waits until a condition is true, and returns its value.

    Fails at the limit, or as soon as the process that should fulfil the condition has ended; the
    message contains what that process has printed.
    """
    deadline = time.monotonic() + limit_s
    while True:
        has_ended = process is not None and process.poll() is not None
        if value := condition():
            return value
        if has_ended or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    if process is None:
        pytest.fail(f"not within {limit_s} s")
    if not has_ended:
        with contextlib.suppress(ProcessLookupError):  # it may lead no group
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    output, _ = process.communicate()
    why = f"ended with code {process.returncode}" if has_ended else f"not within {limit_s} s"
    pytest.fail(f"{why}: {process.args}\n{output}")


@pytest.fixture
def start(environment, tmp_path):
    """Starts a command in the test's directory; its process group ends with the test."""
    started = []

    def start(command, **options):
        started.append(start_group(command, tmp_path, **options))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture
def execute(start):
    """Runs a command to its end, within a time limit; returns (exit code, output)."""

    def execute(command, limit_s=600, **options):
        return await_end(start(command, **options), limit_s)

    return execute


@pytest.fixture
def succeed(execute):
    """Runs a command, which must succeed; returns what it prints."""

    def succeed(command, limit_s=600, **options):
        code, output = execute(command, limit_s, **options)
        assert code == 0, output
        return output

    return succeed


@pytest.fixture(scope="session")
def mpirun():
    """Returns the command that starts ranks of a Python script; skips where there is no MPI."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    from candle_p1.cluster import launchers

    def command(num_ranks, *argv):
        return launchers.mpirun(num_ranks, [sys.executable, *map(str, argv)]).command

    return command


@pytest.fixture(scope="session")
def train_all(request, data_directory, tmp_path_factory):
    """Trains several runs in one job, which imports Keras once; returns their directory.

    It takes the number of ranks, and for the name of each run's directory the run's command line: a
    benchmark and its flags. The names RUN000, RUN001 and so on are those that the runs choose.
    `settings` are variables of the environment.
    """

    def train_all(num_ranks, runs, limit_s=600, settings=None):
        directory = tmp_path_factory.mktemp("runs")
        lines = [
            f"{line} --output_dir {directory}" + f" --run_id {name}" * (not name.startswith("RUN"))
            for name, line in runs.items()
        ]
        argv = [ROOT / "tests/train_all.py", *lines]
        mpirun = request.getfixturevalue("mpirun") if num_ranks > 1 else None
        command = mpirun(num_ranks, *argv) if mpirun else [sys.executable, *argv]
        environment = shell_environment(data_directory) | (settings or {})
        code, output = await_end(start_group(command, directory, env=environment), limit_s)
        print(output)
        assert code == 0, output
        return directory / "EXP000"

    return train_all


@pytest.fixture
def nt3_tables(tmp_path):
    """Returns a function that writes two tables for NT3, and returns the flags that name them."""

    def write(num_train, num_test, num_features):
        random = np.random.default_rng(2017)
        for name, num_rows in (("train", num_train), ("test", num_test)):
            table = np.c_[np.arange(num_rows) % 2, random.random((num_rows, num_features))]
            np.savetxt(tmp_path / f"{name}.csv", table, "%.7g", ",")
        flags = "--train_data train.csv --test_data test.csv --output_dir out --power none"
        return flags.split()

    return write
