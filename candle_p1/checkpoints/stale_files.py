"""Stale files of writers that were killed: completed or removed by the next run.

Everything unfinished has a name with the writer's token, and the writer holds the lock on a file of
that name as long as it lives.
"""

from __future__ import annotations

import errno
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from candle_p1.checkpoints.lock import Lock, take_lock

TEMPORARY = re.compile(r"\.(?P<name>.+)\.tmp-(?P<token>[0-9a-f]{12})-\d+")
LOCK = re.compile(r"\.writer-(?P<token>[0-9a-f]{12})\.lock")


def lock_name(token: str) -> str:
    """Returns the name of the file whose lock a writer holds."""
    return f".writer-{token}.lock"


def temporary_name(name: str, token: str, serial: int) -> str:
    """Returns the name of something until it is complete."""
    return f".{name}.tmp-{token}-{serial}"


def clean(root: Path, report: Callable[[str], None]) -> None:
    """Removes what dead writers have left unfinished in a directory.

    A checkpoint that was complete when its writer was killed, but not yet linked, is linked, unless
    somebody has changed the link since. The report receives a sentence on what cannot be removed.
    """
    stale: dict[str, list[Path]] = defaultdict(list)
    try:
        entries = sorted(root.iterdir())
    except OSError:  # it does not exist, or its reader is told why it cannot be read
        return
    for entry in entries:
        match = TEMPORARY.fullmatch(entry.name) or LOCK.fullmatch(entry.name)
        if match:
            stale[match["token"]].append(entry)
    for token, paths in stale.items():
        lock = _lock_of_dead(root / lock_name(token))
        if lock is None:
            continue
        try:
            for path in paths:
                if match := TEMPORARY.fullmatch(path.name):
                    _clean(path, match["name"])
            lock.path.unlink(missing_ok=True)
        except OSError as error:
            report(
                f"{error.filename} was left by a run that is dead, and cannot be removed:"
                f" {error.strerror}"
            )
        finally:
            lock.release()


def remove_tree(path: Path) -> None:
    """Removes a directory in which another rank may be creating a last file.

    Raises:
        OSError: It cannot be removed.
    """
    for attempt in range(3):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            if not path.exists():
                return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or attempt == 2:
                raise


def _lock_of_dead(path: Path) -> Lock | None:
    """Returns the lock of a writer that is dead; None if it may be alive."""
    try:
        lock = take_lock(path, create=False)
    except FileNotFoundError:  # it has ended, but could not remove everything
        return Lock(path)
    except OSError:  # somebody else's
        return None
    if lock is None:
        return None
    with suppress(OSError):  # the file system cannot tell
        if lock.proves_end:
            return lock
    lock.release()
    return None


def _clean(path: Path, name: str) -> None:
    """Removes something unfinished, or completes it if it is a link to a complete checkpoint."""
    if not path.is_symlink():
        remove_tree(path)
        return
    link = path.with_name(name)
    is_newer = not link.is_symlink() or link.lstat().st_mtime_ns <= path.lstat().st_mtime_ns
    if path.is_dir() and is_newer:
        path.replace(link)
    else:
        path.unlink()
