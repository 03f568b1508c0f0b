"""Files for studies and machines that nobody would write by accident."""

import os
from pathlib import Path

import pytest

from candle_p1.cluster.machine import load_machine
from candle_p1.errors import ParameterError
from candle_p1.studies.plan import Choice, make_plan
from candle_p1.studies.study_file import find_study
from candle_p1.toml_file import MAX_BYTES

STUDY = """
title = "a study"
benchmark = "nt3"
repeats = 1
minutes = 5
[sizes.small]
ranks = [1]
"""


@pytest.fixture
def read(monkeypatch, tmp_path):
    """Plans a study; text before the usual one replaces the key that it sets."""
    monkeypatch.chdir(tmp_path)

    def read(name="mine.toml", before=None):
        if before is not None:
            key = before.partition(" =")[0]
            lines = [line for line in STUDY.splitlines() if not line.startswith(f"{key} =")]
            Path(name).write_text("\n".join([before, *lines]))
        return make_plan(find_study(name), Choice(), Path("output"))

    return read


HOSTILE = [
    "a = " + "[" * 5000 + "]" * 5000,
    "a = " + "{a=" * 5000 + "1" + "}" * 5000,
    "a" + ".a" * 5_000 + " = 1",
    "title = " + "9" * 5000,
    "minutes = 9223372036854775808",
    "minutes = 1e999",
    "minutes = 5\nminutes = 5",
    'title = "a\\u0000b"',
    '"a\\u0000b" = 1',
    'title = """' + "x" * MAX_BYTES + '"""',
    "[[title]]\na = 1",
    "minutes = nan",
    "minutes = true",
    "environment = { HOROVOD_A = { b = 1 } }",
    "\x00",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_file_is_refused_by_name(read, text):
    with pytest.raises(ParameterError, match=r"^mine\.toml: ") as raised:
        read(before=text)
    assert len(str(raised.value)) < 1000


def test_what_is_not_a_file_is_refused(read):
    os.mkfifo("pipe.toml")
    Path("loop.toml").symlink_to("loop.toml")
    Path("directory.toml").mkdir()
    Path("bytes.toml").write_bytes(b"title = '\xff'")
    names = ("pipe", "loop", "directory", "bytes", "absent", "~nosuchuser/x", "x" * 5000, "nul\0")
    for name in names:
        for named in (name, f"{name}.toml"):
            for reads in (read, load_machine):
                with pytest.raises(ParameterError):
                    reads(named)
