"""The programs of tools/ that start ranks."""

import re
import sys

import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.extended, pytest.mark.parallel]


def test_the_overhead_of_measuring_has_an_interval(mpirun, succeed, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    model = ["--size", "small", "--epochs", 1, "--conv", 8, 20, 1, 8, 10, 1]
    options = ["--block_epochs", 1, "--rounds", 6]
    argv = [sys.executable, "-m", "tools.overhead", *options, "nt3", "--", *model]
    output = succeed(argv)
    assert "nt3: 2 ranks x" in output
    assert re.search(r"\(95 % interval [-+.\d]+% to [-+.\d]+% of 6 rounds\)", output)
