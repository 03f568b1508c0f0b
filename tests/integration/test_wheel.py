"""The wheel in an environment of its own, outside the checkout, and what `make wheel` lists."""

import json
import re
import shutil
import sys
import zipfile
from importlib.metadata import version
from importlib.util import find_spec

import pytest

from tests.conftest import ROOT
from tests.records import read_record

pytestmark = pytest.mark.extended

NO_INDEX = re.compile(".*(?:error sending request|Failed to fetch|network was disabled).*")
SMALL = "--conv 8 20 1 --pool 10 --dense 16 --train_steps 2 --val_steps 1 --test_steps 1"
EXTRA, PINS = (
    ("tensorflow-cpu", "constraints.txt")
    if find_spec("tensorflow")
    else ("jax", "constraints-jax.txt")
)


@pytest.fixture
def uv():
    """The path of uv."""
    program = shutil.which("uv") or ROOT / ".tools/bin/uv"
    if not shutil.which(program):
        pytest.skip("needs uv: make uv")
    return program


@pytest.fixture
def online(execute, tmp_path):
    """Runs a command, which must succeed; skips where it reaches no package index.

    The environment that is made, which may be large, is removed.
    """

    def online(*argv):
        code, output = execute(argv, 900)
        if code and (found := NO_INDEX.search(output)):
            pytest.skip(f"no package index: {found[0].strip()}")
        assert code == 0, output

    yield online
    shutil.rmtree(tmp_path / "env", ignore_errors=True)


def test_the_wheel_trains_where_nothing_else_is_installed(uv, online, execute, tmp_path):
    place, python, dist = tmp_path / "place", tmp_path / "env/bin/python", tmp_path / "dist"
    place.mkdir()
    online(
        "make", "-C", ROOT, "--old-file=setup", "wheel", f"DIST={dist}", f"BUILD={tmp_path}/build"
    )
    (wheel,) = dist.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("CITATION.cff", "licenses/LICENSE"):
        assert f"candle_p1-{version('candle-p1')}.dist-info/{name}" in names
    check_dependencies(json.loads((dist / "candle_p1.spdx.json").read_text()))

    def install(what):
        online(uv, "pip", "install", "--python", python, "--constraint", ROOT / PINS, what)

    def candle_p1(*argv):
        return execute([tmp_path / "env/bin/candle-p1", *argv], cwd=place)

    online(uv, "venv", "--python", sys.executable, tmp_path / "env")
    install(wheel)
    code, output = candle_p1("data", "info", "--json", place / "info.json")
    assert code == 0, output
    found = json.loads((place / "info.json").read_text())["benchmarks"]
    assert [each["name"] for each in found] == ["nt3", "p1b1", "p1b2", "p1b3"]
    train = ("run", "nt3", "--np", 1, "--epochs", 1, "--output_dir", "out", "--", *SMALL.split())
    code, output = candle_p1(*train)
    assert code == 2
    assert f"candle-p1[{EXTRA}]" in output.splitlines()[-1]

    install(f"{wheel}[{EXTRA}]")
    code, output = candle_p1(*train, "--run_id", "trained")
    assert code == 0, output
    record = read_record(place / "out/EXP000/trained/run.json")
    assert (record["benchmark"], record["status"], record["num_ranks"]) == ("nt3", "ok", 1)
    assert "horovod" not in record["environment"]["packages"]
    assert str(ROOT) not in output


def check_dependencies(document):
    packages = {each["SPDXID"]: each for each in document["packages"]}
    of_numpy = packages["SPDXRef-numpy"]
    assert of_numpy["externalRefs"][0]["referenceLocator"] == f"pkg:pypi/numpy@{version('numpy')}"
    assert packages["SPDXRef-candle-p1"]["licenseDeclared"] == "BSD-3-Clause"
    links = {tuple(each.values()) for each in document["relationships"]}
    assert ("SPDXRef-DOCUMENT", "DESCRIBES", "SPDXRef-candle-p1") in links
    assert ("SPDXRef-candle-p1", "DEPENDS_ON", "SPDXRef-numpy") in links
    assert (f"SPDXRef-{EXTRA}", "OPTIONAL_DEPENDENCY_OF", "SPDXRef-candle-p1") in links
    named = {name for first, _, second in links for name in (first, second)}
    assert named - {"SPDXRef-DOCUMENT"} == packages.keys()  # none is missing, none stands alone
