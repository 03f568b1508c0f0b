"""Reading the kernel's small files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from candle_p1.instrument.power.source import SensorError

if TYPE_CHECKING:
    from pathlib import Path

MAX_BYTES = 256


def read_line(file: Path | str) -> str:
    """Returns the first line or lines of a file, ten times as fast as Path.read_text.

    Raises:
        SensorError: The file cannot be read; the cause is the OSError.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            return os.read(descriptor, MAX_BYTES).decode().strip()
        finally:
            os.close(descriptor)
    except (OSError, UnicodeDecodeError) as error:
        raise SensorError(f"{file}: {getattr(error, 'strerror', error)}") from error
