"""The manifest that lies beside the files of a synthetic data set and describes them."""

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
    """The content of ``synthetic.json``.

    Attributes:
        directory: Where the data set is.
        made_of: The recipe's name and version, the size and the seed.
        files: The size and SHA-256 of each file, by name.
    """

    directory: Path
    made_of: dict[str, Any]
    files: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """Returns a directory's manifest; None if it is missing or cannot be read."""
        path = directory / MANIFEST_NAME
        if not path.is_file():  # reading a pipe would never end
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return cls(directory, dict(content["made_of"]), dict(content["files"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def matches(self, name: str) -> bool:
        """Returns whether a file exists and still has the size it was made with."""
        try:
            return bool((self.directory / name).stat().st_size == self.files[name]["bytes"])
        except (OSError, KeyError, TypeError):
            return False

    @property
    def whole(self) -> bool:
        """Whether all files exist, with their sizes."""
        return all(self.matches(name) for name in self.files)

    def write(self) -> None:
        """Writes the manifest, atomically."""
        content = {"synthetic": True, "made_of": self.made_of, "files": self.files}
        write_atomically(self.directory / MANIFEST_NAME, json.dumps(content, indent=2) + "\n")


def synthetic_facts(path: Path) -> dict[str, Any] | None:
    """Returns the size and SHA-256 of a synthetic file; None for any other file.

    The file counts as synthetic even if the rest of its data set is gone.
    """
    manifest = Manifest.read(path.parent)
    return manifest.files.get(path.name) if manifest and manifest.matches(path.name) else None
