"""The directory in which data sets are kept."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

DATA_DIRECTORY_VARIABLE = "CANDLE_DATA_DIR"


def data_directory() -> Path:
    """Returns $CANDLE_DATA_DIR or, if that is not set, the user's cache directory."""
    named = os.environ.get(DATA_DIRECTORY_VARIABLE)
    return Path(named).absolute() if named else platformdirs.user_cache_path("candle_p1")
