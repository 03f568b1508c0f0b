"""The manifest beside the files of a synthetic data set, which says what they are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from candle_p1.files import write_atomically

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST_NAME = "synthetic.json"


@dataclass(frozen=True)
class Manifest:
    """What a data set is, as ``synthetic.json`` beside its files says it.

    Attributes:
        directory: Where it is.
        made_of: Name, size, seed and version of the recipe.
        files: Bytes and SHA-256 of each file, by name.
    """

    directory: Path
    made_of: dict[str, Any]
    files: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """Returns a directory's manifest; None if there is none, or it cannot be read."""
        try:
            content = json.loads((directory / MANIFEST_NAME).read_text(encoding="utf-8"))
            return cls(directory, dict(content["made_of"]), dict(content["files"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def fits(self, name: str) -> bool:
        """Returns whether a file is there and has the size it was made with."""
        try:
            return bool((self.directory / name).stat().st_size == self.files[name]["bytes"])
        except (OSError, KeyError, TypeError):
            return False

    @property
    def whole(self) -> bool:
        """Whether all files fit."""
        return all(self.fits(name) for name in self.files)

    def write(self) -> None:
        """Writes it, atomically."""
        content = {"synthetic": True, "made_of": self.made_of, "files": self.files}
        write_atomically(self.directory / MANIFEST_NAME, json.dumps(content, indent=2) + "\n")


def synthetic_facts(path: Path) -> dict[str, Any] | None:
    """Returns bytes and SHA-256 of a file that was made here; None of any other file.

    What became of the other files of its data set does not matter: it stays synthetic.
    """
    manifest = Manifest.read(path.parent)
    return manifest.files.get(path.name) if manifest and manifest.fits(path.name) else None
