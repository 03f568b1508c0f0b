"""Which files of a benchmark exist, and what is known about them without reading them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from candle_p1.data.directory import data_directory
from candle_p1.data.manifest import Manifest, synthetic_facts
from candle_p1.datasets.registry import expected_file
from candle_p1.datasets.storing import partial_path
from candle_p1.files import files_at

if TYPE_CHECKING:
    from pathlib import Path

    from candle_p1.datasets.synthetic import SyntheticRecipe


def file_status(benchmark: str, name: str, directory: Path) -> dict[str, Any]:
    """Returns what is known about a benchmark's file, or directory of files, in a directory.

    Returns:
        name: CANDLE's name for it.
        path: Where it is expected.
        state: "absent", "real", "synthetic", or "wrong size" if it cannot be the expected file.
        file_bytes: Its size; None if it is absent.
        partial_bytes: The size of an interrupted download; 0 if there is none.
        sha256: The checksum it must have, or was generated with; None if none is known.
        sha256_source: "published", "recorded" at the first download, "synthetic", or None.

    Raises:
        DataError: The directory's record of downloads cannot be read.
    """
    path, partial = directory / name, partial_path(directory, name)
    exists = path.is_file() or path.is_dir()
    file_bytes = sum(each.stat().st_size for each in files_at(path)) if exists else None
    expected, made = expected_file(benchmark, name, directory), synthetic_facts(path)
    state = "absent" if file_bytes is None else "real"
    sha256, source = None, None
    if made:
        state, sha256, source = "synthetic", made["sha256"], "synthetic"
    elif expected:
        sha256, source = expected.sha256, "published" if expected.published else "recorded"
        if file_bytes not in (None, expected.file_bytes):
            state = "wrong size"
    return {
        "name": name,
        "path": str(path),
        "state": state,
        "file_bytes": file_bytes,
        "partial_bytes": partial.stat().st_size if partial.is_file() else 0,
        "sha256": sha256,
        "sha256_source": source,
    }


def synthetic_sets(recipe: SyntheticRecipe) -> list[Manifest]:
    """Returns a recipe's data sets in the data directory, which runs have generated."""
    found = sorted((data_directory() / "synthetic").glob(f"{recipe.name}-*"))
    manifests = [Manifest.read(directory) for directory in found]
    return [each for each in manifests if each and each.made_of.get("name") == recipe.name]
