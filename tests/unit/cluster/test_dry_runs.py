"""What the options of candle-p1 submit change in a job's script.

tests/files/dry_runs holds the command lines, and in expected.txt what each of them prints that the
same command without options does not, and what it lacks ("-"). test_job_scripts.py has whole
scripts.
"""

import re
import shutil

import pytest
from click.testing import CliRunner

from candle_p1.cli.submit import submit_command
from tests.conftest import ROOT
from tests.expected import check_expected

FILES = ROOT / "tests/files/dry_runs"
COMMANDS = (FILES / "commands.txt").read_text().splitlines()
PLAIN = {"summit": "--project P", "theta": "--project P --nodes 128"}
PLAIN["aurora"] = "--project P --nodes 2 --queue debug"
"""What a machine does not do without."""


@pytest.fixture
def printed(monkeypatch, tmp_path):
    """Returns the lines that a dry run prints."""
    here = tmp_path / "here"
    shutil.copytree(FILES, here)
    (here / "a.sif").touch()
    monkeypatch.chdir(here)
    for name in ("CANDLE_P1_PROJECT", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)

    def printed(line):
        result = CliRunner().invoke(submit_command, line.split(), standalone_mode=False)
        assert result.exception is None, result.exception
        assert not (here / "output").exists()
        text = re.sub(r" \\\n *", " ", result.output)  # where lines are folded depends on paths
        text = text.replace(str(here), "$HERE").replace(str(ROOT), "$ROOT")
        lines = re.sub("env-[0-9a-f]{8,}", "env-HASH", text).splitlines()
        return [each for each in lines if "CANDLE_P1_VENV" not in each]

    return printed


def changed(line, printed):
    """Returns what a command line prints otherwise than it does without options."""
    machine = re.search(r"--machine (\S+)", line)[1]
    if machine.endswith(".toml"):
        machine = re.search('base = "(.*)"', (FILES / machine).read_text())[1]
    before, _, flags = line.partition(" -- ")
    plain = printed(f"nt3 --dry_run --machine {machine} {PLAIN.get(machine, '')}")
    found = printed(f"{before} --dry_run" + f" -- {flags}" * bool(flags))
    lines = [f"-{each}" for each in plain if each not in found]
    lines += [f"+{each}" for each in dict.fromkeys(found) if each not in plain]
    return "\n".join(lines)


@pytest.mark.parametrize("line", COMMANDS)
def test_options_change_what_they_are_for(line, printed):
    check_expected(FILES / "expected.txt", line, changed(line, printed), COMMANDS)
