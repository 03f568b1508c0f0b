from __future__ import annotations

import os
import pty
import shlex

import pytest
from rich.table import Table

from candle_p1.text import columns, table_lines, wrap, wrap_command

PATH = "/a/directory/with/a/name/that/is/longer/than/a/line/of/forty/columns/run.json"


@pytest.mark.parametrize(("named", "width"), [("60", 60), ("0", None), ("", None), ("x", None)])
def test_the_width_is_that_of_the_environment(named, width, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", named)
    with (tmp_path / "file").open("w") as file:
        assert columns(file) == width


def test_the_width_is_that_of_the_terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    _, device = pty.openpty()
    with os.fdopen(device, "w") as terminal:
        assert columns(terminal) is None  # it has not told its size
        import fcntl
        import struct
        import termios

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
    assert wrap("", 40) == ""


def test_a_command_can_be_typed_as_it_is_shown():
    argv = ["candle-p1", "run", "./my model", "--data_dir", PATH, "--dense", "1000", "500", "100"]
    shown = wrap_command(argv, 40, "$ ")
    assert shown.count("\n") > 2
    assert shlex.split(shown.removeprefix("$ ").replace("\\\n", "")) == argv
    assert wrap_command(argv, None) == shlex.join(argv)


def table(*headings, rows, **options):
    made = Table(title="a title", **options)
    for i, heading in enumerate(headings):
        made.add_column(heading, justify="right" if i else "left")
    for row in rows:
        made.add_row(*row)
    return made


ROWS = [("load", "1.25", "12 files"), ("train", "100.00", "many steps of training")]


def test_a_table_is_shown_in_columns():
    assert table_lines(table("phase", "mean\n(s)", "what", rows=ROWS), None) == [
        "a title",
        "phase    mean                    what",
        "          (s)",
        "─" * 37,
        "load     1.25                12 files",
        "train  100.00  many steps of training",
    ]


def test_cells_are_broken_between_words_where_a_table_is_too_wide():
    assert table_lines(table("phase", "mean\n(s)", "what", rows=ROWS), 27, "-")[-3:] == [
        "load     1.25      12 files",
        "train  100.00    many steps",
        "                of training",
    ]


def test_columns_that_do_not_fit_follow_below_the_first_one():
    assert table_lines(table("phase", "mean", "what", rows=[ROWS[0]]), 12, "-") == [
        "a title",
        "phase  mean",
        "-----------",
        "load   1.25",
        "",
        "phase   what",
        "------------",
        "load      12",
        "       files",
    ]


def test_a_row_with_a_long_word_is_not_aligned():
    rows = [("data", "train_data", PATH, "x"), ("data", "seed", "1", "2"), ("data", PATH, "", "3")]
    lines = table_lines(table("kind", "name", "in\nA", "B" * 20, rows=rows), 40, "-")
    assert lines == [
        "a title",
        f"kind  name  in  {'B' * 20}",
        "             A",
        "-" * 36,
        "data  train_data",
        f"  {PATH}",
        "  x",
        f"data  seed   1  {'2':>20}",
        "data",
        f"  {PATH}",
        "  3",
    ]


def test_rows_become_paragraphs_where_two_columns_do_not_fit():
    rows = [("a" * 15, "b" * 14), ("c", "")]
    assert table_lines(table("name", "in\nA", rows=rows), 30) == [
        "a title",
        "",
        f"name: {'a' * 15}",
        f"in A: {'b' * 14}",
        "",
        "name: c",
    ]


def test_rows_are_told_apart_by_the_columns_that_are_repeated():
    rows = [("data", "train", "1" * 9, "2" * 9), ("data", "test", "3" * 9, "4" * 9)]
    lines = table_lines(table("kind", "name", "A", "B", rows=rows), 24)
    assert [line.split() for line in lines if "test" in line] == [
        ["data", "test", "3" * 9],
        ["data", "test", "4" * 9],
    ]


def test_an_empty_table_has_its_headings():
    assert table_lines(table("file", "state", rows=[]), 60, "-")[1] == "file  state"
