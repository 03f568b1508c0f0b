"""What a checkpoint says about itself: manifest.json.

The first line of the file has the digest of all that follows it, so that a changed byte is noticed
wherever it is.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from candle_p1.checkpoints.layout import TYPE_NAMES, ArraySpec
from candle_p1.errors import CheckpointError
from candle_p1.files import read_regular_bytes

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = "manifest.json"
RANKS_FILE = "ranks.safetensors"
VERSION = 1
NAME = re.compile(r"epoch-(\d{4,})-step-(\d{6,})(?:-(\d+))?")
"""The names of checkpoints; the last number tells those of the same position apart."""
FileName = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
FIRST_LINE = '{{"xxh3_128": "{}",\n'


@dataclass(frozen=True, order=True)
class Position:
    """How far training has come.

    Attributes:
        epoch: The epochs that are completed.
        step: The steps that are completed in the next one; 0 at the end of an epoch.
    """

    epoch: int
    step: int

    @property
    def name(self) -> str:
        """The name of a checkpoint of this position."""
        return f"epoch-{self.epoch:04d}-step-{self.step:06d}"

    def __str__(self) -> str:
        return f"epoch {self.epoch}, step {self.step}"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(_Part):
    """A file of a checkpoint: its size and digest."""

    bytes: int = Field(ge=0)
    xxh3_128: str = Field(pattern="^[0-9a-f]{32}$")


class PieceEntry(_Part):
    """Rows of an array: in which file, under which name, and which (from, up to)."""

    file: FileName
    key: str
    rows: tuple[int, int]


class ArrayEntry(_Part):
    """An array: the type of its elements, its shape, and where its rows are."""

    dtype: Literal[tuple(TYPE_NAMES)]  # type: ignore[valid-type]
    shape: tuple[int, ...]
    pieces: list[PieceEntry]

    @property
    def spec(self) -> ArraySpec:
        """Its type and shape."""
        return ArraySpec(self.dtype, self.shape)


class PositionEntry(_Part):
    """How far training had come: completed epochs, and steps of the next one."""

    epoch: int = Field(ge=0)
    step: int = Field(ge=0)


class EarlierEntry(_Part):
    """Another checkpoint of the same run: the name of its directory, and its number."""

    name: str
    number: int


class CheckpointManifest(_Part):
    """The content of manifest.json.

    Attributes:
        format: Names the format.
        version: The version of the format.
        created: When it was saved, in UTC, as ISO 8601 with microseconds.
        position: How far training had come.
        number: Its number within the run, from 1, in the order of saving.
        best: Whether it was the best so far.
        num_ranks: The number of ranks that trained.
        before: The other checkpoints that the run then had, the newest first. If this one is
            damaged, the first of them is the one to go on from.
        facts: What else the state consists of.
        files: All files but this one, by name.
        arrays: The arrays of the state that all ranks share, by name.
    """

    format: Literal["candle-p1 checkpoint"] = "candle-p1 checkpoint"
    version: int = VERSION
    created: str
    position: PositionEntry
    number: int = Field(ge=1)
    best: bool
    num_ranks: int = Field(ge=1)
    before: list[EarlierEntry]
    facts: dict[str, Any]
    files: dict[FileName, FileEntry]
    arrays: dict[str, ArrayEntry]

    def to_bytes(self) -> bytes:
        """Returns the content of the file.

        Raises:
            TypeError: The facts hold something that is not JSON.
        """
        # Numbers that are not finite are written as Python's json module reads them, because they
        # are in the history of runs that may lose their loss.
        text = json.dumps(self.model_dump(), indent=1)
        rest = text.removeprefix("{\n") + "\n"
        digest = xxhash.xxh3_128_hexdigest(rest.encode())
        return (FIRST_LINE.format(digest) + rest).encode()

    @classmethod
    def read(cls, directory: Path) -> CheckpointManifest:
        """Returns the manifest of a checkpoint.

        Raises:
            CheckpointError: It is missing, damaged, or of a version that is not known.
        """
        path = directory / MANIFEST
        try:
            content = read_regular_bytes(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        first, newline, rest = content.partition(b"\n")
        try:
            values = json.loads(content)
            version = values["version"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise CheckpointError(f"{path} is damaged: it is not the JSON of a manifest") from None
        if version != VERSION:
            raise CheckpointError(
                f"{path} has the format version {version!r}; this release reads {VERSION}. Use the"
                " release that wrote it"
            )
        if first + newline != FIRST_LINE.format(xxhash.xxh3_128_hexdigest(rest)).encode():
            raise CheckpointError(f"{path} is damaged: its content does not have its digest")
        del values["xxh3_128"]
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            raise CheckpointError(f"{path} is damaged: {where}: {problem['msg']}") from None
