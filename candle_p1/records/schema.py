"""The JSON Schema of run records, generated from their types.

``python -m candle_p1.records.schema`` writes it into this package.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

from pydantic.json_schema import GenerateJsonSchema

from candle_p1.records import spread, types
from candle_p1.records.spread import Section

FIELD = re.compile(r"^    (\w+): (.*(?:\n        .*)*)", re.MULTILINE)
SCHEMA_PATH = Path(__file__).parent / f"schemas/run-record-{types.SCHEMA_VERSION}.json"


def generate() -> str:
    """Returns the text of the schema; descriptions come from the types' docstrings."""
    schema = types.RunRecord.model_json_schema()
    for name, part in [("RunRecord", schema), *schema["$defs"].items()]:
        section = getattr(types, name, None) or getattr(spread, name)
        described = _attributes(section)
        part["description"] = inspect.cleandoc(section.__doc__ or "").split("\n\n")[0]
        for key, facts in part["properties"].items():
            facts.pop("title", None)
            if key in described:
                facts["description"] = described[key]
    text = {"$schema": GenerateJsonSchema.schema_dialect, **schema}
    return json.dumps(text, indent=2, ensure_ascii=False) + "\n"


def _attributes(section: type[Section]) -> dict[str, str]:
    """Returns what the docstrings of a type and its bases say about each field."""
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if issubclass(base, Section) and base.__doc__:
            _, _, listed = inspect.cleandoc(base.__doc__).partition("Attributes:\n")
            for name, text in FIELD.findall(listed):
                found[name] = " ".join(text.split())
    return found


def main() -> None:
    """Writes the schema and prints its path."""
    SCHEMA_PATH.write_text(generate(), encoding="utf-8")
    print(SCHEMA_PATH)


if __name__ == "__main__":
    main()
