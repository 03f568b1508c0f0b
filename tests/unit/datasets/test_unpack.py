from __future__ import annotations

import errno
import io
import os
import re
import shutil
import stat
import tarfile
import zipfile
from types import SimpleNamespace

import pytest

from candle_p1.datasets.fetch import fetch
from candle_p1.datasets.unpack import unpack, unpacked_files
from candle_p1.errors import DataError


@pytest.fixture
def directory(tmp_path):
    """A directory inside another one, so that what escapes is seen."""
    directory = tmp_path / "outer" / "data"
    directory.mkdir(parents=True)
    return directory


def tar(path, *members):
    """Writes a tar.gz of (name, content or a TarInfo's attributes)."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, dict):
                for key, value in content.items():
                    setattr(info, key, value)
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return path


def zipped(path, *members):
    """Writes a zip of (name, content, mode of a Unix file or 0)."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content, mode in members:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            archive.writestr(info, content)
    return path


def everything(directory):
    return {path.relative_to(directory.parent) for path in directory.parent.rglob("*")}


LINK = {"type": tarfile.SYMTYPE, "linkname": "/etc"}
HARD_LINK = {"type": tarfile.LNKTYPE, "linkname": "../../x"}
PIPE = {"type": tarfile.FIFOTYPE}
SCRIPT = {"mode": 0o4777, "size": 0}
UNSAFE_IN_TAR = [
    [("../x", b"x")],
    [("sub/../../x", b"x")],
    [("/tmp/candle_p1_x", b"x")],
    [("link", LINK), ("link/x", b"x")],
    [("link", HARD_LINK)],
    [("pipe", PIPE)],
    [("fetched.json", b"x")],
    [(".nt.csv.partial", b"x")],
    [("./bad.tar.gz", b"x")],
]
UNSAFE_IN_ZIP = [
    [("../x", b"x", 0)],
    [("/tmp/candle_p1_x", b"x", 0)],
    [("..\\x", b"x", 0)],
    [("link", b"/etc", stat.S_IFLNK | 0o777)],
    [("fetched.json", b"x", 0)],
]


@pytest.mark.parametrize(
    ("write", "name", "good", "members"),
    [(tar, "bad.tar.gz", ("good.csv", b"1"), members) for members in UNSAFE_IN_TAR]
    + [(zipped, "bad.zip", ("good.csv", b"1", 0), members) for members in UNSAFE_IN_ZIP],
)
def test_an_unsafe_archive_is_refused_as_a_whole(directory, write, name, good, members):
    archive = write(directory / name, good, *members)
    before = everything(directory)
    with pytest.raises(DataError, match=re.escape(repr(members[0][0]))):
        unpack(archive, ["fetched.json"])
    assert everything(directory) == before


def test_an_archive_larger_than_the_free_space_is_not_unpacked(directory, monkeypatch):
    archive = tar(directory / "a.tar.gz", ("a.csv", bytes(1000)))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=999))
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        unpack(archive)
    assert {path.name for path in directory.iterdir()} == {"a.tar.gz"}


def test_archives_are_unpacked_into_their_directory(directory):
    folder = {"type": tarfile.DIRTYPE, "mode": 0o755}
    first = tar(directory / "a.tgz", ("./sub", folder), ("./sub/a.csv", b"1,2"), ("b.csv", SCRIPT))
    second = zipped(directory / "c.zip", ("d/", b"", 0), ("d/c.csv", b"4", stat.S_IFREG | 0o4777))
    assert unpacked_files(first) is None
    assert unpack(first) == [directory / "sub/a.csv", directory / "b.csv"]
    assert unpack(second) == [directory / "d/c.csv"]
    for path in (directory / "b.csv", directory / "d/c.csv"):  # modes are not taken over
        assert not path.stat().st_mode & (stat.S_ISUID | stat.S_IXUSR)
    assert (directory / "sub/a.csv").read_bytes() == b"1,2"
    assert (directory / "d/c.csv").read_bytes() == b"4"
    assert unpacked_files(first) == [directory / "sub/a.csv", directory / "b.csv"]
    assert {path.name for path in directory.iterdir()} == {"a.tgz", "c.zip", "sub", "b.csv", "d"}


def test_missing_files_are_unpacked_again_and_different_files_are_not_replaced(directory):
    archive = tar(directory / "a.tar.gz", ("a.csv", b"1"), ("b.csv", b"2"))
    unpack(archive)
    (directory / "a.csv").unlink()
    unpack(archive)
    assert (directory / "a.csv").read_bytes() == b"1"
    (directory / "a.csv").unlink()
    (directory / "b.csv").write_bytes(b"3")
    with pytest.raises(DataError, match=r"/b\.csv"):
        unpack(archive)
    assert not (directory / "a.csv").exists()
    assert (directory / "b.csv").read_bytes() == b"3"


def test_an_existing_link_is_not_followed_out_of_the_directory(directory, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (directory / "sub").symlink_to(tmp_path / "elsewhere")
    archive = tar(directory / "a.tar.gz", ("sub/a.csv", b"1"))
    with pytest.raises(DataError, match=r"sub/a\.csv"):
        unpack(archive)
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.zip"])
def test_a_damaged_archive_is_reported(directory, name):
    make = zipped if name.endswith("zip") else tar
    members = [(f"{i}.csv", bytes(1000)) + (0,) * (make is zipped) for i in range(20)]
    content = make(directory / name, *members).read_bytes()
    for damaged in (b"", b"no archive", content[: len(content) // 2]):
        (directory / name).write_bytes(damaged)
        with pytest.raises(DataError, match=name):
            unpack(directory / name)
    assert {path.name for path in directory.iterdir()} == {name}


def test_a_fetched_archive_is_checked_and_unpacked(directory, tmp_path, environment):
    source = tmp_path / "source"
    source.mkdir()
    tar(source / "a.tar.gz", ("a.csv", b"1"))
    for _ in range(2):
        (file,) = fetch("none", ["a.tar.gz"], source.as_uri(), directory)
        assert file.unpacked == (directory / "a.csv",)
    (directory / "a.csv").unlink()
    fetch("none", ["a.tar.gz"], source.as_uri(), directory)
    assert (directory / "a.csv").read_bytes() == b"1"
    tar(source / "b.tar.gz", ("../b.csv", b"1"))
    with pytest.raises(DataError, match=r"\.\./b\.csv"):
        fetch("none", ["b.tar.gz"], source.as_uri(), directory)
    assert not (directory.parent / "b.csv").exists()
