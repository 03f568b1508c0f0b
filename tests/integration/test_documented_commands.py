"""The commands of the pages that newcomers and authors read, as printed, at 80 columns."""

import fcntl
import json
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
from pathlib import Path

import pytest

from tests.conftest import ROOT, start_group
from tests.documentation import blocks, text_of
from tests.records import read_record

pytestmark = [pytest.mark.extended, pytest.mark.parallel]

COLUMNS = 80
SMALLER = {
    "p1b2 --size full": "p1b2 --size small",
    "strong-nt3 --ranks 2 --repeats 1": "strong-nt3 --ranks 1 --repeats 1 --epochs 1",
    "repeats = 3": "repeats = 1",
    "epochs = 16": "epochs = 2",
    "--epochs 16": "--epochs 2",
    "--epochs 8 --learning_rate 0.02": "--epochs 1 --learning_rate 0.02",
    "epochs=8": "epochs=1",
    "--folds 5": "--folds 2",
}
"""What takes minutes on the pages, and what takes its place here."""
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def clone(tmp_path, mpirun):
    """A directory like a fresh clone in which `make setup` has run.

    It shares the environment of the tests, into which its `make setup` must not install it.
    """
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
    made = Path(sys.prefix, "setup.done")
    before = made.stat().st_mtime_ns
    yield tmp_path
    assert made.stat().st_mtime_ns == before, "the environment was made again"


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


def run_pages(pages, clone, environment, tmp_path_factory):
    """Runs the commands of pages one after the other, each command once; returns the records."""
    commands = []
    for block in (block for page in pages for block in blocks(page)):
        text = block.text
        for large, small in SMALLER.items():
            text = text.replace(large, small)
        if block.file:
            (clone / block.file).parent.mkdir(exist_ok=True)
            (clone / block.file).write_text(text)
        elif block.is_shell:
            lines = text.replace("\\\n", "").splitlines()
            commands += [line for line in lines if line not in commands]
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
    records = [read_record(path) for path in sorted(clone.glob("output/**/run.json"))]
    assert {record["status"] for record in records} == {"ok"}
    for line in commands:
        for path in re.findall(r"(?:--html|--json|--out|-o) (\S+)", line):
            assert (clone / path).exists(), line
    # Tables are as wide as the terminal at most.
    tables = [line for line in output.splitlines() if re.search("[│┃─━]", line)]
    assert [line for line in tables if len(line.split("\r")[-1]) > COLUMNS] == []
    return records


def test_commands_for_newcomers(clone, environment, tmp_path_factory):
    """What both pages contain runs only once. The first run learns, as the tutorial says."""
    pages = ["docs/tutorial.md", "README.md"]
    records = run_pages(pages, clone, environment, tmp_path_factory)
    accuracy = min(records, key=lambda record: record["started"])["quality"]["accuracy"]
    assert accuracy["value"] >= 0.95 > 0.5 >= accuracy["naive"]


def test_commands_for_owners_of_data(clone, environment, tmp_path_factory):
    records = run_pages(["docs/own-data.md"], clone, environment, tmp_path_factory)
    of_cohort = [record for record in records if record["benchmark"] == "nt3"]
    held_out = [record["data"]["num_test"] for record in of_cohort]
    cohort, *folds = sorted(held_out)
    assert (cohort, len(folds), sum(folds)) == (60, 2, 240)
    assert not any(record["data"]["synthetic"] for record in records)
    for record in of_cohort:
        accuracy = record["quality"]["accuracy"]
        assert accuracy["value"] > 0.9 > 0.6 > accuracy["naive"]
    (loss,) = [record["quality"]["loss"] for record in records if record not in of_cohort]
    assert loss["value"] < 0.8 * loss["naive"]


def test_commands_for_users_of_a_network(clone, environment, tmp_path_factory):
    (record,) = run_pages(["docs/predictions.md"], clone, environment, tmp_path_factory)
    evaluation = json.loads((clone / "evaluated/evaluation.json").read_text())
    accuracy = evaluation["metrics"]["accuracy"]
    assert accuracy["recorded"] == record["quality"]["accuracy"]["value"]
    keys = set(re.findall(r"`(\w+)`", text_of("docs/predictions.md")))
    assert evaluation.keys() - {"version", "benchmark"} <= keys


def test_commands_for_authors(clone, environment, tmp_path_factory):
    records = run_pages(["docs/add-a-benchmark.md"], clone, environment, tmp_path_factory)
    assert len(records) == 3
    for record in records:
        assert (record["benchmark"], record["num_ranks"]) == ("blobs", 2)
        assert record["distributed"]["averaging_checked"]
        accuracy = record["quality"]["accuracy"]
        assert accuracy["value"] > 0.8 > 0.5 > accuracy["naive"]
    assert [record["plan"]["epochs"] for record in records[:2]] == [8, 8]
    assert records[0]["plan"]["epochs_per_rank"] == 4


@pytest.mark.parametrize(
    ("name", "roles", "quality", "written"),
    [
        ("p2b1", {"train": 4, "test": 1}, {"mse", "size", "r2"}, {"codes.npy", "codes.png"}),
        ("p3b1", {"train": None, "test": None}, {"laterality_accuracy", "grade_macro_f1"}, set()),
        ("mnist", {"digits": None}, {"accuracy"}, set()),
    ],
)
def test_commands_of_an_example_train_it_on_two_ranks(
    clone, environment, tmp_path_factory, name, roles, quality, written
):
    page = f"examples/{name}/README.md"
    (record,) = run_pages([page], clone, environment, tmp_path_factory)
    assert (record["benchmark"], record["num_ranks"]) == (name, 2)
    assert record["distributed"]["averaging_checked"]
    assert record["plan"]["epochs_per_rank"] == 2
    files = record["data"]["files"]
    assert {role: facts.get("num_files") for role, facts in files.items()} == roles
    assert all(len(facts["sha256"]) == 64 and facts["file_bytes"] for facts in files.values())
    assert record["data"]["synthetic"]
    assert quality < record["quality"].keys()
    assert any("naive" in facts for facts in record["quality"].values())
    (path,) = clone.glob("output/**/run.json")
    assert written <= {each.name for each in path.parent.iterdir()}
