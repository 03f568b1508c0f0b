"""Writing files so that a reader never sees an incomplete one."""

from __future__ import annotations

import os
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
