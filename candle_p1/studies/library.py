"""Finding studies: by name among those of the checkout, or by the path of a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from candle_p1.errors import ParameterError, did_you_mean
from candle_p1.studies.study_file import read_study

if TYPE_CHECKING:
    from candle_p1.studies.study import Study


def find_study(name: str) -> Study:
    """Returns a study by its name in ``common/studies/``, or by the path of its file.

    Raises:
        ParameterError: There is none, or its file is wrong.
    """
    if name.endswith(".toml"):
        path = Path(name).expanduser()
        if not path.is_file():
            raise ParameterError(f"study {name}: there is no such file")
        return read_study(path)
    path = studies_directory() / f"{name}.toml"
    if path.is_file():
        return read_study(path)
    known = list_studies()
    raise ParameterError(
        f"there is no study {name!r}{did_you_mean(name, known)}; known here:"
        f" {', '.join(known) or 'none'}. Another one is a file: name its path, FILE.toml"
    )


def list_studies() -> list[str]:
    """Returns the names of the studies of this checkout."""
    return sorted(path.stem for path in studies_directory().glob("*.toml"))


def studies_directory() -> Path:
    """Returns where the checkout has its studies; an installed package alone has none."""
    return Path(__file__).resolve().parent.parent.parent / "common/studies"
