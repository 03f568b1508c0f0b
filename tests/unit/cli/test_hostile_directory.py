"""Commands that are started in a directory in which somebody else has put files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from candle_p1.bench.node_state import MemorySampler
from candle_p1.benchmark import find_benchmark, list_benchmarks
from candle_p1.cluster.process import run_to_end
from candle_p1.distributed import launch_environment
from candle_p1.errors import ParameterError
from tests.conftest import ROOT

CODE = "open('executed', 'a').write(__file__ + '\\n')\n"
FILES = (
    "benchmarks/nt3/nt3.py", "benchmarks/planted/planted.py", "nt3/nt3.py", "nt3.py",
    "candle_p1/__init__.py", "numpy.py", "json.py", "click.py", "psutil.py", "rich/__init__.py",
    "sitecustomize.py", "usercustomize.py", "tensorflow.py",
)  # fmt: skip
SCRIPT = Path(sys.executable).parent / "candle-p1"


@pytest.fixture(autouse=True)
def hostile(tmp_path, monkeypatch):
    monkeypatch.setenv("CANDLE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("CANDLE_BENCHMARKS_PATH", raising=False)
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(CODE)
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "executed").exists(), (tmp_path / "executed").read_text()


@pytest.mark.skipif(not SCRIPT.exists(), reason="candle-p1 is not installed")
@pytest.mark.parametrize("argv", ["data info", "run nt3 --dry_run", "show .", "run "])
def test_commands_execute_no_code_of_the_working_directory(argv):
    variables = dict(os.environ)
    if argv.endswith(" "):  # completion of the next word
        words = {"COMP_WORDS": f"candle-p1 {argv}", "COMP_CWORD": "2"}
        variables |= words | {"_CANDLE_P1_COMPLETE": "bash_complete"}
    argv = argv.split() if "COMP_WORDS" not in variables else []
    done = subprocess.run([SCRIPT, *argv], env=variables, capture_output=True, text=True)
    assert done.returncode == (2 if argv == ["show", "."] else 0), done.stderr
    assert "Traceback" not in done.stderr


def test_names_of_benchmarks_do_not_refer_to_the_working_directory(tmp_path):
    assert "planted" not in list_benchmarks()
    assert find_benchmark("nt3").folder == ROOT / "benchmarks/nt3"
    with pytest.raises(ParameterError, match=r"'planted'.*\./planted"):
        find_benchmark("planted")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/mine.py").write_text("")
    for path in ("./mine", "mine/", str(tmp_path / "mine")):  # by its path it is found
        with pytest.raises(ParameterError, match="defines no Benchmark"):
            find_benchmark(path)


@pytest.mark.parametrize("version", [(3, 10), (3, 12)])
def test_processes_of_this_package_import_nothing_from_the_working_directory(version, monkeypatch):
    if version >= (3, 11) > sys.version_info[:2]:
        pytest.skip("needs Python 3.11")
    monkeypatch.setattr(launch_environment.sys, "version_info", version)
    assert MemorySampler().stop() is not None
    with Path("/dev/null").open("wb") as output:
        assert run_to_end(["/bin/sh", "-c", "exit 7"], os.environ, output) == (7, False)


@pytest.mark.parametrize("name", ["x" * 5000, "nul\0", "./nul\0", "..", ".", "", "a..b", "a b"])
def test_impossible_names_are_errors(name):
    with pytest.raises(ParameterError) as raised:
        find_benchmark(name)
    assert len(str(raised.value)) < 600
