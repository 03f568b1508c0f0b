"""The output of ranks in files that are made with the first line."""

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.extended  # slow; in `make test`, test_installation.py kills a rank

FRAME = """
import ctypes, os, pathlib, subprocess, sys, time
from candle_p1.failure import _native, rank_log
libc = ctypes.CDLL(None)
with rank_log.output_to_file(pathlib.Path("logs/rank-0001.log")):
    {body}
print("on screen")
"""


def run(directory, body, *, has_directory=True, earlier=None):
    """Runs a program in a process of its own; returns it, and what is in the log."""
    log = directory / "logs/rank-0001.log"
    if has_directory:
        log.parent.mkdir()
    if earlier:
        log.write_text(earlier)
    command = [sys.executable, "-c", FRAME.format(body=body)]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=60)
    return done, log.read_text().splitlines() if log.exists() else None


EVERYWHERE = """print("from python", flush=True)
    os.write(2, b"from below\\n")
    subprocess.run(["echo", "from another"])
"""


@pytest.mark.parametrize(
    ("body", "earlier", "expected"),
    [
        ("pass", None, None),
        (EVERYWHERE, None, ["from python", "from below", "from another"]),
        ('print("later")', "earlier\n", ["earlier", "later"]),
    ],
)
def test_output_goes_to_a_file_that_is_made_with_the_first_line(tmp_path, body, earlier, expected):
    done, lines = run(tmp_path, body, earlier=earlier)
    assert lines == expected
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
    ("death", "code"),
    [
        ("libc.abort()", -signal.SIGABRT),
        ("ctypes.string_at(8)", -signal.SIGSEGV),
        ("_native.rank_log_write(); os._exit(3)", 3),  # as a rank that is told to end
    ],
)
def test_the_last_words_of_a_rank_are_in_the_log(tmp_path, death, code):
    done, lines = run(tmp_path, f'os.write(2, b"check failed\\n"); {death}')
    assert done.returncode == code
    assert lines == ["check failed"]


def test_output_that_has_no_file_is_shown(tmp_path):
    done, lines = run(tmp_path, 'os.write(1, b"words\\n")', has_directory=False)
    assert lines is None
    assert "words\n" in done.stderr
    assert "logs/rank-0001.log: No such file or directory" in done.stderr
    assert done.stdout == "on screen\n"
