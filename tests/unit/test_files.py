"""Writing files: complete or not at all, and with kept space on a full disk."""

import errno
import os
import pwd
from contextlib import nullcontext
from pathlib import Path

import pytest

from candle_p1 import files
from candle_p1.benchmark import find_benchmark
from candle_p1.cluster.machine import load_machine
from candle_p1.data.directory import data_directory
from candle_p1.data.reader import file_sha256
from candle_p1.errors import SetupError
from candle_p1.files import create_atomically, expand_user, release, reserve, write_atomically
from candle_p1.named_files import NamedFiles


def test_only_data_need_a_home_directory(monkeypatch, tmp_path):
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # a KeyError, as for an unknown user
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "CANDLE_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "table.csv"
    path.write_text("1\n")
    assert len(file_sha256(path)) == 64
    assert load_machine("slurm").name == "slurm"
    nt3 = find_benchmark("nt3")
    assert NamedFiles(nt3, nt3.own_parameters).find(str(path)) == path
    with pytest.raises(SetupError, match=r"\$HOME is not set.*: set CANDLE_DATA_DIR$"):
        data_directory()
    monkeypatch.setenv("CANDLE_DATA_DIR", str(tmp_path))
    assert data_directory() == tmp_path


@pytest.mark.parametrize("has_links", [True, False])
def test_a_created_file_appears_complete_and_only_once(tmp_path, monkeypatch, has_links):
    def link(source, target):
        seen.append(path.exists())
        if not has_links:
            raise PermissionError(errno.EPERM, "no hard links")
        hard_link(source, target)

    path, seen, hard_link = tmp_path / "run.json", [], os.link
    monkeypatch.setattr(os, "link", link)
    create_atomically(path, "first")
    assert seen == [False]
    with pytest.raises(FileExistsError):
        create_atomically(path, "second")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("num_bytes", "fits"), [(10, True), (9, False), (0, False)])
def test_reserved_space_is_used_on_a_full_disk(tmp_path, monkeypatch, num_bytes, fits):
    def mkstemp(**options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "run.json"
    path.write_text("running")
    if num_bytes:
        reserve(path, num_bytes)
    monkeypatch.setattr(files.tempfile, "mkstemp", mkstemp)
    with nullcontext() if fits else pytest.raises(OSError, match="No space left"):
        write_atomically(path, "0123456789")
    assert path.read_text() == ("0123456789" if fits else "running")
    release(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_home_that_does_not_exist_stays_as_it_is_written():
    assert expand_user("~nosuchuser/x") == Path("~nosuchuser/x")
