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
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from candle_p1.errors import DataError

SUFFIXES = (".tar.gz", ".tgz", ".zip")
"""The suffixes of files that are unpacked."""
GIB = 1 << 30
MAX_RATIO = 100
"""How many times its own size an archive may unpack to, if that is more than 1 GiB."""
MAX_MEMBERS = 100_000
MAX_HEADER_BYTES = 64 << 20
"""How much a tar file may have besides the contents of its members."""
OWN_ERRORS = (None, errno.EINVAL, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
"""The numbers of errors that what an archive claims can cause; None for those of its reader."""

Members = Iterator[tuple[str, int, bool | None, Any]]
"""Name, size, whether it is a file (None: neither file nor directory), and the library's info."""


class ArchiveError(DataError):
    """An archive that is damaged or unsafe, of which nothing was unpacked."""


class _TarStream(gzip.GzipFile):
    """A tar file's bytes; refuses to read more than the headers of a reasonable archive have.

    tarfile reads them into memory at once. The contents it seeks while it lists the members.
    """

    left_bytes = MAX_HEADER_BYTES

    def read(self, size: int | None = -1) -> bytes:
        self.left_bytes -= self.left_bytes + 1 if size is None or size < 0 else size
        if self.left_bytes < 0:
            raise tarfile.ReadError("its headers are too large")
        return super().read(size)


def unpack(
    archive: Path,
    reserved: Collection[str] = (),
    limit_bytes: int | None = None,
    content: Path | None = None,
    *,
    write: bool = True,
) -> list[Path] | None:
    """Unpacks an archive into the directory it is in, without `reserved` names; returns the files.

    All together may have `limit_bytes`, by default 1 GiB or, if that is more, MAX_RATIO times the
    archive's size. Its bytes are in `content` if it does not have its name yet. Unless `write`,
    None stands for files that are missing.

    Raises:
        ArchiveError: It is damaged or unsafe.
        DataError: Its files are larger than the limit, or would replace others; none was unpacked.
        OSError: The directory cannot be written to, or does not have enough space.
    """
    staging = archive.with_name(f".{archive.name}.unpacking")  # until all of them are unpacked
    content = content or archive
    limit_bytes = limit_bytes or max(GIB, MAX_RATIO * content.stat().st_size)
    reserved = {*reserved, archive.name, staging.name}
    try:
        if archive.name.endswith(".zip"):
            with zipfile.ZipFile(content) as file:
                files = _checked(_zip_members(file), archive, reserved, limit_bytes)
                return _place(file.open, files, archive, staging, write)
        with _TarStream(content) as stream:
            tar = tarfile.TarFile(fileobj=stream)
            files = _checked(_tar_members(tar, stream), archive, reserved, limit_bytes)
            stream.left_bytes = sys.maxsize
            return _place(tar.extractfile, files, archive, staging, write)
    except DataError:
        raise
    except Exception as error:  # Python's readers raise almost anything
        if getattr(error, "errno", None) not in OWN_ERRORS:
            raise
        reason = str(error) or type(error).__name__
        raise ArchiveError(f"cannot be unpacked ({reason}); download it again", archive) from error
    finally:
        if write:  # otherwise another process may be unpacking
            shutil.rmtree(staging, ignore_errors=True)


def _place(
    opened: Any, files: dict[Path, Any], archive: Path, staging: Path, write: bool
) -> list[Path] | None:
    targets = {archive.parent / path: size for path, (size, _) in files.items()}
    there = (path.is_file() and path.stat().st_size == size for path, size in targets.items())
    if archive.exists() and all(there):  # one just downloaded does not have its name yet
        return list(targets)
    if not write:
        return None
    if sum(targets.values()) > shutil.disk_usage(archive.parent).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    shutil.rmtree(staging, ignore_errors=True)
    for path, (size, info) in files.items():
        (staging / path).parent.mkdir(parents=True, exist_ok=True)
        with opened(info) as source, (staging / path).open("wb") as output:
            shutil.copyfileobj(source, output)
            if output.tell() != size:
                raise EOFError("it is cut short")
    for path, target in zip(files, targets, strict=True):
        inside = target.parent.resolve().is_relative_to(archive.parent.resolve())
        same = target.is_file() and filecmp.cmp(staging / path, target, shallow=False)
        if not inside or target.is_symlink() or (target.exists() and not same):
            problem = f"{target} is already there, or outside this directory; move it away"
            raise DataError(f"not unpacked: a different file {problem}", archive)
    for path, target in zip(files, targets, strict=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        (staging / path).replace(target)
    return list(targets)


def _tar_members(file: tarfile.TarFile, stream: _TarStream) -> Members:
    for info in file:
        is_file = True if info.isreg() and not info.issparse() else False if info.isdir() else None
        yield info.name, info.size, is_file, info
    stream.seek(file.offset)  # a header that tarfile does not understand ends the list
    while rest := stream.read(1 << 16):  # to the end, where gzip has a checksum
        if rest.strip(b"\0"):
            raise tarfile.ReadError("a header is damaged")


def _zip_members(file: zipfile.ZipFile) -> Members:
    for info in file.infolist():
        kind = stat.S_IFMT(info.external_attr >> 16)  # 0 unless a Unix program made the archive
        is_file = False if info.is_dir() else True if kind in (0, stat.S_IFREG) else None
        yield info.orig_filename, info.file_size, is_file, info


def _checked(
    found: Members, archive: Path, reserved: Collection[str], limit_bytes: int
) -> dict[Path, Any]:
    """Returns (size, info) by relative path, looking no further than the first problem."""
    num_bytes = 0
    files: dict[Path, Any] = {}
    for num_before, (name, size, is_file, info) in enumerate(found):
        path = PurePosixPath(name)
        outside = path.is_absolute() or ".." in path.parts or "\\" in name
        own = path.parts and (path.parts[0] in reserved or ".partial" in path.suffixes)
        bad = not name.isprintable() or size < 0 or is_file is None or Path(path) in files
        if outside or own or bad:
            raise ArchiveError(
                f"not unpacked: its member {name!r} would be outside this directory, is not a plain"
                " file or directory, is there twice, or has a name or size that is not allowed",
                archive,
            )
        if num_before == MAX_MEMBERS:
            raise ArchiveError(f"not unpacked: it has more than {MAX_MEMBERS:,} members", archive)
        if is_file:
            files[Path(path)] = size, info
            num_bytes += size
        if num_bytes > limit_bytes:
            raise DataError(
                f"not unpacked: its files have more than {limit_bytes / GIB:g} GiB; if this is"
                " right, set a higher limit with --unpack_limit",
                archive,
            )
    return files
