"""The SHA-256 that a file must have: published, or recorded at its first download.

Few of CANDLE's files have a published checksum; these are in ``registry.json``. For the others, the
first download is recorded in ``fetched.json`` beside them, and later ones into that directory must
match.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from candle_p1.errors import DataError
from candle_p1.files import read_json, write_atomically

RECORD_NAME = "fetched.json"


@dataclass(frozen=True)
class Expected:
    """The properties that a file must have.

    Attributes:
        sha256: The SHA-256 of its bytes.
        file_bytes: Its size.
        published: Whether the checksum is published; else it was recorded at the first download.
        source: Where the checksum comes from, for messages.
    """

    sha256: str
    file_bytes: int
    published: bool
    source: str


def expected_file(benchmark: str, name: str, directory: Path) -> Expected | None:
    """Returns the properties a file must have; None if no checksum is published or recorded.

    Raises:
        DataError: The directory's record of downloads cannot be read.
    """
    published = published_sums().get(benchmark, {}).get(name)
    if published:
        return Expected(published["sha256"], published["bytes"], True, "the published checksum")
    recorded = _recorded(directory).get(name)
    if recorded:
        source = f"the checksum recorded at the first download, {recorded['time']}"
        return Expected(recorded["sha256"], recorded["bytes"], False, source)
    return None


def record_download(directory: Path, name: str, facts: dict[str, Any]) -> None:
    """Records a download; `facts` has at least sha256, bytes and time.

    Raises:
        DataError: The directory's record of downloads cannot be read.
        OSError: It cannot be written.
    """
    files = _recorded(directory) | {name: facts}
    text = json.dumps({"files": files}, indent=2, sort_keys=True)
    write_atomically(directory / RECORD_NAME, text + "\n")


def published_sums() -> dict[str, dict[str, dict[str, Any]]]:
    """Returns sha256 and bytes by benchmark and file name."""
    return dict(read_json(Path(__file__).with_name("registry.json")))


def _recorded(directory: Path) -> dict[str, dict[str, Any]]:
    path = directory / RECORD_NAME
    try:
        files: dict[str, dict[str, Any]] = read_json(path)["files"]
        if all(_is_complete(facts) for facts in files.values()):
            return files
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    raise DataError("cannot be read; move it away, together with the files it describes", path)


def _is_complete(facts: dict[str, Any]) -> bool:
    return (
        re.fullmatch("[0-9a-f]{64}", facts["sha256"]) is not None
        and isinstance(facts["bytes"], int)
        and isinstance(facts["time"], str)
    )
