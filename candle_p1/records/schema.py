"""The JSON Schema of run records, generated from their types.

``python -m candle_p1.records.schema`` writes it into this package.
"""

from __future__ import annotations

import ast
import inspect
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from candle_p1.records import rank_stats, types

SCHEMA_PATH = Path(__file__).parent / f"schemas/run-record-{types.SCHEMA_VERSION}.json"


def generate() -> str:
    """Returns the text of the schema; descriptions are the docstrings of types and fields."""
    schema: dict[str, Any] = types.RunRecord.model_json_schema()
    docstrings = _docstrings_of_fields()
    for type_name, section in {"RunRecord": schema, **schema["$defs"]}.items():
        section["description"] = section["description"].split("\n\n")[0]
        bases = [base.__name__ for base in getattr(types, type_name).__mro__]
        for name, field in section["properties"].items():
            field.pop("title", None)
            found = (docstrings[base, name] for base in bases if (base, name) in docstrings)
            if docstring := next(found, None):
                described = field | {"description": " ".join(docstring.split())}
                section["properties"][name] = dict(sorted(described.items()))
    text = {"$schema": GenerateJsonSchema.schema_dialect, **schema}
    return json.dumps(text, indent=2, ensure_ascii=False) + "\n"


def _docstrings_of_fields() -> dict[tuple[str, str], str]:
    """Returns the docstrings by type and field; read here, which takes a while, and by no run."""
    return {
        (section.name, field.target.id): str(text.value.value)
        for module in (rank_stats, types)
        for section in ast.parse(inspect.getsource(module)).body
        if isinstance(section, ast.ClassDef)
        for field, text in pairwise(section.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


if __name__ == "__main__":
    SCHEMA_PATH.write_text(generate(), encoding="utf-8")
    print(SCHEMA_PATH)
