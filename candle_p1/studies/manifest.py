"""A study directory's manifest: which study it holds, and what the user chose about it.

``study.json`` is written when a study starts, so that the directory alone is enough to tell its
progress. It holds neither the plan, which follows from the study file, nor the results.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from candle_p1.errors import RecordError, SetupError
from candle_p1.files import read_regular_file, write_atomically
from candle_p1.studies.plan import Choice, Plan, make_plan
from candle_p1.studies.study_file import find_study, studies_directory

if TYPE_CHECKING:
    from pathlib import Path

FILE_NAME = "study.json"


def write_manifest(plan: Plan) -> None:
    """Writes ``study.json`` into the study's directory, which is created if needed.

    Raises:
        SetupError: It cannot be written.
    """
    path = plan.study.path.resolve()
    name = plan.study.name if path.parent == studies_directory() else str(path)
    content = {"study": name} | asdict(plan.choice) | {"size": plan.size}
    try:
        plan.directory.mkdir(parents=True, exist_ok=True)
        write_atomically(plan.directory / FILE_NAME, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise SetupError(
            f"cannot write to {plan.directory} ({error.strerror}): choose another directory for"
            " the results"
        ) from error


def read_plan(directory: Path) -> Plan:
    """Returns the plan of the study whose manifest is in a directory.

    Raises:
        RecordError: There is no valid manifest.
        CandleError: The study file no longer exists, or is wrong.
    """
    path = directory / FILE_NAME
    try:
        content = json.loads(read_regular_file(path))
        study = find_study(content.pop("study"))
        choice = Choice(**content)
    except FileNotFoundError as error:
        raise RecordError(
            f"{directory} holds no study: it has no {FILE_NAME}, which candle-p1 study run writes"
        ) from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        problem = getattr(error, "strerror", None) or error
        raise RecordError(f"{path}: cannot read it: {problem}") from error
    return make_plan(study, choice, directory.parent, directory.resolve())
