from __future__ import annotations

import subprocess
import sys

import pytest

from candle_p1.text import printable


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
