"""The directory in which data sets are kept."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from candle_p1.errors import SetupError
from candle_p1.files import expand_user

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
