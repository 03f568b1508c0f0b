import fcntl
import os
import pty
import shlex
import struct
import subprocess
import sys
import termios

import pytest
from rich.table import Table

from candle_p1.text import columns, printable, table_lines, wrap, wrap_command

PATH = "/a/directory/with/a/name/that/is/longer/than/a/line/of/forty/columns/run.json"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\tänd\nlong ✓", "plain\tänd\nlong ✓"),
        ("\x1b[31;1mred\x1b[0m \x1b[2J\x1b[1;1Hcleared", "red cleared"),
        ("\x9b31mred", "red"),
        ("\x1b]0;title\x07\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x9dtitle\x9cshown", "shown"),
        ("\x1b]0;not ended", "0;not ended"),
        ("\x1bc\x1b(0reset", "reset"),
        ("over\rwritten\b\x7f\0\x0b", "overwritten"),
        ("user\u202egpj.exe", "usergpj.exe"),
        ("\udcff", r"\udcff"),
    ],
)
def test_text_for_the_terminal_has_no_control_sequences(text, shown):
    assert printable(text) == shown


@pytest.mark.parametrize("text", ["\x1b]", "\x9d", "\x1b[", "\x9b0", "\x1b[0;"])
def test_hostile_text_takes_linear_time(text):
    assert len(printable(text * 500_000)) < len(text) * 500_000


def test_errors_of_commands_are_printed_without_control_sequences(environment, tmp_path):
    (tmp_path / "x\x1b[2J").write_text("")
    command = [sys.executable, "-m", "candle_p1.cli", "report", str(tmp_path / "x\x1b[2J")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "\x1b" not in done.stderr


def test_the_width_is_that_of_the_environment_or_of_the_terminal(monkeypatch):
    _, device = pty.openpty()
    with os.fdopen(device, "w") as terminal:
        for named, width in (("60", 60), ("0", 72), ("x", 72)):
            monkeypatch.setenv("COLUMNS", named)
            fcntl.ioctl(device, termios.TIOCSWINSZ, struct.pack("4H", 50, 72, 0, 0))
            assert columns(terminal) == width
    assert columns(terminal) is None  # it is closed


def test_paths_and_commands_can_be_copied_from_wrapped_lines():
    text = f"  results of a long-running-study: {PATH} and more text behind it\nend"
    lines = wrap(text, 40).split("\n")
    assert " ".join(lines).split() == text.split()
    assert f"    {PATH}" in lines
    assert all(len(line) <= 40 or PATH in line for line in lines)
    argv = ["candle-p1", "run", "./my model", "--data_dir", PATH, "--dense", "1000", "500", "100"]
    shown = wrap_command(argv, 40, "$ ")
    assert shown.count("\n") > 2
    assert shlex.split(shown.removeprefix("$ ").replace("\\\n", "")) == argv


@pytest.mark.parametrize("width", [30, 40, 60, None])
def test_cells_are_broken_between_words_or_rows_become_paragraphs(width):
    rows = [("a [b]", "1", "12 files"), ("c", "", f"{PATH} many steps of training")]
    for shown in (rows[:1], rows):
        table = Table("name", "in\nA", "what")
        for row in shown:
            table.add_row(*row)
        lines = table_lines(table, width)
        assert {*" ".join(map(" ".join, shown)).split()} <= {*" ".join(lines).split()}
        assert all(len(line) <= (width or 200) or PATH in line for line in lines)
        is_narrow = width is not None and len(shown) > 1
        assert ("in A: 1" in lines) == is_narrow
