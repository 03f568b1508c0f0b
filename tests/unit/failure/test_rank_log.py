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
WHILE_IT_RUNS = """os.write(1, b"first\\n")
    log, deadline = pathlib.Path("logs/rank-0001.log"), time.monotonic() + 30
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.write(1, b"second\\n")
    assert log.read_text() == "first\\nsecond\\n"
"""
LAST_WORDS = r'os.write(2, b"check failed\n")'


@pytest.mark.parametrize(
    ("body", "earlier", "code", "expected"),
    [
        ("pass", None, 0, None),
        (EVERYWHERE, None, 0, ["from python", "from below", "from another"]),
        ('print("later")', "earlier\n", 0, ["earlier", "later"]),
        (WHILE_IT_RUNS, None, 0, ["first", "second"]),
        (f"{LAST_WORDS}; libc.abort()", None, -signal.SIGABRT, ["check failed"]),
        (f"{LAST_WORDS}; ctypes.string_at(8)", None, -signal.SIGSEGV, ["check failed"]),
        # As a rank that is told to end
        (f"{LAST_WORDS}; _native.rank_log_write(); os._exit(3)", None, 3, ["check failed"]),
    ],
)
def test_output_goes_to_a_file_that_is_made_with_the_first_line(
    tmp_path, body, earlier, code, expected
):
    done, lines = run(tmp_path, body, earlier=earlier)
    assert (done.returncode, lines) == (code, expected), done.stderr
    assert code or (done.stdout, done.stderr) == ("on screen\n", "")


def test_output_that_has_no_file_is_shown(tmp_path):
    done, lines = run(tmp_path, 'os.write(1, b"words\\n")', has_directory=False)
    assert lines is None
    assert "words\n" in done.stderr
    assert "logs/rank-0001.log: No such file or directory" in done.stderr
    assert done.stdout == "on screen\n"
