"""Files for studies and machines that nobody would write by accident."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from candle_p1.cluster.machine import load_machine
from candle_p1.errors import CandleError, ParameterError
from candle_p1.studies.plan import Choice, make_plan, read_plan
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
MACHINE = 'base = "slurm"\n'


def without(line, good):
    """Returns a good file without the key that a line sets."""
    key = line.partition(" =")[0]
    return "\n".join(each for each in good.splitlines() if not each.startswith(f"{key} ="))


def read_study(name):
    return make_plan(find_study(name), Choice(), Path("output"))


READERS = {"study": (read_study, STUDY), "machine": (load_machine, MACHINE)}


@pytest.fixture(params=READERS)
def kind(request, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return READERS[request.param]


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
def test_a_hostile_file_is_refused_by_name(kind, text):
    read, good = kind
    Path("mine.toml").write_text(f"{text}\n{without(text, good)}")
    with pytest.raises(ParameterError, match=r"^mine\.toml: ") as raised:
        read("mine.toml")
    assert len(str(raised.value)) < 1000


def test_what_is_not_a_file_is_refused(kind):
    read, _ = kind
    os.mkfifo("pipe.toml")
    Path("loop.toml").symlink_to("loop.toml")
    Path("directory.toml").mkdir()
    Path("bytes.toml").write_bytes(b"title = '\xff'")
    names = ("pipe", "loop", "directory", "bytes", "absent", "~nosuchuser/x", "x" * 5000, "nul\0")
    for name in names:
        for named in (name, f"{name}.toml"):
            with pytest.raises(ParameterError):
                read(named)


def test_a_file_may_begin_with_a_byte_order_mark(kind):
    read, good = kind
    Path("mine.toml").write_text(good, encoding="utf-8-sig")
    assert read("mine.toml")


VARIED = "".join(f"vary.{name} = {[*range(1, 100)]}\n" for name in ("epochs", "conv", "val_steps"))


@pytest.mark.parametrize(
    ("added", "words"),
    [
        ("repeats = 1000000000", "1e+09 runs"),
        (VARIED, "9.7e+05 runs"),
        ('flags.conv = ["-h"]', "'-'"),
        ('environment."HOROVOD_A=B" = "1"', "HOROVOD_A=B"),
        ('benchmark = "NT3"', "'nt3'"),
        ('benchmark = "' + "x" * 5000 + '"', "benchmark"),
        ("minutes = 1000000001", "minutes"),
        ("variants = [1]", "variants.0"),
        ("vary = [1]", "vary"),
        ("flags.epochs = {}", "flags.epochs"),
    ],
)
def test_a_study_that_cannot_be_run_is_refused(added, words, tmp_path):
    (tmp_path / "mine.toml").write_text(f"{added}\n{without(added, STUDY)}")
    with pytest.raises(ParameterError, match=re.escape(words)):
        read_study(str(tmp_path / "mine.toml"))


def test_hostile_manifests_are_refused(tmp_path):
    path = tmp_path / "study.json"
    for text in ("[" * 100_000, "1" * 5000, "null", '{"study": "x", "y": 1}'):
        path.write_text(text)
        with pytest.raises(CandleError, match=r"study\.json|'x'"):
            read_plan(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CandleError, match=r"study\.json.*pipe"):
        read_plan(tmp_path)
