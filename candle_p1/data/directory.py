"""Where data sets are kept."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

DATA_DIRECTORY_VARIABLE = "CANDLE_DATA_DIR"


def data_directory() -> Path:
    """Returns where data sets are kept: $CANDLE_DATA_DIR, else the user's cache directory."""
    named = os.environ.get(DATA_DIRECTORY_VARIABLE)
    return Path(named).absolute() if named else platformdirs.user_cache_path("candle_p1")
