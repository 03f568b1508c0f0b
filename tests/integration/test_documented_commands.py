"""The commands of the pages that newcomers and authors read, as printed, at 80 columns."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading

import pytest

from tests.conftest import ROOT, start_group
from tests.documentation import blocks
from tests.records import read_record

pytestmark = [pytest.mark.extended, pytest.mark.parallel]

COLUMNS = 80
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def clone(tmp_path, mpirun):
    """A directory like a fresh clone in which `make setup` has run."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git repository")
    libraries = [str(path.relative_to(ROOT)) for path in ROOT.glob("candle_p1/**/*.so")]
    for name in filter(None, [*listed.stdout.split("\0"), *libraries]):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
            os.utime(tmp_path / name, (0, 0))  # older than the environment, which is not made again
    (tmp_path / ".venv").symlink_to(sys.prefix)
    if (ROOT / ".tools").exists():
        (tmp_path / ".tools").symlink_to(ROOT / ".tools")
    return tmp_path


def run_in_terminal(script, directory, environment, limit_s):
    """Runs a shell script in a terminal; returns (exit code, output without control sequences)."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    terminal = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    command = ["bash", "-e", "-o", "pipefail", script]
    process = start_group(command, directory, env=environment, **terminal)
    os.close(theirs)
    timer = threading.Timer(limit_s, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    pieces = []
    try:
        while piece := os.read(ours, 65536):
            pieces.append(piece)
    except OSError:  # the end: nobody has the terminal open any more
        pass
    finally:
        code = process.wait()
        timer.cancel()
        os.close(ours)
    output = CONTROL.sub("", b"".join(pieces).decode(errors="replace"))
    return code, output.replace("\r\n", "\n")


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/tutorial.md",
        "docs/add-a-benchmark.md",
        "examples/mnist/README.md",
        "examples/p2b1/README.md",
        "examples/p3b1/README.md",
    ],
)
def test_commands_run_as_printed(page, clone, environment, tmp_path_factory):
    commands = []
    for block in blocks(page):
        if block.file:
            (clone / block.file).parent.mkdir(exist_ok=True)
            (clone / block.file).write_text(block.text)
        elif block.is_shell:
            commands += block.text.replace("\\\n", "").splitlines()
    script = tmp_path_factory.mktemp("script") / "commands.sh"
    script.write_text("".join(f"echo '>>>' {len(line)}\n{line}\n" for line in commands))
    path = f"{sys.prefix}/bin{os.pathsep}{environment['PATH']}"  # pages of authors assume it
    variables = dict(environment) | {"TERM": "xterm-256color", "PATH": path}
    if os.getuid() == 0:  # as the README says
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    code, output = run_in_terminal(script, clone, variables, limit_s=1800)
    print(output)
    assert code == 0
    assert output.count(">>> ") == len(commands)
    assert "Traceback" not in output
    records = [read_record(path) for path in clone.glob("output/**/run.json")]
    assert {record["status"] for record in records} == {"ok"}
    for line in commands:
        for path in re.findall(r"(?:--html|--json|--out|-o) (\S+)", line):
            assert (clone / path).exists(), line
    # Tables are as wide as the terminal at most.
    tables = [line for line in output.splitlines() if re.search("[│┃─━]", line)]
    assert [line for line in tables if len(line.split("\r")[-1]) > COLUMNS] == []
