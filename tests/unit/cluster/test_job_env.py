"""common/job_env.sh, with launchers that only print their arguments.

tests/files/job_env has jobs, and in expected.txt what each prints: exit code, output, and messages
after "?".
"""

import re
import signal
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.expected import check_expected, read_cases

FILES = ROOT / "tests/files/job_env"
FUNCTIONS, CASES = read_cases(FILES / "cases.txt")
STAGED = """\
mkdir -p tree/venv/bin tree/root/benchmarks node
printf '#!/bin/bash\\n[[ $1 == -c ]] || echo "staged $*" "$PYTHONPATH"\\n' >tree/venv/bin/python
chmod +x tree/venv/bin/python
tar -cf env.tar -C tree venv root
HERE=$PWD
as python 'exec {python} "$@"'
as sbcast 'echo "$@" >"$HERE/sbcast"; cp "$2" "$3"'
as srun 'shift 2; exec "$@"'
as mpiexec 'shift 2; exec "$@"'
"""
"""Makes an archive, whose Python only prints its arguments, and launchers that start one rank."""


class Job:
    """Runs scripts that source common/job_env.sh, with commands of their own in $PATH."""

    def __init__(self, directory):
        self.directory = directory
        self.places = {"$HERE": str(directory), "$PYTHON": sys.executable, "$ROOT": str(ROOT)}
        (directory / "bin").mkdir()
        self.environment = {
            "HERE": str(directory),
            "PATH": f"{directory}/bin:{sys.prefix}/bin:/usr/bin:/bin",
            "CANDLE_P1_ROOT": str(ROOT),
            "CANDLE_P1_MACHINE": "ours",
            "CANDLE_P1_PREFLIGHT": "0",
            "CANDLE_P1_PYTHON": sys.executable,
            "RANKS_PER_NODE": "2",
        }
        self.shell(f"{FUNCTIONS}\nas launch 'echo \"$*\"'")

    def shell(self, text):
        subprocess.run(["bash", "-c", text], env=self.environment, cwd=self.directory, check=True)

    def run(self, lines):
        """Returns the exit code, the output and the errors of a script, as one text."""
        for name, value in (line[1:].split("=", 1) for line in lines if line.startswith("@")):
            for place, path in self.places.items():
                value = value.replace(place, path)
            self.environment[name] = value
            if not value and name != "CANDLE_P1_MODULES" and name != "CANDLE_P1_NET_PLUGIN":
                del self.environment[name]
        head = ["set -euo pipefail", 'source "$CANDLE_P1_ROOT/common/job_env.sh"', FUNCTIONS]
        script = self.directory / "job.sh"
        script.write_text("\n".join([*head, *(line for line in lines if line[0] != "@"), ""]))
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(["bash", script], env=self.environment, **streams)
        if number := self.environment.get("SIGNAL"):
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.Signals[f"SIG{number}"])
        output, errors = process.communicate(timeout=60)
        told = [f"? {line}" for line in errors.splitlines()]
        text = "\n".join([f"code {process.returncode}", *output.splitlines(), *told])
        text = re.sub(r"(nodes-|env-(?=\d{3}))\w+", r"\1X", text)  # which change from run to run
        for name, path in self.places.items():
            text = text.replace(path, name)
        return text


@pytest.mark.parametrize("name", CASES)
def test_what_a_job_does(name, tmp_path):
    job = Job(tmp_path)
    if name.startswith("staged"):
        job.shell(FUNCTIONS + "\n" + STAGED.format(python=sys.executable))
        job.environment |= {"CANDLE_P1_VENV": str(tmp_path), "LOCAL_STORAGE": f"{tmp_path}/node"}
    parts = "\n".join(CASES[name]).split("\n--\n")
    text = "\n".join(job.run(part.splitlines()) for part in parts)
    check_expected(FILES / "expected.txt", name, text, CASES)


@pytest.mark.extended
def test_the_ranks_get_a_signal_before_the_time_limit(tmp_path):
    lines = ["@CANDLE_P1_MINUTES=1", "@CANDLE_P1_WARNING_S=55", "waits", "job_limit 60 60", "run"]
    found = Job(tmp_path).run(lines).splitlines()
    assert found[:3] == ["code 3", "ready", "got USR1"]
