"""Writing files so that a reader never sees an incomplete one; reading files that end."""

from __future__ import annotations

import errno
import io
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes text (as UTF-8) or bytes to a file beside `path`, syncs it and renames it to `path`.

    At any time, even after a kill -9, `path` holds either the old or the new content, complete.

    Raises:
        OSError: The directory is missing, full or read-only; `path` is unchanged.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)  # mkstemp's 0600 would hide results from the group
        Path(temporary).replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            Path(temporary).unlink()
        raise


def read_regular_file(path: Path, encoding: str = "utf-8") -> str:
    """Returns the text of a file; refuses pipes and devices, which may never end.

    Raises:
        OSError: It cannot be read, or is not a regular file.
        ValueError: It is not text in this encoding, or its path contains a NUL character.
    """
    return io.TextIOWrapper(io.BytesIO(read_regular_bytes(path)), encoding).read()


def read_regular_bytes(path: Path, max_bytes: int | None = None) -> bytes:
    """Returns the content of a file; refuses pipes and devices, which may never end.

    Raises:
        OSError: It cannot be read, is not a regular file, or is larger than `max_bytes`.
        ValueError: Its path contains a NUL character.
    """
    with io.FileIO(path, opener=_open_at_once) as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a regular file", str(path))
        if max_bytes is not None and facts.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it is larger than {max_bytes:,} bytes", str(path))
        return file.readall()


def _open_at_once(path: str, flags: int) -> int:
    # Without O_NONBLOCK, opening a pipe waits until another process opens it for writing.
    return os.open(path, flags | os.O_NONBLOCK)
