from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from candle_p1.cli.study import command
from candle_p1.cluster.process import Interrupted
from candle_p1.distributed.launch_environment import MPI_VARIABLES
from candle_p1.errors import CandleError, RecordError
from candle_p1.studies.study_file import list_studies

TOY = Path(__file__).parents[2] / "files/toy"


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in MPI_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    Path("mine.toml").write_text(
        f'title = "mine"\nbenchmark = "{TOY}"\nrepeats = 1\nminutes = 5\n'
        'vary.does = ["train", "fail"]\n[sizes.small]\nranks = [1]\n'
    )


def study(*argv):
    result = CliRunner().invoke(command, [str(argument) for argument in argv])
    if isinstance(result.exception, CandleError):
        raise result.exception
    return result


def test_the_list_has_every_study_with_what_it_shows():
    lines = study("list").output.splitlines()
    assert [line.split(":")[0] for line in lines] == list_studies()
    assert any("Figure 10" in line for line in lines if line.startswith("batch-p1b3: "))


def test_show_and_dry_run_say_the_same_and_start_nothing(tmp_path):
    argv = ["strong-nt3", "--ranks", "2,1", "--repeats", 1]
    shown = study("show", *argv, "--", "-e", 2)
    assert shown.exit_code == 0
    assert f"results: {tmp_path}/output/strong-nt3-small" in shown.output
    assert "default-np2-r0: OMP_NUM_THREADS=1 candle-p1 run nt3 --np 2 --" in shown.output
    assert "--epochs 2 " in shown.output
    assert "8 runs, at most" in shown.output
    for flag in ("--dry_run", "--dry-run"):
        assert study("run", *argv, flag, "--", "-e", 2).output == shown.output
    assert not (tmp_path / "output").exists()


def test_a_study_with_a_failed_run_ends_with_code_1():
    result = study("run", "mine.toml", "-o", "there")
    assert result.exit_code == 1
    assert result.output.startswith("mine, small: mine\n")
    assert re.search(r"1 s in total; records: .*/there/mine-small\n$", result.output)
    by_name = study("status", "mine.toml", "-o", "there")
    for shown in (result, by_name, study("status", "there/mine-small")):
        assert "1 of 2 runs are done, 1 failed" in shown.output
        assert "does-fail-np1-r0  failed: planted failed; see " in shown.output


def test_an_interruption_says_how_to_resume(monkeypatch):
    def interrupt(*args):
        raise Interrupted(15)

    monkeypatch.setattr("candle_p1.cli.study.execute_study", interrupt)
    monkeypatch.setattr(sys, "argv", ["candle-p1", "study", "run", "mine.toml", "-o", "a b"])
    result = study("run", "mine.toml", "-o", "a b")
    assert result.exit_code == 128 + 15
    assert result.output.endswith("\n$ candle-p1 study run mine.toml -o 'a b'\n")


def test_a_study_that_was_never_started_has_no_status():
    with pytest.raises(RecordError, match=r"nt3-small .*study\.json"):
        study("status", "strong-nt3")


@pytest.mark.parametrize("text", ["", "0", "1,", "1;2", "a", "-1", "9" * 20])
def test_numbers_of_ranks_are_read_from_text(text):
    runs = study("show", "strong-nt3", "--ranks", "4, 1,4").output
    assert {number for number in range(9) if f"-np{number}-" in runs} == {1, 4}
    result = study("show", "strong-nt3", f"--ranks={text}")
    assert (result.exit_code, "--ranks" in result.output) == (2, True)
