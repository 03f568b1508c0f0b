"""What a checkpoint says about itself: manifest.json.

The first line of the file has the digest of all that follows it, so that a changed byte is noticed
wherever it is.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from candle_p1.errors import CheckpointError
from candle_p1.files import read_regular_bytes
from candle_p1.records.types import Position

MANIFEST = "manifest.json"
RANKS_FILE, RANK_PREFIX = "ranks.safetensors", "rank-"
"""The file of what is each rank's own, and what the names of its arrays begin with."""
VERSION = 2
NAME = re.compile(r"epoch-(\d{4,})-step-(\d{6,})(?:-(\d+))?")
"""The names of checkpoints; the last number tells those of the same position apart."""
FIRST_LINE = '{{"xxh3_128": "{}",\n'


class OtherVersionError(CheckpointError):
    """A checkpoint is intact as far as is known, but has a format that this release cannot read."""


def name_of(position: Position) -> str:
    """Returns the name of a checkpoint of a position."""
    return f"epoch-{position.epoch:04d}-step-{position.step:06d}"


def name_order(name: str) -> tuple[int, ...]:
    """Returns what sorts names of checkpoints by position."""
    match = NAME.fullmatch(name)
    return tuple(int(number or 1) for number in match.groups()) if match else ()


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(_Entry):
    """A file of a checkpoint: its size and digest."""

    bytes: int = Field(ge=0)
    xxh3_128: str = Field(pattern="^[0-9a-f]{32}$")


class EarlierEntry(_Entry):
    """Another checkpoint of the same run: the name of its directory, and its number."""

    name: Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
    number: int


class CheckpointManifest(_Entry):
    """The content of manifest.json.

    If this checkpoint is damaged, the first of the earlier ones is the one to resume from.
    """

    format: Literal["candle-p1 checkpoint"] = "candle-p1 checkpoint"
    version: int = VERSION
    created: str  # in UTC, as ISO 8601 with microseconds
    position: Position
    number: int = Field(ge=1)  # within the run, in the order of saving
    best: bool  # so far
    num_ranks: int = Field(ge=1)
    earlier: list[EarlierEntry]  # that the run then had, the newest first
    facts: dict[str, Any]  # what else the state consists of
    files: dict[Annotated[str, Field(pattern=r"^\w[\w.-]*$")], FileEntry]  # all but this one

    def to_bytes(self) -> bytes:
        """Returns the content of the file; TypeError if the facts hold what is not JSON."""
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
            OtherVersionError: It has another version of the format.
            CheckpointError: It is missing or damaged.
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
        if first + newline != FIRST_LINE.format(xxhash.xxh3_128_hexdigest(rest)).encode():
            raise CheckpointError(f"{path} is damaged: its content does not have its digest")
        if version != VERSION:
            raise OtherVersionError(
                f"{path} has version {version!r} of the format, and this release reads version"
                f" {VERSION}: continue the run with the release that wrote it, or begin a new one"
                " with --ckpt_restart_mode off"
            )
        del values["xxh3_128"]
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            raise CheckpointError(f"{path} is damaged: {where}: {problem['msg']}") from None
