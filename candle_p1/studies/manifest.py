"""What a study's directory says about itself: which study it is of, and what was chosen about it.

``study.json`` is written when a study starts, so that its directory can be asked how far it is. It
does not hold the plan, which follows from the study's file, nor what became of the runs.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from candle_p1.errors import RecordError, SetupError
from candle_p1.files import write_atomically
from candle_p1.studies.library import find_study, studies_directory
from candle_p1.studies.plan import Choice, Plan, make_plan

if TYPE_CHECKING:
    from pathlib import Path

FILE_NAME = "study.json"


def keep(plan: Plan) -> None:
    """Writes ``study.json`` into the study's directory, which is made if need be.

    Raises:
        SetupError: It cannot be written.
    """
    path = plan.study.path.resolve()
    name = plan.study.name if path.parent == studies_directory() else str(path)
    kept = {"study": name} | asdict(plan.choice) | {"size": plan.size}
    try:
        plan.directory.mkdir(parents=True, exist_ok=True)
        write_atomically(plan.directory / FILE_NAME, json.dumps(kept, indent=2) + "\n")
    except OSError as error:
        raise SetupError(
            f"{plan.directory} cannot be written ({error.strerror}): name another directory for"
            " results"
        ) from error


def read_kept(directory: Path) -> Plan:
    """Returns the plan of a study that was started in a directory.

    Raises:
        RecordError: It holds no study.
        CandleError: The study's file is no longer there, or wrong.
    """
    path = directory / FILE_NAME
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        study = find_study(kept.pop("study"))
        choice = Choice(**kept)
    except FileNotFoundError as error:
        raise RecordError(
            f"{directory} holds no study: {FILE_NAME} is missing, which candle-p1 study run writes"
        ) from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RecordError(f"{path}: cannot read it: {error}") from error
    return make_plan(study, choice, directory.parent, directory.resolve())
