"""Unpacking archives into their own directory, and nowhere else.

Every member is checked before the first is written. An archive is refused as a whole if it is far
larger than expected, or has a path that leaves the directory, a link or a device. Only the files'
contents are used, never their owners or modes.
"""

from __future__ import annotations

import errno
import filecmp
import gzip
import os
import shutil
import stat
import sys
import tarfile
import zipfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from candle_p1.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

TAR_SUFFIXES = (".tar.gz", ".tgz")
SUFFIXES = (*TAR_SUFFIXES, ".zip")
"""The suffixes of files that are unpacked."""
GIB = 1 << 30
MAX_RATIO = 100
"""How many times its own size an archive may unpack to, if that is more than 1 GiB."""
MAX_MEMBERS = 100_000
MAX_HEADER_BYTES = 64 << 20
"""How much a tar file may have besides the contents of its members."""
MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 1024
BLOCK_BYTES = 1 << 20


class ArchiveError(DataError):
    """An archive that is damaged or unsafe, of which nothing was unpacked."""


class _Member(NamedTuple):
    name: str
    num_bytes: int
    is_file: bool
    is_directory: bool
    open: Callable[[], Any]


class _TarStream(gzip.GzipFile):
    """A tar file's bytes; refuses to read more than the headers of a reasonable archive have.

    tarfile reads a member's extended header, however large, into memory at once. It does not read
    the contents of members while it lists them, but seeks.
    """

    left_bytes = MAX_HEADER_BYTES

    def read(self, size: int | None = -1) -> bytes:
        """Returns the next bytes.

        Raises:
            TarError: They are too many.
        """
        self.left_bytes -= self.left_bytes + 1 if size is None or size < 0 else size
        if self.left_bytes < 0:
            raise tarfile.ReadError("its headers are too large")
        return super().read(size)


def unpacked_files(
    archive: Path, reserved: Collection[str] = (), limit_bytes: int | None = None
) -> list[Path] | None:
    """Returns an archive's unpacked files; None unless all are there, with the right sizes.

    Raises:
        DataError: As for `unpack`.
    """
    with _opened(archive, archive, reserved, limit_bytes) as members:
        sizes = {archive.parent / path: member.num_bytes for path, member in members.items()}
    there = all(path.is_file() and path.stat().st_size == size for path, size in sizes.items())
    return list(sizes) if there else None


def unpack(
    archive: Path,
    reserved: Collection[str] = (),
    limit_bytes: int | None = None,
    content: Path | None = None,
) -> list[Path]:
    """Unpacks an archive into the directory it is in; returns the files.

    Args:
        archive: The archive; its suffix gives its format.
        reserved: Names in the directory that no member may have.
        limit_bytes: The size that all files together may have; by default 1 GiB or, if that is
            more, MAX_RATIO times the archive's size.
        content: Where the archive's bytes are, if it does not have its name yet.

    Raises:
        ArchiveError: It is damaged, or has members that would be outside the directory or are not
            files.
        DataError: Its files are larger than the limit, or would replace other files. In this case,
            too, no file was unpacked.
        OSError: The directory cannot be written to, or does not have enough space.
    """
    directory = archive.parent
    staging = _staging(archive)
    shutil.rmtree(staging, ignore_errors=True)
    try:
        with _opened(archive, content or archive, reserved, limit_bytes) as members:
            num_bytes = sum(member.num_bytes for member in members.values())
            if num_bytes > shutil.disk_usage(directory).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            for path, member in members.items():
                (staging / path).parent.mkdir(parents=True, exist_ok=True)
                with (staging / path).open("wb") as file:
                    file.writelines(_blocks(member, archive))
                    if file.tell() != member.num_bytes:
                        raise ArchiveError("cannot be unpacked: it is cut short", archive)
        for path in members:
            _check_target(archive, staging / path, directory / path)
        for path in members:
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (staging / path).replace(directory / path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return [directory / path for path in members]


def _staging(archive: Path) -> Path:
    """Returns the directory in which files lie until all of them are unpacked."""
    return archive.with_name(f".{archive.name}.unpacking")


@contextmanager
def _reading(archive: Path) -> Iterator[None]:
    """Converts what Python's readers raise for damaged archives, which may be almost anything.

    An error of the file system has a number and is not converted, except that of a seek to a
    position that the archive claims.
    """
    try:
        yield
    except Exception as error:
        is_own = isinstance(error, DataError)
        if is_own or getattr(error, "errno", None) not in (None, errno.EINVAL):
            raise
        reason = str(error) or type(error).__name__
        raise ArchiveError(f"cannot be unpacked ({reason}); download it again", archive) from error


@contextmanager
def _opened(
    archive: Path, content: Path, reserved: Collection[str], limit_bytes: int | None
) -> Iterator[dict[Path, _Member]]:
    """Opens an archive and checks its members; yields its files by relative path."""
    limit_bytes = limit_bytes or max(GIB, MAX_RATIO * content.stat().st_size)
    is_tar = archive.name.endswith(TAR_SUFFIXES)
    reserved = {*reserved, archive.name, _staging(archive).name}
    with _reading(archive):
        file: Any = _TarStream(content) if is_tar else zipfile.ZipFile(content)
    with file:
        with _reading(archive):
            found = _tar_members(file) if is_tar else _zip_members(file)
            members = _checked(found, archive, reserved, limit_bytes)
        if is_tar:
            file.left_bytes = sys.maxsize
        yield members


def _checked(
    found: Iterator[_Member], archive: Path, reserved: Collection[str], limit_bytes: int
) -> dict[Path, _Member]:
    """Returns an archive's files by relative path, looking no further than its first problem.

    Raises:
        DataError: As for `unpack`.
    """
    num_bytes = 0
    members: dict[Path, _Member] = {}
    directories: set[Path] = set()
    for num_before, member in enumerate(found):
        path = Path(PurePosixPath(member.name))
        problem = _problem(member, reserved)
        if member.is_file and path in members:
            problem = "is there twice"
        if problem:
            raise ArchiveError(f"not unpacked: its member {member.name!r} {problem}", archive)
        if num_before == MAX_MEMBERS:
            raise ArchiveError(f"not unpacked: it has more than {MAX_MEMBERS:,} members", archive)
        directories.update(path.parents if member.is_file else (path, *path.parents))
        if member.is_file:
            members[path] = member
            num_bytes += member.num_bytes
        if num_bytes > limit_bytes:
            raise DataError(
                f"not unpacked: its files have more than {limit_bytes / GIB:g} GiB; if this is"
                " right, set a higher limit with --unpack_limit",
                archive,
            )
    for path in members:
        if path in directories:
            raise ArchiveError(
                f"not unpacked: its member {str(path)!r} is a file and a directory", archive
            )
    return members


def _tar_members(stream: _TarStream) -> Iterator[_Member]:
    file = tarfile.TarFile(fileobj=stream)
    for info in file:
        read = partial(file.extractfile, info)
        is_file = info.isreg() and not info.issparse()
        yield _Member(info.name, info.size, is_file, info.isdir(), read)
    stream.seek(file.offset)  # a header that tarfile does not understand ends the list
    while rest := stream.read(1 << 16):  # to the end, where gzip has a checksum
        if rest.strip(b"\0"):
            raise tarfile.ReadError("a header is damaged")


def _zip_members(file: zipfile.ZipFile) -> Iterator[_Member]:
    for info in file.infolist():
        kind = stat.S_IFMT(info.external_attr >> 16)  # 0 unless a Unix program made the archive
        is_file = not info.is_dir() and kind in (0, stat.S_IFREG)
        read = partial(file.open, info)
        yield _Member(info.orig_filename, info.file_size, is_file, info.is_dir(), read)


def _blocks(member: _Member, archive: Path) -> Iterator[bytes]:
    with _reading(archive), member.open() as source:
        while block := source.read(BLOCK_BYTES):
            yield block


def _problem(member: _Member, reserved: Collection[str]) -> str | None:
    """Returns what is wrong with a member, as a clause; None if nothing is."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\\" in member.name:
        return "would be outside this directory"
    if not (member.is_file or member.is_directory):
        return "is neither a plain file nor a directory"
    lengths = [len(os.fsencode(part)) for part in path.parts]
    is_long = max(lengths, default=0) > MAX_NAME_BYTES or sum(lengths) > MAX_PATH_BYTES
    if not member.name.isprintable() or is_long or (member.is_file and not path.parts):
        return "has no valid name"
    if member.num_bytes < 0:
        return "has no valid size"
    if path.parts and (path.parts[0] in reserved or ".partial" in path.suffixes):
        return "has a name reserved for the record of this directory"
    return None


def _check_target(archive: Path, unpacked: Path, target: Path) -> None:
    directory = archive.parent.resolve()
    if not target.parent.resolve().is_relative_to(directory):
        raise DataError(f"not unpacked: {target} leads outside {directory}", archive)
    same = target.is_file() and filecmp.cmp(unpacked, target, shallow=False)
    if target.is_symlink() or (target.exists() and not same):
        raise DataError(
            f"not unpacked: a different file {target} is already there; move it away", archive
        )
