from __future__ import annotations

import io
import stat
import tarfile
import zipfile

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
DEVICE = {"type": tarfile.FIFOTYPE}


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([("../x", b"x")], "outside"),
        ([("sub/../../x", b"x")], "outside"),
        ([("/tmp/candle_p1_x", b"x")], "outside"),
        ([("link", LINK), ("link/x", b"x")], "neither a file"),
        ([("link", HARD_LINK)], "neither a file"),
        ([("pipe", DEVICE)], "neither a file"),
        ([("fetched.json", b"x")], "keeps account"),
        ([(".nt.csv.partial", b"x")], "keeps account"),
        ([("./bad.tar.gz", b"x")], "keeps account"),
    ],
)
def test_a_tar_that_would_leave_its_directory_is_refused_whole(directory, members, words):
    archive = tar(directory / "bad.tar.gz", ("good.csv", b"1"), *members)
    before = everything(directory)
    with pytest.raises(DataError, match=words) as refused:
        unpack(archive, ["fetched.json"])
    assert repr(members[0][0]) in str(refused.value)
    assert everything(directory) == before


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (("../x", b"x", 0), "outside"),
        (("/tmp/candle_p1_x", b"x", 0), "outside"),
        (("..\\x", b"x", 0), "outside"),
        (("link", b"/etc", stat.S_IFLNK | 0o777), "neither a file"),
        (("fetched.json", b"x", 0), "keeps account"),
    ],
)
def test_a_zip_that_would_leave_its_directory_is_refused_whole(directory, member, words):
    archive = zipped(directory / "bad.zip", ("good.csv", b"1", 0), member)
    before = everything(directory)
    with pytest.raises(DataError, match=words):
        unpack(archive, ["fetched.json"])
    assert everything(directory) == before


def test_good_archives_are_unpacked_beside_themselves(directory):
    folder = {"type": tarfile.DIRTYPE, "mode": 0o755}
    first = tar(directory / "a.tgz", ("./sub", folder), ("./sub/a.csv", b"1,2"), ("b.csv", b"3"))
    second = zipped(directory / "c.zip", ("d/", b"", 0), ("d/c.csv", b"4", stat.S_IFREG | 0o644))
    assert unpacked_files(first) is None
    assert unpack(first) == [directory / "sub/a.csv", directory / "b.csv"]
    assert unpack(second) == [directory / "d/c.csv"]
    assert (directory / "sub/a.csv").read_bytes() == b"1,2"
    assert (directory / "d/c.csv").read_bytes() == b"4"
    assert unpacked_files(first) == [directory / "sub/a.csv", directory / "b.csv"]
    assert {path.name for path in directory.iterdir()} == {"a.tgz", "c.zip", "sub", "b.csv", "d"}


def test_what_is_missing_is_unpacked_again_and_other_files_are_not_replaced(directory):
    archive = tar(directory / "a.tar.gz", ("a.csv", b"1"), ("b.csv", b"2"))
    unpack(archive)
    (directory / "a.csv").unlink()
    unpack(archive)
    assert (directory / "a.csv").read_bytes() == b"1"
    (directory / "a.csv").unlink()
    (directory / "b.csv").write_bytes(b"3")
    with pytest.raises(DataError, match=r"another .*b\.csv is there"):
        unpack(archive)
    assert not (directory / "a.csv").exists()
    assert (directory / "b.csv").read_bytes() == b"3"


def test_a_link_that_is_there_already_leads_nowhere(directory, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (directory / "sub").symlink_to(tmp_path / "elsewhere")
    archive = tar(directory / "a.tar.gz", ("sub/a.csv", b"1"))
    with pytest.raises(DataError, match="outside"):
        unpack(archive)
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.zip"])
def test_a_damaged_archive_is_named(directory, name):
    make = zipped if name.endswith("zip") else tar
    members = [(f"{i}.csv", bytes(1000)) + (0,) * (make is zipped) for i in range(20)]
    content = make(directory / name, *members).read_bytes()
    for damaged in (b"", b"no archive", content[: len(content) // 2]):
        (directory / name).write_bytes(damaged)
        with pytest.raises(DataError, match="cannot be unpacked"):
            unpack(directory / name)
    assert {path.name for path in directory.iterdir()} == {name}


def test_a_fetched_archive_is_unpacked_once_it_is_checked(directory, tmp_path, environment):
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
    with pytest.raises(DataError, match="outside"):
        fetch("none", ["b.tar.gz"], source.as_uri(), directory)
    assert not (directory.parent / "b.csv").exists()
