"""Environments that jobs copy to the storage of their nodes: one archive instead of many files.

Thousands of ranks that import Python's packages from one file system slow each other down. The
archive holds three directories, which may lie anywhere (common/unpack_env.sh unpacks it on a node):

* ``venv``: the virtual environment, without what refers to the checkout;
* ``base``: the Python that it was made of, unless that is the operating system's own;
* ``root``: this package with its compiled modules, and the benchmarks, as they are now.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tarfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from candle_p1.errors import SetupError
from candle_p1.records.environment import SOURCE_NAME, source_commit

ARCHIVES = ".staged"
"""The directory in the checkout that holds archives."""
OF_SYSTEM = ("/usr", "/usr/local")
"""Where a Python is the operating system's, which every node has."""
_NOT_IN_BASE = ("site-packages", "test", "idlelib", "lib2to3", "tkinter", "turtledemo", "ensurepip")
_OF_CHECKOUT = re.compile(
    r"site-packages/(candle_p1/|(__pycache__/)?(?=[^/]*editable)[^/]*candle_p1[^/]*$)"
)
"""How an editable installation finds the checkout, or part of one."""


class _Packed(NamedTuple):
    name: str  # Its path in the archive
    path: Path  # The file or symbolic link
    target: str | None = None  # What a symbolic link refers to; None is a regular file


@dataclass(frozen=True)
class StagedEnvironment:
    """The environment that this process runs in, as an archive."""

    path: Path  # The archive, which is named by its content: the same files are packed once
    members: Sequence[_Packed]  # What belongs into it

    @classmethod
    def of(cls, root: Path) -> StagedEnvironment:
        """Finds the files of the environment and of the checkout `root`; writes nothing yet.

        Raises SetupError if this Python does not belong to a virtual environment.
        """
        if sys.prefix == sys.base_prefix:
            raise SetupError(
                f"{sys.executable} does not belong to a virtual environment, which --stage_env"
                f" copies to the nodes: run make setup in {root}, and then .venv/bin/candle-p1"
            )
        members = [*_python(), *_package(root)]
        return cls(root / ARCHIVES / f"env-{_digest(members)}.tar", members)

    def write(self) -> int:
        """Writes the archive unless it exists, or raises SetupError; returns its size in bytes."""
        try:
            if not self.path.exists():
                self.path.parent.mkdir(exist_ok=True)
                _write(self.path, self.members)
            return self.path.stat().st_size
        except OSError as error:
            raise SetupError(f"cannot write {self.path}: {error.strerror}") from error


def _python() -> Iterator[_Packed]:
    venv, base = Path(sys.prefix), Path(sys.base_prefix)
    python = Path(sys.executable).resolve()
    with_base = str(base) not in OF_SYSTEM
    for member in _tree(venv, "venv"):
        if with_base and member.name == "venv/bin/python":
            yield member._replace(target=f"../../base/bin/{python.name}")
        elif not _OF_CHECKOUT.search(member.name):
            yield member
    if with_base:
        yield _Packed(f"base/bin/{python.name}", python)
        yield from (_packed(path, base, "base") for path in sorted((base / "lib").glob("*.so*")))
        for directory in sorted((base / "lib").glob(f"python{sys.version_info[0]}.*")):
            skipped = {directory / name for name in _NOT_IN_BASE} | set(directory.glob("config-*"))
            yield from _tree(directory, f"base/lib/{directory.name}", skipped)


def _package(root: Path) -> Iterator[_Packed]:
    """Yields this package and the benchmarks as they are in the checkout.

    An editable installation may keep compiled modules where packages are installed.
    """
    known: dict[str, _Packed] = {}
    for path in sys.path:
        compiled = _tree(Path(path, "candle_p1"), "root/candle_p1")
        known |= {each.name: each for each in compiled if each.path.suffix == ".so"}
    for name in ("candle_p1", "benchmarks"):
        known |= {each.name: each for each in _tree(root / name, f"root/{name}")}
    yield from (known[name] for name in sorted(known))


def _tree(directory: Path, name: str, skipped: Collection[Path] = ()) -> Iterator[_Packed]:
    for parent, directories, files in os.walk(directory):
        below = Path(parent)
        links = [each for each in directories if (below / each).is_symlink()]
        directories[:] = sorted(
            each for each in directories if each not in links and below / each not in skipped
        )
        yield from (_packed(below / each, directory, name) for each in sorted([*files, *links]))


def _packed(path: Path, directory: Path, name: str) -> _Packed:
    target = str(path.readlink()) if path.is_symlink() else None
    return _Packed(f"{name}/{path.relative_to(directory)}", path, target)


def _digest(members: Iterable[_Packed]) -> str:
    """Returns a digest of the names, sizes and times of members, but for compiled Python."""
    digest = hashlib.sha256()
    for member in (each for each in members if "/__pycache__/" not in each.name):
        facts: tuple[object, ...] = (member.name, str(member.path), member.target)
        if member.target is None:
            status = member.path.stat()
            facts += (status.st_size, status.st_mtime_ns)
        digest.update(json.dumps(facts).encode())
    return digest.hexdigest()[:16]


def _write(archive: Path, members: Iterable[_Packed]) -> None:
    beside = archive.with_name(f"{archive.name}.{os.getpid()}")
    source = json.dumps(source_commit()).encode()
    try:
        with tarfile.open(beside, "w", format=tarfile.PAX_FORMAT) as tar:
            for member in members:
                if member.target is None:
                    tar.add(member.path.resolve(), member.name, recursive=False)
                else:
                    link = tarfile.TarInfo(member.name)
                    link.type, link.linkname = tarfile.SYMTYPE, member.target
                    tar.addfile(link)
            about = tarfile.TarInfo(f"root/{SOURCE_NAME}")
            about.size = len(source)
            tar.addfile(about, BytesIO(source))
        beside.replace(archive)
    finally:
        beside.unlink(missing_ok=True)
