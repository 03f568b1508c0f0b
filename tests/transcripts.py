"""Transcripts: files of cases, which are commands, beside files of what they print.

In a case, "$ ARGUMENTS" is a command line of candle-p1, which is executed in this process: of what
it says, what it names is compared, after "$$ " everything, after "$- " only that it is an error.
"@NAME=value" sets a variable of the environment, or removes it if there is no value; the test
executes what follows "+". Other lines are bash, in the test's directory, $HERE, after the functions
at the head of the file.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from itertools import groupby
from pathlib import Path

import pytest

from candle_p1.cli import main
from tests.conftest import ROOT
from tests.expected import check_expected, named, read_cases, rounded


class Transcripts:
    """The cases in cases.txt of a directory, and in expected.txt what they print."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.functions, self.cases = read_cases(directory / "cases.txt")

    def check(
        self,
        name: str,
        here: Path,
        monkeypatch: pytest.MonkeyPatch,
        plus: Callable[[str], None] | None = None,
    ) -> None:
        """Executes a case in a directory, and asserts that it prints what is expected."""
        monkeypatch.chdir(here)
        monkeypatch.setenv("HERE", str(here))
        monkeypatch.delenv("COLUMNS", raising=False)
        printed, text = list[str](), "\n".join(self.cases[name])
        for kind, lines in groupby(self.cases[name], lambda line: line[0] * (line[0] in "$@+")):
            if kind == "$":
                printed += (line for each in lines for line in candle_p1(each, text, monkeypatch))
            elif kind == "+" and plus:
                for line in lines:
                    plus(line[1:])
            elif kind == "@":
                for variable, _, value in (line[1:].partition("=") for line in lines):
                    set_variable(monkeypatch, variable, os.path.expandvars(value))
            else:
                command = ["/bin/bash", "-c", "\n".join([self.functions, *lines])]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                printed += (done.stdout + done.stderr).splitlines()
        text = rounded(re.sub("env-[0-9a-f]{8,}", "env-HASH", "\n".join(printed)))
        places = {sys.executable: "$PYTHON", str(here): "$HERE", str(ROOT): "$ROOT"}
        for path, place in places.items():
            text = text.replace(path, place)
        check_expected(self.directory / "expected.txt", name, text, self.cases)


def set_variable(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """Sets a variable of the environment, or removes it if there is no value."""
    if value:
        monkeypatch.setenv(name, value)
    else:
        monkeypatch.delenv(name, raising=False)


def candle_p1(line: str, case: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Executes a command line; returns lines of what it says, and its exit code unless it is 0."""
    output = io.StringIO()
    words = map(os.path.expandvars, shlex.split(line[2:]))
    with redirect_stdout(output), redirect_stderr(output), monkeypatch.context() as patched:
        patched.setattr(sys, "argv", ["candle-p1", *words])
        with pytest.raises(SystemExit) as ended:
            main()
    lines = re.sub(r" \\\n *", " ", output.getvalue()).splitlines()
    if line.startswith("$-"):
        lines = [each[:5] for each in lines if each.startswith("error: ")]
    elif not line.startswith("$$"):
        lines = [
            "error: " * each.startswith("error: ") + named(each.removeprefix("error: "), case)
            for each in lines
        ]
    return [*filter(None, lines), *[f"code {ended.value.code}"] * bool(ended.value.code)]
