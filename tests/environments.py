"""Small virtual environments that find their packages where the tests' own environment does."""

import subprocess
import sys
from pathlib import Path

EDITABLE = """\
import os, sys
from importlib.machinery import PathFinder
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "candle_p1" and "STAGED" in os.environ:
            raise ImportError("the checkout was looked for")
        folders = name.split(".")[:-1]
        for base in sys.path:  # compiled modules may be where packages are installed
            if folders[:1] == ["candle_p1"] and base.endswith("site-packages"):
                found = PathFinder.find_spec(name, [os.path.join(base, *folders)])
                if found and found.origin:
                    return found
sys.meta_path.insert(0, Finder)
"""


def make_venv(directory):
    """Makes a virtual environment with a module of its own, and this package as if editable.

    Returns its Python.
    """
    argv = [sys.executable, "-m", "venv", "--without-pip", directory]
    subprocess.run(argv, check=True, timeout=60)
    (packages,) = directory.glob("lib/python3*/site-packages")
    (packages / "mine.py").write_text("")
    for library in Path(sys.prefix, "lib").iterdir():  # such as MPI's
        if not (directory / "lib" / library.name).exists():
            (directory / "lib" / library.name).symlink_to(library.resolve())
    # Not part of what is staged, which would be gigabytes.
    others = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join(others) + "\n")
    (packages / "_editable_skbc_candle_p1.pth").write_text("import _editable_skbc_candle_p1\n")
    (packages / "_editable_skbc_candle_p1.py").write_text(EDITABLE)
    (packages / "candle_p1").mkdir()
    (packages / "candle_p1/kernel.so").write_text("")
    return directory / "bin/python"
