"""Unpacking archives, inside their own directory only.

pooch's processors do not serve here: Untar gives tarfile no filter before Python 3.12, and both
overwrite what is there. So every member is looked at before the first is written: an archive with a
path that leaves the directory, a link or a device is refused whole, whatever the Python.
"""

from __future__ import annotations

import filecmp
import shutil
import stat
import tarfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from candle_p1.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Collection

TAR_SUFFIXES = (".tar.gz", ".tgz")
SUFFIXES = (*TAR_SUFFIXES, ".zip")
BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)
"""What reading a damaged or encrypted archive may raise, besides OSError."""


@dataclass(frozen=True)
class _Member:
    name: str
    num_bytes: int
    is_file: bool
    is_directory: bool


def is_archive(name: str) -> bool:
    """Returns whether a file of this name is unpacked."""
    return name.endswith(SUFFIXES)


def unpacked_files(archive: Path, reserved: Collection[str] = ()) -> list[Path] | None:
    """Returns an archive's files beside it; None unless all are there with their sizes.

    Raises:
        DataError: As for `unpack`.
    """
    members = _members(archive, reserved)
    there = all(
        (archive.parent / member.name).is_file()
        and (archive.parent / member.name).stat().st_size == member.num_bytes
        for member in members
    )
    return [archive.parent / member.name for member in members] if there else None


def unpack(archive: Path, reserved: Collection[str] = ()) -> list[Path]:
    """Unpacks an archive into the directory it is in; returns the files.

    Args:
        archive: The archive; its kind follows from its name.
        reserved: Names in the directory that no member may have.

    Raises:
        DataError: It is damaged, or holds what would not stay inside the directory or would replace
            another file there. No file was unpacked then.
        OSError: The directory cannot be written to.
    """
    directory = archive.parent
    files = [Path(member.name) for member in _members(archive, reserved)]
    staging = directory / f".{archive.name}.unpacking"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        _extract(archive, staging)
        for file in files:
            _check_place(archive, staging / file, directory / file)
        for file in files:
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            (staging / file).replace(directory / file)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return [directory / file for file in files]


def _members(archive: Path, reserved: Collection[str]) -> list[_Member]:
    """Returns the files in an archive, under clean names, after all members were looked at."""
    try:
        members = _tar_members(archive) if _is_tar(archive) else _zip_members(archive)
    except (*BROKEN, OSError) as error:
        raise DataError(f"it cannot be unpacked ({error}): download it again", archive) from error
    for member in members:
        problem = _problem(member, {*reserved, archive.name})
        if problem:
            raise DataError(f"not unpacked, because its member {member.name!r} {problem}", archive)
    return [
        _Member(str(PurePosixPath(member.name)), member.num_bytes, True, False)
        for member in members
        if member.is_file
    ]


def _problem(member: _Member, reserved: Collection[str]) -> str | None:
    """Returns what is wrong with a member, as a clause; None if nothing is."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\\" in member.name:
        return "would lie outside of this directory"
    if not (member.is_file or member.is_directory):
        return "is neither a file nor a directory"
    if "\0" in member.name or (member.is_file and not path.parts):
        return "has no proper name"
    if path.parts and (path.parts[0] in reserved or ".partial" in path.suffixes):
        return "would replace a file that keeps account of this directory"
    return None


def _is_tar(archive: Path) -> bool:
    return archive.name.endswith(TAR_SUFFIXES)


def _tar_members(archive: Path) -> list[_Member]:
    with tarfile.open(archive, "r:gz") as file:
        return [
            _Member(info.name, info.size, info.isreg(), info.isdir()) for info in file.getmembers()
        ]


def _zip_members(archive: Path) -> list[_Member]:
    with zipfile.ZipFile(archive) as file:
        return [_zip_member(info) for info in file.infolist()]


def _zip_member(info: zipfile.ZipInfo) -> _Member:
    kind = stat.S_IFMT(info.external_attr >> 16)  # the mode, where a Unix program made it; else 0
    is_directory = info.is_dir()
    is_file = not is_directory and kind in (0, stat.S_IFREG)
    return _Member(info.orig_filename, info.file_size, is_file, is_directory)


def _extract(archive: Path, staging: Path) -> None:
    # What was looked at above is looked at again by tarfile's filter, where this Python has it.
    keywords: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    staging.mkdir()
    try:
        if _is_tar(archive):
            with tarfile.open(archive, "r:gz") as tar:
                tar.extractall(staging, **keywords)
        else:
            with zipfile.ZipFile(archive) as file:
                file.extractall(staging)
    except BROKEN as error:
        raise DataError(f"it cannot be unpacked ({error}): download it again", archive) from error


def _check_place(archive: Path, unpacked: Path, target: Path) -> None:
    inside = archive.parent.resolve()
    if not target.parent.resolve().is_relative_to(inside):
        raise DataError(f"not unpacked, because {target} leads outside of {inside}", archive)
    if target.is_symlink() or (target.exists() and not _same(unpacked, target)):
        raise DataError(f"not unpacked, because another {target} is there: move that away", archive)


def _same(first: Path, second: Path) -> bool:
    return second.is_file() and filecmp.cmp(first, second, shallow=False)
