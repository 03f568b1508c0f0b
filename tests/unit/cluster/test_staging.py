"""Environments as archives: what they hold, and that their Python starts elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
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
print(json.dumps([sys.prefix, sys.base_prefix, os.__file__, candle_p1.__file__, mine.__file__,
                  source_commit() is not None]))
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
    done = subprocess.run(
        [str(word) for word in argv],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        cwd="/",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def unpack(archive, directory):
    return subprocess.run(
        ["bash", ROOT / "common/unpack_env.sh", archive, directory],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_an_archive_holds_environment_python_and_package(archive):
    with tarfile.open(archive) as tar:
        names = tar.getnames()
        python = tar.getmember("venv/bin/python")
    assert {name.split("/")[0] for name in names} <= {"venv", "base", "root"}
    assert {"venv/pyvenv.cfg", "root/candle_p1/__init__.py", "root/source.json"} <= set(names)
    assert "root/benchmarks/nt3/nt3_baseline_keras2.py" in names
    assert "root/candle_p1/kernel.so" in names
    assert any(name.endswith("/site-packages/mine.py") for name in names)
    assert [name for name in names if re.search("_editable_|site-packages/candle_p1", name)] == []
    if sys.base_prefix not in staging.OF_SYSTEM:
        assert python.linkname.startswith("../../base/bin/python")
        assert any(name.endswith("/lib-dynload") or "/os.py" in name for name in names)
        assert not any(re.match(r"base/lib/python[0-9.]+/test/", name) for name in names)


def test_the_python_of_an_archive_starts_where_it_is_unpacked(archive, tmp_path):
    """Also with a path that names another checkout, and without the original environment."""
    directory = tmp_path / "a node's/env"
    directory.parent.mkdir()
    done = unpack(archive, directory)
    assert done.returncode == 0, done.stderr
    paths = f"{directory}/root:{ROOT}"
    libraries = f"{directory}/venv/lib:{directory}/base/lib"
    told = run(
        [directory / "venv/bin/python", "-c", TELL],
        PYTHONPATH=paths,
        LD_LIBRARY_PATH=libraries,
        STAGED="1",
    )
    prefix, base, standard, package, mine, has_source = eval(told.replace("true", "True"))
    assert prefix == f"{directory}/venv"
    assert all(path.startswith(f"{directory}/") for path in (package, mine))
    if sys.base_prefix not in staging.OF_SYSTEM:
        assert base == f"{directory}/base"
        assert standard.startswith(f"{directory}/base/")
    assert has_source == (ROOT / ".git").exists()


def test_one_rank_of_a_node_unpacks_for_all_and_removes_its_own_copy(archive, tmp_path):
    copy = tmp_path / "env.tar"
    shutil.copy(archive, copy)
    (tmp_path / "env.lock").mkdir()  # as by another rank
    assert unpack(copy, tmp_path / "env").returncode == 0
    assert (copy.exists(), (tmp_path / "env").exists()) == (True, False)
    (tmp_path / "env.lock").rmdir()
    assert unpack(copy, tmp_path / "env").returncode == 0
    assert (copy.exists(), (tmp_path / "env").exists()) == (False, True)
    assert archive.exists()


@pytest.mark.parametrize("kind", ["damaged", "full"])
def test_a_node_that_cannot_unpack_is_named(archive, tmp_path, kind):
    if kind == "damaged":
        broken = tmp_path / "broken.tar"
        broken.write_bytes(archive.read_bytes()[:100_000])
        done = unpack(broken, tmp_path / "env")
        problem = "cannot unpack"
    else:
        (tmp_path / "file").write_text("")
        done = unpack(archive, tmp_path / "file/env")
        problem = "cannot write"
    assert done.returncode == 1
    assert os.uname().nodename in done.stderr
    assert problem in done.stderr


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
