"""The directory of data sets, and the manifest that describes one of synthetic files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs

from candle_p1.errors import DataError, SetupError
from candle_p1.files import expand_user, files_at, read_json, write_atomically

DATA_DIRECTORY_VARIABLE = "CANDLE_DATA_DIR"


def data_directory() -> Path:
    """Returns $CANDLE_DATA_DIR or, if that is not set, the user's cache directory.

    Raises:
        SetupError: This user has none.
    """
    if named := os.environ.get(DATA_DIRECTORY_VARIABLE):
        return Path(named).absolute()
    if not (expand_user("~").is_absolute() or os.environ.get("XDG_CACHE_HOME")):
        raise SetupError(
            "data would be kept in the home directory, but $HOME is not set, and the password file"
            f" has no user {os.getuid()}: set {DATA_DIRECTORY_VARIABLE}"
        )
    return platformdirs.user_cache_path("candle_p1")


@contextmanager
def storing(path: Path, remedy: str, what: str = "the files cannot be stored") -> Iterator[None]:
    """Converts errors of the file system into a DataError; `remedy` says what the user can do."""
    try:
        yield
    except (OSError, NotImplementedError) as error:  # the latter: no locks on this file system
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{what} ({reason}): {remedy}", path) from error


MANIFEST_NAME = "synthetic.json"
IMPORT_NAME = "import.json"
"""The description of files made from somebody's tables; see `candle_p1.datasets.importing`."""


class Quantity(NamedTuple):
    """A column of numbers in responses: what it means, and whether values may mean that."""

    meaning: str
    is_plausible: Callable[[Any], bool]


@dataclass(frozen=True)
class Importable:
    """How tables of others become a benchmark's files: `candle-p1 data import`.

    They are tables of samples for training and testing or, with `features`, responses to which
    tables of features are joined by name.

    Attributes:
        needs_labels: Whether samples need classes.
        class_parameter: The parameter that is their number; None: it follows from the files.
        features: The column of the responses with the names in a table of features, by role.
        reserved: The same for lists of what is reserved for testing.
        quantities: The columns of numbers in the responses.
        flags: By column of names, the flag that chooses tables of features, and its value if there
            are none.
        pairs: Roles of tables that are used together; the first names them in the flag.
        levels: The columns of names whose tables --log2 is for, and in which "." becomes ":".
    """

    needs_labels: bool = False
    class_parameter: str | None = None
    features: Mapping[str, str] = field(default_factory=dict)
    reserved: Mapping[str, str] = field(default_factory=dict)
    quantities: Mapping[str, Quantity] = field(default_factory=dict)
    flags: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    pairs: Sequence[tuple[str, str]] = ()
    levels: Sequence[str] = ()


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
        try:
            content = read_json(directory / MANIFEST_NAME)
            manifest = cls(directory, dict(content["made_of"]), dict(content["files"]))
            made_of, files = manifest.made_of, manifest.files.values()
            types = [type(made_of[key]) for key in ("name", "size", "seed", "version")]
            is_sound = types == [str, str, int, int] and all(
                (type(facts["bytes"]), type(facts["sha256"])) == (int, str) for facts in files
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return manifest if is_sound else None

    def matches(self, name: str) -> bool:
        """Returns whether a file exists and still has the size it was made with."""
        try:
            return bool((self.directory / name).stat().st_size == self.files[name]["bytes"])
        except (OSError, KeyError, ValueError):  # the last: a name with a null byte
            return False

    @property
    def whole(self) -> bool:
        """Whether all files exist, with their sizes."""
        return all(self.matches(name) for name in self.files)

    def write(self) -> None:
        """Writes the manifest, atomically."""
        content = {"synthetic": True, "made_of": self.made_of, "files": self.files}
        write_atomically(self.directory / MANIFEST_NAME, json.dumps(content, indent=2) + "\n")


def imported_facts(directory: Path) -> dict[str, Any] | None:
    """Returns what ``import.json`` says of a directory's files; None if there is none.

    Raises:
        DataError: It cannot be read.
    """
    path = directory / IMPORT_NAME
    try:
        facts = dict(read_json(path))
        kinds = {"benchmark": str, "parameters": dict, "options": dict}
        if all(isinstance(facts[name], kind) for name, kind in kinds.items()):
            return facts
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise DataError("it does not describe imported files: repeat the import, or remove it", path)


def synthetic_facts(path: Path) -> dict[str, Any] | None:
    """Returns the size and SHA-256 of a synthetic file or directory; None for any other.

    The file counts as synthetic even if the rest of its data set is gone, and a directory if any of
    its files is synthetic; its SHA-256 is None if not all of them are.
    """
    manifest = Manifest.read(path.parent)
    if manifest is None:
        return None
    if not path.is_dir():
        return manifest.files.get(path.name) if manifest.matches(path.name) else None
    found = {each.name: f"{path.name}/{each.name}" for each in files_at(path)}
    made = {each: manifest.files[name] for each, name in found.items() if manifest.matches(name)}
    if not made:
        return None
    digests = {each: facts["sha256"] for each, facts in made.items()}
    return {
        "bytes": sum(facts["bytes"] for facts in made.values()),
        "sha256": sha256_of_all(digests) if made.keys() == found.keys() else None,
    }


def sha256_of_all(digests: Mapping[str, str]) -> str:
    """Returns the SHA-256 of a directory, that of what ``sha256sum *`` prints in it.

    `digests` are those of its files, by name.
    """
    lines = (f"{digests[name]}  {name}\n" for name in sorted(digests))
    return hashlib.sha256("".join(lines).encode()).hexdigest()
