"""Where the folders of benchmarks are, and how the module of one is imported."""

from __future__ import annotations

import importlib
import os
import re
import reprlib
import sys
from pathlib import Path
from types import ModuleType

from candle_p1.errors import ParameterError, did_you_mean
from candle_p1.files import shipped

SEARCH_PATH_VARIABLE = "CANDLE_BENCHMARKS_PATH"


def find_module(name: str) -> tuple[ModuleType, str]:
    """Returns the module of a benchmark, and what messages call it.

    `name` is that of the benchmark, the path of its folder, or the name of the module. Raises
    ParameterError if there is none.
    """
    try:
        folder = _folder(name)
    except (OSError, ValueError) as error:  # too long, not allowed to look, or a NUL character
        problem = getattr(error, "strerror", None) or error
        raise ParameterError(f"benchmark {reprlib.repr(name)}: {problem}") from error
    if folder:
        return _import_from(folder), str(folder)
    if re.fullmatch(r"\w+(\.\w+)+", name):
        try:
            return importlib.import_module(name), name
        except ModuleNotFoundError as error:
            raise ParameterError(f"benchmark {name}: {error}") from error
    known = list_benchmarks()
    raise ParameterError(
        f"there is no benchmark {reprlib.repr(name)}{did_you_mean(name, known)}; known benchmarks:"
        f" {', '.join(known) or 'none'}. Give the path of a folder elsewhere, such as"
        f" ./{name[:40]}, or add its parent to ${SEARCH_PATH_VARIABLE}"
    )


def list_benchmarks() -> list[str]:
    """Returns the names of the benchmarks on the search path."""
    folders = {
        folder.name
        for base in search_path()
        if base.is_dir()
        for folder in base.iterdir()
        if (folder / f"{folder.name}.py").is_file()
    }
    return sorted(folders)


def search_path() -> list[Path]:
    """Returns the folders in which a benchmark is looked up by its name."""
    named = os.environ.get(SEARCH_PATH_VARIABLE, "")
    return [*(Path(each) for each in named.split(os.pathsep) if each), shipped("benchmarks")]


def _folder(name: str) -> Path | None:
    """Returns the folder of a benchmark; None if this may be the name of a module."""
    if os.sep in name:
        folder = Path(name).resolve()
        if not (folder / f"{folder.name}.py").is_file():
            raise ParameterError(f"{name} is not a benchmark: it has no {folder.name}.py")
        return folder
    found = (base / name for base in search_path() if (base / name / f"{name}.py").is_file())
    return next(found, None)


def _import_from(folder: Path) -> ModuleType:
    # The modules of a folder import each other by name, as they do when its script runs.
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(folder.name)
    finally:
        sys.path.remove(str(folder))
        if str(folder) not in sys.path:  # for what its functions import later
            sys.path.append(str(folder))
