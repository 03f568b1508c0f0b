"""Synthetic data sets: generated from a recipe and a seed, and described by a manifest.

A recipe gives the content of each file as blocks of bytes; everything else is here. Files get their
names only when all of them are complete, and the manifest ``synthetic.json`` is written last. So a
directory with a manifest that matches its files is complete, and an interruption leaves no file.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import filelock
import numpy as np
from numpy.typing import NDArray

from candle_p1.data.cases import LAYOUT
from candle_p1.data.directory import DATA_DIRECTORY_VARIABLE, Manifest, data_directory, storing
from candle_p1.errors import DataError, ParameterError

Notify = Callable[[str], None]
"""Called with a message for the user."""
Progress = Callable[[str, int, int], None]
"""Called with a file's name, its bytes so far, and the bytes expected (0 if not known)."""
SIZES = ("full", "small")
"""The sizes of the synthetic data: that of the published files, and a small one for trials."""
LOCK_NAME = ".lock"
MAX_SCALED = 2**32 - 1
"""The largest value times 10^decimals that `format_rows` writes."""


def number_patients(num_patients: Mapping[str, int]) -> dict[str, range]:
    """Returns the numbers of each role's patients; no number is in two roles."""
    numbered, first = {}, 0
    for role, num in num_patients.items():
        numbered[role] = range(first, first + num)
        first += num
    return numbered


@dataclass(frozen=True)
class SyntheticFile:
    """One file of a data set: its name, approximate size (for a progress bar) and content.

    One of several files with the same role is named "<the role's directory>/<name>".
    """

    name: str
    num_bytes_estimate: int
    blocks: Iterator[bytes]


class SyntheticRecipe(ABC):
    """How a benchmark's synthetic data are made."""

    name: ClassVar[str]  # the benchmark's name
    version: ClassVar[int]  # must be increased when the same seed gives different bytes
    sizes: ClassVar[Sequence[str]] = SIZES  # the sizes it can make
    # the names of the files, or of directories of files, by role
    roles: ClassVar[Mapping[str, str]]

    @abstractmethod
    def files(self, size: str, seed: int) -> list[SyntheticFile]:
        """Returns the files of a data set; the same size and seed give the same bytes."""


def ensure(
    recipe: SyntheticRecipe, size: str, seed: int, progress: Progress | None = None
) -> Manifest:
    """Returns a data set in the data directory; makes it, as `make` does, if need be."""
    directory = data_directory() / "synthetic" / f"{recipe.name}-{size}-{seed}-v{recipe.version}"
    return make(recipe, size, directory, seed, progress, may_replace=True)


def make(
    recipe: SyntheticRecipe,
    size: str,
    directory: Path,
    seed: int,
    progress: Progress | None = None,
    *,
    may_replace: bool = False,
) -> Manifest:
    """Makes a data set in a directory, unless the same one is already there and complete.

    If two jobs call this at once, one makes the data set and the other waits.

    Raises:
        ParameterError: The recipe has no such size.
        DataError: The directory cannot be written to, or has other files with these names, which
            may not be replaced.
    """
    if size not in recipe.sizes:
        raise ParameterError(f"unknown size {size!r}: {recipe.name} has {', '.join(recipe.sizes)}")
    directory = directory.absolute()
    wanted = {"name": recipe.name, "size": size, "seed": seed, "version": recipe.version}

    def find() -> Manifest | None:
        found = Manifest.read(directory)
        return found if found and found.made_of == wanted and found.whole else None

    if found := find():  # first without the lock, for which jobs queue
        return found
    others = [name for name in recipe.roles.values() if (directory / name).exists()]
    if others and not may_replace:
        problem = f"{', '.join(others)} would be replaced: remove them, or name another --out"
        raise DataError(problem, directory)
    remedy = f"set {DATA_DIRECTORY_VARIABLE} or --out to a directory with enough space"
    with storing(directory, remedy), locked(directory):
        if found := find():  # another job may have made it in the meantime
            return found
        facts = write_files(directory, recipe.files(size, seed), progress)
        manifest = Manifest(directory, wanted, facts)
        manifest.write()
    return manifest


def synthetic_sets(recipe: SyntheticRecipe) -> list[Manifest]:
    """Returns a recipe's data sets in the data directory, which runs have generated."""
    found = sorted((data_directory() / "synthetic").glob(f"{recipe.name}-*"))
    manifests = [Manifest.read(directory) for directory in found]
    return [each for each in manifests if each and each.made_of.get("name") == recipe.name]


def write_files(
    directory: Path, files: Sequence[SyntheticFile], progress: Progress | None
) -> dict[str, dict[str, Any]]:
    """Writes files, which get their names when all are complete; returns sizes and SHA-256s.

    The directory must be locked.
    """
    partial = {file.name: partial_path(directory, file.name) for file in files}
    try:
        facts = {file.name: _write(file, partial[file.name], progress) for file in files}
        for name, path in partial.items():
            (directory / name).parent.mkdir(exist_ok=True)
            path.replace(directory / name)
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)
    return facts


def _write(file: SyntheticFile, path: Path, progress: Progress | None) -> dict[str, Any]:
    digest, num_bytes = hashlib.sha256(), 0
    path.unlink(missing_ok=True)  # a pipe would be waited for
    with path.open("wb") as output:
        for block in file.blocks:
            output.write(block)
            digest.update(block)
            num_bytes += len(block)
            if progress:
                progress(file.name, num_bytes, max(num_bytes, file.num_bytes_estimate))
        output.flush()
        os.fsync(output.fileno())
    if progress:
        progress(file.name, num_bytes, num_bytes)
    return {"bytes": num_bytes, "sha256": digest.hexdigest()}


def partial_path(directory: Path, name: str) -> Path:
    """Returns where the bytes of a file are collected before it gets its name."""
    return directory / f".{name.replace('/', '.')}.partial"


def locked(directory: Path, notify: Notify | None = None) -> AbstractContextManager[Any]:
    """Returns a context in which no other process writes to a directory, created if missing."""
    directory.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(directory / LOCK_NAME)
    try:
        return lock.acquire(timeout=0)
    except filelock.Timeout:
        if notify:
            notify(f"another process is writing to {directory}; waiting for it to finish")
        return lock.acquire()


def format_rows(
    prefixes: Sequence[bytes],
    values: NDArray[Any],
    *,
    decimals: int,
    separator: bytes = b",",
    strip_zeros: bool = False,
    missing: bytes = b"",
) -> bytes:
    """Returns a line for each row: its prefix, then the separator and the value of each column.

    The digits of all values are formatted at once. One by one, the hundred million values of a
    synthetic file would take minutes; this takes seconds.

    Args:
        prefixes: The beginning of each line; after b"" there is no separator.
        values: Finite numbers, or NaN, shape (rows, columns); rounded to `decimals`, half to even.
        decimals: Digits after the point; 0 writes integers.
        separator: One byte.
        strip_zeros: Whether to omit trailing zeros of a fraction, and a point at the end.
        missing: What stands for NaN.

    Raises:
        ValueError: A value is too large for 32 bits at this number of decimals.
    """
    absent = np.isnan(values)
    scaled = np.rint(np.abs(np.where(absent, 0, values)).astype(np.float64) * 10**decimals)
    if scaled.size and scaled.max() > MAX_SCALED:
        raise ValueError(f"{np.nanmax(np.abs(values))} is too large for {decimals} decimals")
    left = scaled.astype(np.uint32)
    num_digits = max(decimals + 1, len(str(int(left.max(initial=0)))))
    # A field: separator, sign, digits with the point among them; `shown` marks the visible ones.
    width = 2 + num_digits + (decimals > 0)
    text = np.empty((*left.shape, max(width, 1 + len(missing))), np.uint8)
    shown = np.zeros(text.shape, bool)
    text[:, :, :2] = list(separator + b"-")
    shown[:, :, 0], shown[:, :, 1] = True, (values < 0) & (left > 0)
    fraction = np.full(left.shape, not strip_zeros)
    for exponent in range(num_digits):
        position = width - 1 - exponent - (0 < decimals <= exponent)
        if exponent == decimals > 0:
            text[:, :, position + 1], shown[:, :, position + 1] = ord("."), fraction
        is_left = left > 0
        left, digit = np.divmod(left, np.uint32(10))
        text[:, :, position] = digit + ord("0")
        if exponent < decimals:
            fraction |= digit != 0
        shown[:, :, position] = (
            fraction if exponent < decimals else is_left | (exponent == decimals)
        )
    text[absent, 1 : 1 + len(missing)] = list(missing)
    shown[absent, 1:] = np.arange(1, text.shape[2]) <= len(missing)
    rows = zip(prefixes, text, shown, strict=True)
    return b"".join(
        prefix + row[mask].tobytes()[not prefix :] + b"\n" for prefix, row, mask in rows
    )


def write_cases(
    features: Sequence[str],
    types: Sequence[str],
    cases: Sequence[tuple[int, int]],
    values: Callable[[int, int], NDArray[Any]],
    *,
    decimals: int,
    rows_per_block: int,
) -> Iterator[bytes]:
    """Yields a table of tumor cases, as `candle_p1.data.cases` reads it: the header, then rows.

    `cases` has each row's patient number and index of the type, and `values` returns the values for
    such a pair, shape (features,). `rows_per_block` of them are in memory at a time.
    """
    yield ",".join([*LAYOUT.text_columns, *features]).encode() + b"\n"
    for start in range(0, len(cases), rows_per_block):
        block = cases[start : start + rows_per_block]
        prefixes = [
            f"TCGA-S{patient // 10_000}-{patient % 10_000:04},{types[kind]}".encode()
            for patient, kind in block
        ]
        rows = np.stack([values(patient, kind) for patient, kind in block])
        yield format_rows(prefixes, rows, decimals=decimals, strip_zeros=True)
