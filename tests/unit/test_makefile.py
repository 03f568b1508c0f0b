from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest

from candle_p1.records.environment import SETTINGS
from tests.conftest import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*argv):
    done = subprocess.run(
        ["make", "--no-print-directory", *argv],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "MAKEFLAGS"},
        capture_output=True,
        text=True,
        check=True,
    )
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
