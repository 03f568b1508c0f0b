"""Unpacking archives into their own directory, and nowhere else.

pooch's processors are not suitable: they overwrite existing files, and Untar has no filter before
Python 3.12. Here, every member is checked before the first is written, and an archive with a path
that leaves the directory, a link or a device is refused as a whole. Only the files' contents are
used, never their owners or modes.
"""

from __future__ import annotations

import errno
import filecmp
import gzip
import os
import shutil
import stat
import tarfile
import zipfile
import zlib
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
BROKEN = (tarfile.TarError, gzip.BadGzipFile, zipfile.BadZipFile, zlib.error, EOFError)


class _Member(NamedTuple):
    name: str
    num_bytes: int
    is_file: bool
    is_directory: bool
    open: Callable[[], Any]


def unpacked_files(archive: Path, reserved: Collection[str] = ()) -> list[Path] | None:
    """Returns an archive's unpacked files; None unless all are there, with the right sizes.

    Raises:
        DataError: As for `unpack`.
    """
    with _opened(archive, reserved) as members:
        sizes = {archive.parent / path: member.num_bytes for path, member in members.items()}
    there = all(path.is_file() and path.stat().st_size == size for path, size in sizes.items())
    return list(sizes) if there else None


def unpack(archive: Path, reserved: Collection[str] = ()) -> list[Path]:
    """Unpacks an archive into the directory it is in; returns the files.

    Args:
        archive: The archive; its suffix gives its format.
        reserved: Names in the directory that no member may have.

    Raises:
        DataError: It is damaged, or has members that would be outside the directory or would
            replace another file there. In this case, no file was unpacked.
        OSError: The directory cannot be written to, or does not have enough space.
    """
    directory = archive.parent
    staging = directory / f".{archive.name}.unpacking"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        with _opened(archive, reserved) as members:
            num_bytes = sum(member.num_bytes for member in members.values())
            if num_bytes > shutil.disk_usage(directory).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            for path, member in members.items():
                (staging / path).parent.mkdir(parents=True, exist_ok=True)
                with member.open() as source, (staging / path).open("wb") as file:
                    shutil.copyfileobj(source, file)
        for path in members:
            _check_target(archive, staging / path, directory / path)
        for path in members:
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (staging / path).replace(directory / path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return [directory / path for path in members]


@contextmanager
def _opened(archive: Path, reserved: Collection[str]) -> Iterator[dict[Path, _Member]]:
    """Opens an archive and checks its members; yields its files by relative path.

    Raises:
        DataError: It is unsafe or, also while its files are read, damaged.
    """
    is_tar = archive.name.endswith(TAR_SUFFIXES)
    try:
        file: Any
        with tarfile.open(archive, "r:gz") if is_tar else zipfile.ZipFile(archive) as file:
            members = list(_tar_members(file) if is_tar else _zip_members(file))
            for member in members:
                problem = _problem(member, {*reserved, archive.name})
                if problem:
                    raise DataError(f"not unpacked: its member {member.name!r} {problem}", archive)
            yield {Path(PurePosixPath(each.name)): each for each in members if each.is_file}
    except (*BROKEN, RuntimeError) as error:  # the latter: an encrypted zip
        raise DataError(f"cannot be unpacked ({error}); download it again", archive) from error


def _tar_members(file: tarfile.TarFile) -> Iterator[_Member]:
    for info in file:
        read = partial(file.extractfile, info)
        yield _Member(info.name, info.size, info.isreg(), info.isdir(), read)


def _zip_members(file: zipfile.ZipFile) -> Iterator[_Member]:
    for info in file.infolist():
        kind = stat.S_IFMT(info.external_attr >> 16)  # 0 unless a Unix program made the archive
        is_file = not info.is_dir() and kind in (0, stat.S_IFREG)
        read = partial(file.open, info)
        yield _Member(info.orig_filename, info.file_size, is_file, info.is_dir(), read)


def _problem(member: _Member, reserved: Collection[str]) -> str | None:
    """Returns what is wrong with a member, as a clause; None if nothing is."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\\" in member.name:
        return "would be outside this directory"
    if not (member.is_file or member.is_directory):
        return "is neither a file nor a directory"
    if "\0" in member.name or (member.is_file and not path.parts):
        return "has no valid name"
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
