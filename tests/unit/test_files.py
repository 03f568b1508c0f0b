"""Writing files: complete or not at all, and with kept space on a full disk."""

from __future__ import annotations

import errno
import os
import pwd
from pathlib import Path

import pytest

from candle_p1 import files
from candle_p1.benchmark import find_benchmark
from candle_p1.cluster.machine import load_machine
from candle_p1.data.directory import data_directory
from candle_p1.data.reader import file_sha256
from candle_p1.errors import SetupError
from candle_p1.files import (
    content_sha256,
    create_atomically,
    expand_user,
    release,
    reserve,
    write_atomically,
)


def test_only_data_need_a_home_directory(monkeypatch, tmp_path):
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # a KeyError, as for an unknown user
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "CANDLE_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "table.csv"
    path.write_text("1\n")
    assert file_sha256(path) == content_sha256(path)
    assert load_machine("slurm").name == "slurm"
    assert find_benchmark("nt3")._find_file(str(path), None) == path
    with pytest.raises(SetupError, match=r"\$HOME is not set.*: set CANDLE_DATA_DIR$"):
        data_directory()
    monkeypatch.setenv("CANDLE_DATA_DIR", str(tmp_path))
    assert data_directory() == tmp_path


@pytest.fixture
def full_disk(monkeypatch):
    """Makes every new file fail, as on a full disk; what exists can be overwritten."""

    def mkstemp(**options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return lambda: monkeypatch.setattr(files.tempfile, "mkstemp", mkstemp)


def test_a_created_file_appears_complete_and_only_once(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    seen = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (seen.append(path.exists()), fsync(number)))
    create_atomically(path, "first")
    assert seen == [False]
    with pytest.raises(FileExistsError):
        create_atomically(path, "second")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_created_where_there_are_no_hard_links(tmp_path, monkeypatch):
    def link(source, target):
        raise PermissionError(errno.EPERM, "no hard links")

    monkeypatch.setattr(os, "link", link)
    path = tmp_path / "run.json"
    create_atomically(path, "first")
    with pytest.raises(FileExistsError):
        create_atomically(path, "second")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("num_bytes", "fits"), [(10, True), (9, False)])
def test_reserved_space_is_used_on_a_full_disk(tmp_path, full_disk, num_bytes, fits):
    path = tmp_path / "run.json"
    path.write_text("running")
    reserve(path, num_bytes)
    full_disk()
    if fits:
        write_atomically(path, "0123456789")
    else:
        with pytest.raises(OSError, match="No space left"):
            write_atomically(path, "0123456789")
    assert path.read_text() == ("0123456789" if fits else "running")
    release(path)
    assert list(tmp_path.iterdir()) == [path]


def test_without_reserved_space_a_full_disk_is_an_error(tmp_path, full_disk):
    full_disk()
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "run.json", "x")
    assert not list(tmp_path.iterdir())


def test_the_users_home_is_inserted_where_there_is_one(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert expand_user("~/x") == Path("/home/me/x")
    assert expand_user("~nosuchuser/x") == Path("~nosuchuser/x")
