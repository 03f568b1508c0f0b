"""Writing files so that a reader never sees an incomplete one; reading files that end."""

from __future__ import annotations

import errno
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
    # Without O_NONBLOCK, opening a pipe waits until another process opens it for writing.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, encoding=encoding) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a regular file", str(path))
        return file.read()
