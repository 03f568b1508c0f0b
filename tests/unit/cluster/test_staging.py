import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from candle_p1.cluster import staging
from candle_p1.cluster.staging import StagedEnvironment
from candle_p1.errors import SetupError
from tests.conftest import ROOT
from tests.environments import make_venv

pytestmark = pytest.mark.extended  # the archive holds a Python

PACK = """\
import sys
from pathlib import Path
from candle_p1.cluster import staging
from candle_p1.cluster.staging import StagedEnvironment
staging.ARCHIVES = sys.argv[1]
archive = StagedEnvironment.of(Path(sys.argv[2]))
archive.write()
print(archive.path)
"""
TELL = """\
import json, os, sys
import candle_p1, mine
from candle_p1.records.environment import source_commit
paths = [sys.prefix, sys.base_prefix, os.__file__, candle_p1.__file__, mine.__file__]
print(json.dumps([*paths, source_commit() is not None]))
"""


@pytest.fixture(scope="module")
def venv(tmp_path_factory):
    directory = tmp_path_factory.mktemp("env") / ".venv"
    make_venv(directory)
    return directory


@pytest.fixture(scope="module")
def archive(venv, tmp_path_factory):
    """The archive of that environment."""
    place = tmp_path_factory.mktemp("archives")
    return Path(run([venv / "bin/python", "-c", PACK, place, ROOT], PYTHONPATH=str(ROOT)).strip())


def run(argv, **variables):
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **variables}
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def unpack(archive, directory):
    command = ["bash", ROOT / "common/unpack_env.sh", archive, directory]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_python_of_an_archive_starts_where_it_is_unpacked(archive, tmp_path):
    """Also with a path that names another checkout, and without the original environment."""
    directory = tmp_path / "a node's/env"
    directory.parent.mkdir()
    done = unpack(archive, directory)
    assert done.returncode == 0, done.stderr
    libraries = f"{directory}/venv/lib:{directory}/base/lib"
    variables = {"PYTHONPATH": f"{directory}/root:{ROOT}", "LD_LIBRARY_PATH": libraries}
    told = run([directory / "venv/bin/python", "-c", TELL], STAGED="1", **variables)
    prefix, base, standard, *packages, has_source = json.loads(told)
    assert prefix == f"{directory}/venv"
    assert all(path.startswith(f"{directory}/") for path in packages)
    if sys.base_prefix not in staging.OF_SYSTEM:
        assert (base, standard.startswith(f"{base}/")) == (f"{directory}/base", True)
    assert has_source == (ROOT / ".git").exists()


def test_one_rank_of_a_node_unpacks_for_all_and_removes_its_own_copy(archive, tmp_path):
    copy = Path(shutil.copy(archive, tmp_path / "env.tar"))
    (tmp_path / "env.lock").mkdir()  # as by another rank
    for is_first in (False, True):
        assert unpack(copy, tmp_path / "env").returncode == 0
        assert (copy.exists(), (tmp_path / "env").exists()) == (not is_first, is_first)
        if not is_first:
            (tmp_path / "env.lock").rmdir()


def test_a_node_that_cannot_unpack_is_named(archive, tmp_path):
    (tmp_path / "file").write_text("")
    damaged = tmp_path / "broken.tar"
    damaged.write_bytes(archive.read_bytes()[:100_000])
    for path, place, problem in ((damaged, "env", "unpack"), (archive, "file/env", "write")):
        done = unpack(path, tmp_path / place)
        assert (done.returncode, f"cannot {problem}" in done.stderr) == (1, True)
        assert os.uname().nodename in done.stderr


def test_an_environment_is_packed_once(venv, archive):
    pack = [venv / "bin/python", "-c", PACK, archive.parent, ROOT]
    before = archive.stat().st_mtime_ns
    assert run(pack, PYTHONPATH=str(ROOT)).strip() == str(archive)
    assert archive.stat().st_mtime_ns == before
    (packages,) = venv.glob("lib/python3*/site-packages")
    (packages / "mine.py").write_text("changed = True\n")
    assert run(pack, PYTHONPATH=str(ROOT)).strip() != str(archive)
    assert sorted(archive.parent.glob("*")) == sorted(archive.parent.glob("env-*.tar"))


def test_what_cannot_be_packed_or_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match=r"cannot write .*env\.tar"):
        StagedEnvironment(tmp_path / "file/env.tar", []).write()
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    with pytest.raises(SetupError, match="make setup"):
        StagedEnvironment.of(tmp_path)
