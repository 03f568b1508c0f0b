from __future__ import annotations

import fcntl
import os
import pty
import shlex
import struct
import termios

import pytest
from rich.table import Table

from candle_p1.text import columns, table_lines, wrap, wrap_command

PATH = "/a/directory/with/a/name/that/is/longer/than/a/line/of/forty/columns/run.json"


def test_the_width_is_that_of_the_environment_or_of_the_terminal(monkeypatch, tmp_path):
    with (tmp_path / "file").open("w") as file:
        for named, width in (("60", 60), ("0", None), ("x", None)):
            monkeypatch.setenv("COLUMNS", named)
            assert columns(file) == width
    monkeypatch.delenv("COLUMNS")
    _, device = pty.openpty()
    with os.fdopen(device, "w") as terminal:
        assert columns(terminal) is None  # it has not told its size
        fcntl.ioctl(device, termios.TIOCSWINSZ, struct.pack("4H", 50, 72, 0, 0))
        assert columns(terminal) == 72


def test_lines_are_broken_between_words_only():
    text = f"  results of a long-running-study-with-hyphens: {PATH} and more text behind it\nend"
    lines = wrap(text, 40).split("\n")
    assert " ".join(lines).split() == text.split()
    assert lines[0].startswith("  results")
    assert f"    {PATH}" in lines
    assert all(len(line) <= 40 or PATH in line for line in lines)
    assert wrap(text, None) == text


def test_a_command_can_be_typed_as_it_is_shown():
    argv = ["candle-p1", "run", "./my model", "--data_dir", PATH, "--dense", "1000", "500", "100"]
    shown = wrap_command(argv, 40, "$ ")
    assert shown.count("\n") > 2
    assert shlex.split(shown.removeprefix("$ ").replace("\\\n", "")) == argv
    assert wrap_command(argv, None) == shlex.join(argv)


def lines_of(rows, width, *headings):
    made = Table(title="a title")
    for i, heading in enumerate(headings):
        made.add_column(heading, justify="right" if i else "left")
    for row in rows:
        made.add_row(*row)
    return table_lines(made, width, "-")


ROWS = [("load", "1.25", "12 files"), ("train", "100.00", "many steps of training")]


@pytest.mark.parametrize("width", [30, 60])
def test_cells_are_broken_between_words_where_a_table_is_too_wide(width):
    lines = lines_of(ROWS, width, "phase", "mean\n(s)", "what")
    assert all(len(line) <= width for line in lines)
    assert set("".join(lines[3].split())) == {"-"}
    words = " ".join(lines[4:]).split()
    assert sorted(words) == sorted(" ".join(map(" ".join, ROWS)).split())


def test_a_table_is_as_wide_as_its_cells_where_the_width_is_not_known():
    rows = [*ROWS, ("data", "1", PATH * 9)]
    lines = lines_of(rows, None, "phase", "mean\n(s)", "what")
    assert [line.split() for line in lines[-3:]] == [" ".join(row).split() for row in rows]


def test_rows_become_paragraphs_where_words_do_not_fit():
    rows = [("a [b]", "1", PATH), ("c", "", "2")]
    assert lines_of(rows, 40, "name", "in\nA", "") == [
        "a title", "", "name: a [b]", "in A: 1", PATH, "", "name: c", "2",
    ]  # fmt: skip
    headings = "series", "measured (s)", "extrapolation"
    just = lines_of([("loader original", "12.5", "1")], 33, *headings)
    assert not any(": " in line for line in just), "words fit, whole"
    assert {"loader", "original", "(s)", "extrapolation"} <= {*" ".join(just).split()}
    assert lines_of([], 60, "file", "state")[1].split() == ["file", "state"]
