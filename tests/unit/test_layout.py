from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import candle_p1

PACKAGE = Path(candle_p1.__file__).parent
MAX_LOOSE_MODULES = 8


def test_few_modules_are_at_the_top_of_the_package():
    loose = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert len(loose) <= MAX_LOOSE_MODULES, sorted(loose)


def test_class_names_are_unique_in_the_package():
    places = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_every_package_has_tests_in_a_folder_of_its_name():
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"ops"}
    folders = {path.name for path in Path(__file__).parent.iterdir() if path.is_dir()}
    assert packages <= folders
