from __future__ import annotations

import contextlib
import errno
import gzip
import io
import os
import random
import re
import shutil
import stat
import tarfile
import zipfile
from types import SimpleNamespace

import pytest

from candle_p1.datasets import unpack as unpacking
from candle_p1.datasets.fetch import fetch
from candle_p1.datasets.unpack import ArchiveError, unpack
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
    [(".bad.tar.gz.unpacking/x", b"x")],
    [("twice", b"x"), ("./twice", b"y")],
    [("file", b"x"), ("file/x", b"y")],
    [("dir/x", b"x"), ("dir", b"y")],
    [("device", {"type": tarfile.BLKTYPE, "devmajor": 8})],
    [("sparse", {"type": tarfile.GNUTYPE_SPARSE})],
    [("pax", {"pax_headers": {"GNU.sparse.map": "0,1", "GNU.sparse.size": "9"}})],
    [("x" * 5000, b"x")],
    [("x/" * 2000 + "x", b"x")],
    [("a\x1b[2Jb", b"x")],
    [("a\nb", b"x")],
]
UNSAFE_IN_ZIP = [
    [("../x", b"x", 0)],
    [("/tmp/candle_p1_x", b"x", 0)],
    [("..\\x", b"x", 0)],
    [("link", b"/etc", stat.S_IFLNK | 0o777)],
    [("fetched.json", b"x", 0)],
    [("twice", b"x", 0), ("twice", b"y", 0)],
    [("file", b"x", 0), ("file/x", b"y", 0)],
    [("x" * 5000, b"x", 0)],
    [("a\x1b[2Jb", b"x", 0)],
]


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("write", "name", "good", "members"),
    [(tar, "bad.tar.gz", ("good.csv", b"1"), members) for members in UNSAFE_IN_TAR]
    + [(zipped, "bad.zip", ("good.csv", b"1", 0), members) for members in UNSAFE_IN_ZIP],
)
def test_an_unsafe_archive_is_refused_as_a_whole(directory, write, name, good, members):
    archive = write(directory / name, good, *members)
    before = everything(directory)
    names = "|".join(re.escape(repr(name)) for name, *_ in members)
    with pytest.raises(ArchiveError, match=names):
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
    assert unpack(first, write=False) is None
    assert unpack(first) == [directory / "sub/a.csv", directory / "b.csv"]
    assert unpack(second) == [directory / "d/c.csv"]
    for path in (directory / "b.csv", directory / "d/c.csv"):  # modes are not taken over
        assert not path.stat().st_mode & (stat.S_ISUID | stat.S_IXUSR)
    assert (directory / "sub/a.csv").read_bytes() == b"1,2"
    assert (directory / "d/c.csv").read_bytes() == b"4"
    assert unpack(first, write=False) == [directory / "sub/a.csv", directory / "b.csv"]
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


def table(num_rows=300):
    """Returns text that compresses as a table of numbers does."""
    return "".join(f"{i},{i * i % 1009}\n" for i in range(num_rows)).encode()


def packed(path, method):
    if path.name.endswith("zip"):
        with zipfile.ZipFile(path, "w", method) as archive:
            for i in range(3):
                archive.writestr(f"{i}.csv", table())
    else:
        tar(path, *((f"{i}.csv", table()) for i in range(3)))
    return path.read_bytes()


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("a.tar.gz", None),
        ("a.tgz", None),
        *(
            ("a.zip", method)
            for method in (
                zipfile.ZIP_STORED,
                zipfile.ZIP_DEFLATED,
                zipfile.ZIP_BZIP2,
                zipfile.ZIP_LZMA,
            )
        ),
    ],
)
def test_a_damaged_archive_is_one_message_or_unpacked_right(directory, name, method):
    content = packed(directory / name, method)
    damaged = [b"", b"no archive", content[: len(content) // 2], content[:-9]]
    rng = random.Random(0)
    for _ in range(150):
        flipped = bytearray(content)
        for _ in range(rng.choice([1, 1, 4])):
            flipped[rng.randrange(len(flipped))] = rng.randrange(256)
        damaged.append(bytes(flipped))
    for each in damaged:
        (directory / name).write_bytes(each)
        with contextlib.suppress(DataError):
            for path in unpack(directory / name):
                assert path.read_bytes() == table()
                path.unlink()
        assert {path.name for path in directory.iterdir()} == {name}
    for each in damaged[:4]:
        (directory / name).write_bytes(each)
        with pytest.raises(ArchiveError, match=name):
            unpack(directory / name)


def tar_of_blocks(path, *blocks):
    with gzip.open(path, "wb", 1) as file:
        file.writelines(blocks)
    return path


def header(name, num_bytes, kind=tarfile.REGTYPE):
    info = tarfile.TarInfo(name)
    info.size, info.type = num_bytes, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def pax(text):
    return header("x", len(text), tarfile.XHDTYPE) + text + bytes(-len(text) % 512)


def hostile_blocks():
    yield "a size below zero", [header("a", -5), bytes(1024)]
    yield "a size beyond the archive's end", [header("a", 10_000_000), bytes(1024)]
    yield "nested headers", [pax(b"11 path=aa\n") * 5000, header("a", 0), bytes(1024)]
    yield "a path of null bytes", [pax(b"12 path=a\0b\n"), header("a", 0), bytes(1024)]
    yield "no length", [pax(b"99999999 path=a\n"), header("a", 0), bytes(1024)]
    yield "half a header", [header("a", 0)[:300]]
    yield "content instead of a header", [header("a", 0), b"x" * 512, bytes(1024)]
    yield "more after the end", [header("a", 0), bytes(1024), b"x" * 512]
    for words in ("0,x", "-1,5", "5", "1,2,3", "0,99999999999999999999"):
        record = f" GNU.sparse.map={words}\n GNU.sparse.size=99\n"
        sparse = pax(f"{len(record) + 3}{record}".encode())
        yield f"sparse {words}", [sparse, header("a", 0), bytes(1024)]
    yield "sparse, old", [header("a", 2**33, tarfile.GNUTYPE_SPARSE), bytes(1024)]


@pytest.mark.parametrize(("blocks"), [pytest.param(b, id=name) for name, b in hostile_blocks()])
def test_a_hostile_tar_is_one_message(directory, blocks):
    archive = tar_of_blocks(directory / "a.tar.gz", *blocks)
    with pytest.raises(DataError, match=r"a\.tar\.gz"):
        unpack(archive)
    assert {path.name for path in directory.iterdir()} == {"a.tar.gz"}


def test_headers_larger_than_any_archive_has_are_not_read(directory, monkeypatch):
    monkeypatch.setattr(unpacking._TarStream, "left_bytes", 1 << 20)
    for kind in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME):
        archive = tar_of_blocks(directory / "a.tar.gz", header("x", 1 << 40, kind), bytes(1 << 20))
        with pytest.raises(ArchiveError, match="headers"):
            unpack(archive)


def test_an_archive_of_too_many_members_is_refused(directory, monkeypatch):
    monkeypatch.setattr(unpacking, "MAX_MEMBERS", 10)
    for write, name in ((tar, "a.tgz"), (zipped, "a.zip")):
        members = [(str(i), b"", 0)[: 2 + (write is zipped)] for i in range(11)]
        with pytest.raises(ArchiveError, match="more than 10 members"):
            unpack(write(directory / name, *members))
        assert len(unpack(write(directory / name, *members[:10]))) == 10


@pytest.mark.parametrize("name", ["a.tar.gz", "a.zip"])
def test_an_archive_far_larger_than_its_size_is_refused(directory, name, monkeypatch):
    monkeypatch.setattr(unpacking, "GIB", 10_000)
    content = bytes(1_000_000)
    if name.endswith("zip"):
        with zipfile.ZipFile(directory / name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.csv", content)
    else:
        tar(directory / name, ("a.csv", content))
    monkeypatch.setattr(unpacking, "MAX_RATIO", 2)
    with pytest.raises(DataError, match="--unpack_limit"):
        unpack(directory / name)
    assert {path.name for path in directory.iterdir()} == {name}
    with pytest.raises(DataError, match="--unpack_limit"):
        unpack(directory / name, limit_bytes=999_999)
    assert unpack(directory / name, limit_bytes=1_000_000) == [directory / "a.csv"]


def test_a_declared_size_is_refused_before_anything_is_unpacked(directory):
    archive = tar_of_blocks(directory / "a.tar.gz", header("a", 1 << 50), bytes(512))
    with pytest.raises(DataError, match="--unpack_limit"):
        unpack(archive)


@pytest.mark.parametrize("name", ["a.tar.gz", "a.zip"])
def test_a_broken_archive_is_fetched_again(directory, tmp_path, environment, name):
    source = tmp_path / "source"
    source.mkdir()
    good = packed(source / name, zipfile.ZIP_DEFLATED)
    (source / name).write_bytes(good[: len(good) // 2])
    with pytest.raises(DataError, match=name):
        fetch("none", [name], source.as_uri(), directory)
    assert {path.name for path in directory.iterdir()} == {".lock"}
    (source / name).write_bytes(good)
    (directory / name).write_bytes(good[: len(good) // 2])  # as an earlier version left it
    (file,) = fetch("none", [name], source.as_uri(), directory)
    assert (directory / name).read_bytes() == good
    assert len(file.unpacked) == 3
    (directory / name).unlink()
    (source / name).write_bytes(good[:-1])
    with pytest.raises(DataError, match=r"fetched\.json"):  # the checksum of the good one
        fetch("none", [name], source.as_uri(), directory)


def test_a_broken_archive_stays_if_it_cannot_be_fetched_again(directory, tmp_path, environment):
    (directory / "a.zip").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"copy a\.zip into"):
        fetch("none", ["a.zip"], (tmp_path / "nowhere").as_uri(), directory)
    assert (directory / "a.zip").read_bytes() == b"broken"


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
    assert not (directory / "b.tar.gz").exists()
