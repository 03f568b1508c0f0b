"""Writing files so that a reader never sees an incomplete one; reading files that end."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errors of a full disk, a used-up quota and a limit on the size of files."""


def shipped(name: str) -> Path:
    """Returns a directory of the checkout, which a wheel holds within the package."""
    package = Path(__file__).resolve().parent
    within = package / name
    return within if within.is_dir() else package.parent / name


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes text (as UTF-8) or bytes to a file beside `path`, syncs it and renames it to `path`.

    At any time, even after a kill -9, `path` holds either the old or the new content, complete. On
    a full disk, the space that `reserve` has kept for the file is used.

    Raises:
        OSError: The directory is missing, full or read-only; `path` is unchanged.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        temporary = _write_beside(path, data)
    except OSError as error:
        reserved = _reserved(path)
        if error.errno not in FULL or not reserved.exists():
            raise
        temporary = _fill(reserved, data)
    try:
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def create_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file as `write_atomically` does, or raises FileExistsError if there is one.

    Of several processes that call this at once, one succeeds.
    """
    temporary = _write_beside(path, content.encode() if isinstance(content, str) else content)
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        path.open("x").close()
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_file(path: Path, num_bytes: int) -> Iterator[Path]:
    """Yields where to write what then becomes `path`, synced, as `write_atomically` does.

    The name is the same, because libraries choose the format by it, but in a directory of its own
    beside `path`, which is removed. There has to be space for `num_bytes` before anything is
    written, because a library may not end well on a full disk.

    Raises:
        OSError: The directory is missing, full or read-only; `path` is unchanged.
    """
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as directory:
        temporary = Path(directory) / path.name
        with temporary.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        temporary.unlink()
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)


def reserve(path: Path, num_bytes: int) -> None:
    """Keeps space on the disk for a later `write_atomically` of at most this size; or OSError."""
    try:
        with _reserved(path).open("wb") as file:
            file.write(bytes(num_bytes))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        release(path)
        raise


def release(path: Path) -> None:
    """Gives up the space that `reserve` has kept, if any."""
    with suppress(OSError):
        _reserved(path).unlink(missing_ok=True)


def expand_user(path: str | Path) -> Path:
    """Returns a path with its ~ or ~USER replaced, or unchanged, as in a shell, if that fails."""
    with suppress(RuntimeError):
        return Path(path).expanduser()
    return Path(path)


def read_regular_file(path: Path, encoding: str = "utf-8") -> str:
    """Returns the text of a file; raises as `read_regular_bytes`, or ValueError if it is none."""
    return io.TextIOWrapper(io.BytesIO(read_regular_bytes(path)), encoding).read()


def read_regular_bytes(path: Path, max_bytes: int | None = None) -> bytes:
    """Returns the content of a file; refuses pipes and devices, which may never end.

    Raises:
        OSError: It cannot be read, is not a regular file, or is larger than `max_bytes`.
        ValueError: Its path contains a NUL character.
    """
    with open_regular_file(path) as file:
        if max_bytes is not None and os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it is larger than {max_bytes:,} bytes", str(path))
        return file.read()


def open_regular_file(path: Path) -> io.BufferedReader:
    """Opens a file for reading bytes; raises as `read_regular_bytes` does."""
    # Without O_NONBLOCK, opening a pipe waits until another process opens it for writing.
    file = io.FileIO(path, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a regular file", str(path))
    return io.BufferedReader(file)


def _reserved(path: Path) -> Path:
    return path.with_name(f".{path.name}.reserved")


def _write_beside(path: Path, data: bytes) -> Path:
    """Returns a new file with this content and the usual permissions, beside `path`."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp's 0600 would hide results from the group
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _fill(reserved: Path, data: bytes) -> Path:
    """Overwrites a reserved file, which needs no new space unless the content is larger."""
    with reserved.open("r+b") as file:
        if len(data) > os.fstat(file.fileno()).st_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(reserved))
        file.write(data)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
    return reserved


def mount_of(path: Path) -> tuple[str, set[str]]:
    """Returns the kind of file system that a path is in, "" if unknown, and its mount options."""
    device, kind, options = path.stat().st_dev, "", set[str]()
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            mount, _, source = (part.split() for part in line.partition(" - "))
            if len(mount) > 5 and mount[2] == number and source:
                kind = kind or source[0]
                options |= {*mount[5].split(","), *source[-1].split(",")}
    return kind, options


def files_at(path: Path, pattern: str = "*") -> list[Path]:
    """Returns the files of a directory that match, by name, without hidden ones.

    If the path leads to anything else than a directory, it is returned itself.
    """
    if not path.is_dir():
        return [path]
    return sorted(
        each for each in path.glob(pattern) if each.is_file() and not each.name.startswith(".")
    )


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file.

    Raises:
        OSError: It cannot be read, or is not a regular file.
        ValueError: It is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(read_regular_bytes(path))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def content_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes, or raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
