"""The output of ranks in files that are made with the first line."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

FRAME = """
import ctypes, os, pathlib, subprocess, sys, time
from candle_p1.distributed import rank_log
libc = ctypes.CDLL(None)
with rank_log.output_to_file(pathlib.Path("logs/rank-0001.log")):
    {body}
print("on screen")
"""


def run(directory, body, *, has_directory=True):
    """Runs a program in a process of its own; returns it, and what is in the log."""
    log = directory / "logs/rank-0001.log"
    if has_directory:
        log.parent.mkdir()
    program = FRAME.format(body=body)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=directory, capture_output=True, text=True, timeout=60
    )
    return done, log.read_text().splitlines() if log.exists() else None


def test_a_rank_that_prints_nothing_has_no_log(tmp_path):
    done, lines = run(tmp_path, "pass")
    assert (done.stdout, done.stderr, lines) == ("on screen\n", "", None)


def test_output_is_redirected_also_below_python_and_in_other_processes(tmp_path):
    body = """print("from python", flush=True)
    os.write(2, b"from below\\n")
    subprocess.run(["echo", "from another"])
    """
    done, lines = run(tmp_path, body)
    assert lines == ["from python", "from below", "from another"]
    assert (done.stdout, done.stderr) == ("on screen\n", "")


def test_the_log_is_there_while_the_rank_still_runs(tmp_path):
    body = """os.write(1, b"first\\n")
    log, deadline = pathlib.Path("logs/rank-0001.log"), time.monotonic() + 30
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.write(1, b"second\\n")
    assert log.read_text() == "first\\nsecond\\n"
    """
    done, lines = run(tmp_path, body)
    assert done.returncode == 0, done.stderr
    assert lines == ["first", "second"]


@pytest.mark.parametrize(
    ("death", "number"),
    [
        ("libc.abort()", signal.SIGABRT),
        ("ctypes.string_at(8)", signal.SIGSEGV),
        ("os.kill(os.getpid(), 11)", signal.SIGSEGV),
    ],
)
def test_the_last_words_of_a_rank_that_crashes_are_in_the_log(tmp_path, death, number):
    done, lines = run(tmp_path, f'os.write(2, b"check failed\\n"); {death}')
    assert done.returncode == -number
    assert lines == ["check failed"]


def test_what_a_rank_prints_before_it_is_told_to_end_is_in_the_log(tmp_path):
    done, lines = run(tmp_path, 'print("a word", flush=True); rank_log.write_out(); os._exit(3)')
    assert done.returncode == 3
    assert lines == ["a word"]


def test_output_that_has_no_file_is_shown(tmp_path):
    done, lines = run(tmp_path, 'os.write(1, b"words\\n")', has_directory=False)
    assert lines is None
    assert "words\n" in done.stderr
    assert "logs/rank-0001.log: No such file or directory" in done.stderr
    assert done.stdout == "on screen\n"


def test_lines_are_added_to_those_of_an_earlier_part_of_the_run(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank-0001.log").write_text("earlier\n")
    _, lines = run(tmp_path, 'print("later")', has_directory=False)
    assert lines == ["earlier", "later"]
