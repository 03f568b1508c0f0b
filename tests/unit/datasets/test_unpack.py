import contextlib
import errno
import gzip
import io
import os
import random
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


def pack(path, *members, method=zipfile.ZIP_DEFLATED):
    """Writes an archive of (name, content, or a TarInfo's attributes, or a Unix mode in a zip)."""
    if path.name.endswith("zip"):
        with zipfile.ZipFile(path, "w", method) as archive:
            for name, content, *mode in members:
                info = zipfile.ZipInfo(name)
                info.external_attr, info.compress_type = sum(mode) << 16, method
                archive.writestr(info, content)
        return path
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            attributes = content if isinstance(content, dict) else {"size": len(content)}
            for key, value in attributes.items():
                setattr(info, key, value)
            archive.addfile(info, None if isinstance(content, dict) else io.BytesIO(content))
    return path


def names_in(directory):
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


UNSAFE = [
    *("../x", "/tmp/candle_p1_x", "..\\x", "fetched.json", "x" * 5000, "a\x1b[2Jb"),
    *(".nt.csv.partial", ".bad.unpacking/x"),
    [("twice", b"x"), ("./twice", b"y")],
    [("file", b"x"), ("file/x", b"y")],
    [("dir/x", b"x"), ("dir", b"y")],
]
LINK = {"type": tarfile.SYMTYPE, "linkname": "/etc"}
UNSAFE_IN_TAR = [
    [("link", LINK), ("link/x", b"x")],
    [("link", {"type": tarfile.LNKTYPE, "linkname": "../../x"})],
    [("pipe", {"type": tarfile.FIFOTYPE})],
    [("./bad.tar.gz", b"x")],
    [("sparse", {"type": tarfile.GNUTYPE_SPARSE})],
]
UNSAFE_IN_ZIP = [[("link", b"/etc", stat.S_IFLNK | 0o777)]]


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("name", "members"),
    [("bad.tar.gz", members) for members in UNSAFE + UNSAFE_IN_TAR]
    + [("bad.zip", members) for members in UNSAFE + UNSAFE_IN_ZIP],
)
def test_an_unsafe_archive_is_refused_as_a_whole(directory, name, members):
    members = [(members, b"x")] if isinstance(members, str) else members
    archive = pack(directory / name, ("good.csv", b"1"), *members)
    before = names_in(directory.parent)
    with pytest.raises(ArchiveError, match=name):
        unpack(archive, ["fetched.json", ".bad.unpacking"])
    assert names_in(directory.parent) == before


def test_archives_are_unpacked_into_their_directory(directory, monkeypatch):
    folder, script = {"type": tarfile.DIRTYPE, "mode": 0o755}, {"mode": 0o4777, "size": 0}
    members = [("./sub", folder), ("./sub/a.csv", b"1,2"), ("b.csv", script)]
    first = pack(directory / "a.tgz", *members)
    second = pack(directory / "c.zip", ("d/", b""), ("d/c.csv", b"4", stat.S_IFREG | 0o4777))
    assert unpack(first, write=False) is None
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2))
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            unpack(first)
    assert names_in(directory) == {"a.tgz", "c.zip"}
    assert unpack(first) == [directory / "sub/a.csv", directory / "b.csv"]
    assert unpack(second) == [directory / "d/c.csv"]
    for path in (directory / "b.csv", directory / "d/c.csv"):  # modes are not taken over
        assert not path.stat().st_mode & (stat.S_ISUID | stat.S_IXUSR)
    assert (directory / "sub/a.csv").read_bytes() == b"1,2"
    assert (directory / "d/c.csv").read_bytes() == b"4"
    assert unpack(first, write=False) == [directory / "sub/a.csv", directory / "b.csv"]
    assert names_in(directory) == {"a.tgz", "c.zip", "sub", "sub/a.csv", "b.csv", "d", "d/c.csv"}


def test_missing_files_are_unpacked_again_and_different_ones_or_links_are_kept(directory, tmp_path):
    archive = pack(directory / "a.tar.gz", ("a.csv", b"1"), ("b.csv", b"2"), ("sub/c.csv", b"3"))
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
    (directory / "b.csv").unlink()
    shutil.rmtree(directory / "sub")
    (tmp_path / "elsewhere").mkdir()
    (directory / "sub").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"sub/c\.csv"):
        unpack(archive)
    assert list((tmp_path / "elsewhere").iterdir()) == []


TABLE = "".join(f"{i},{i * i % 1009}\n" for i in range(300)).encode()  # compresses as numbers do
THREE = [(f"{i}.csv", TABLE) for i in range(3)]


@pytest.mark.parametrize(
    ("name", "method"),
    [("a.tar.gz", None), *(("a.zip", method) for method in (zipfile.ZIP_STORED, zipfile.ZIP_LZMA))],
)
def test_a_damaged_archive_is_one_message_or_unpacked_right(directory, name, method):
    archive = pack(directory / name, *THREE, method=method)
    content = archive.read_bytes()
    damaged = [b"", b"no archive", content[: len(content) // 2], content[:-9]]
    rng = random.Random(0)
    for _ in range(150):
        flipped = bytearray(content)
        for _ in range(rng.choice([1, 1, 4])):
            flipped[rng.randrange(len(flipped))] = rng.randrange(256)
        damaged.append(bytes(flipped))
    for i, each in enumerate(damaged):
        archive.write_bytes(each)
        certain = pytest.raises(ArchiveError, match=name)
        with certain if i < 4 else contextlib.suppress(DataError):
            for path in unpack(archive):
                assert path.read_bytes() == TABLE
                path.unlink()
        assert names_in(directory) == {name}


def header(name, num_bytes, kind=tarfile.REGTYPE):
    info = tarfile.TarInfo(name)
    info.size, info.type = num_bytes, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def pax(text):
    return header("x", len(text), tarfile.XHDTYPE) + text + bytes(-len(text) % 512)


EMPTY, END, LONG = header("a", 0), bytes(1024), bytes(1 << 20)
TOO_LONG = ("XHDTYPE", "XGLTYPE", "GNUTYPE_LONGNAME")
HOSTILE = [
    [header("a", -5), END],  # a size below zero
    [header("a", 10_000_000), END],  # beyond the archive's end
    [pax(b"11 path=aa\n") * 5000, EMPTY, END],  # nested headers
    [pax(b"12 path=a\0b\n"), EMPTY, END],
    [pax(b"99999999 path=a\n"), EMPTY, END],
    [EMPTY[:300]],
    [EMPTY, b"x" * 512, END],  # content instead of a header
    [EMPTY, END, b"x" * 512],  # more after the end
    [pax(b"22 GNU.sparse.map=0,x\n22 GNU.sparse.size=99\n"), EMPTY, END],
    # Larger headers than any archive has, which are not read.
    *([header("x", 1 << 40, getattr(tarfile, kind)), LONG] for kind in TOO_LONG),
]


@pytest.mark.parametrize("blocks", HOSTILE)
def test_a_hostile_tar_is_one_message(directory, blocks, monkeypatch):
    if blocks[-1] is LONG:
        monkeypatch.setattr(unpacking._TarStream, "left_bytes", 1 << 20)
    archive = directory / "a.tar.gz"
    archive.write_bytes(gzip.compress(b"".join(blocks), 1))
    with pytest.raises(DataError, match=r"a\.tar\.gz.*" + "headers" * (blocks[-1] is LONG)):
        unpack(archive)
    assert names_in(directory) == {"a.tar.gz"}


@pytest.mark.parametrize("name", ["a.tar.gz", "a.zip"])
def test_an_archive_with_too_much_in_it_is_refused(directory, name, monkeypatch):
    monkeypatch.setattr(unpacking, "MAX_MEMBERS", 10)
    members = [(str(i), b"") for i in range(11)]
    with pytest.raises(ArchiveError, match="more than 10 members"):
        unpack(pack(directory / name, *members))
    assert len(unpack(pack(directory / name, *members[:10]))) == 10
    monkeypatch.setattr(unpacking, "GIB", 10_000)
    monkeypatch.setattr(unpacking, "MAX_RATIO", 2)
    archive = pack(directory / name, ("a.csv", bytes(1_000_000)))
    for limit_bytes in (None, 999_999):
        with pytest.raises(DataError, match="--unpack_limit"):
            unpack(archive, limit_bytes=limit_bytes)
    assert not (directory / "a.csv").exists()
    assert unpack(archive, limit_bytes=1_000_000) == [directory / "a.csv"]


@pytest.mark.parametrize("name", ["a.tar.gz", "a.zip"])
def test_archives_are_fetched_checked_and_unpacked(directory, tmp_path, environment, name):
    source = tmp_path / "source"
    source.mkdir()
    good = pack(source / name, *THREE).read_bytes()
    half = good[: len(good) // 2]

    def get(match="", name=name, source=source, **options):
        with pytest.raises(DataError, match=match) if match else contextlib.nullcontext():
            return fetch("none", [name], source.as_uri(), directory, **options)[0]

    (source / name).write_bytes(half)
    get(name)
    assert names_in(directory) == {".lock"}
    (directory / name).write_bytes(half)
    get(name, source=tmp_path / "nowhere")  # it stays if there is no other
    assert (directory / name).read_bytes() == half
    (source / name).write_bytes(good)
    get("--unpack_limit", unpack_limit_bytes=9)
    for _ in range(2):
        assert len(get().unpacked) == 3
        assert (directory / name).read_bytes() == good
        (directory / "0.csv").unlink()  # and is unpacked again
    (directory / name).unlink()
    (source / name).write_bytes(good[:-1])
    get(r"fetched\.json")  # the checksum of the good one
    pack(source / f"b{name}", ("../b.csv", b"1"))
    get(r"\.\./b\.csv", f"b{name}")
    assert not (directory.parent / "b.csv").exists()
    assert not (directory / f"b{name}").exists()
