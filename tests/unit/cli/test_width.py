"""No command breaks a line within a word, or cuts a path, however narrow the terminal is."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest

from candle_p1 import cli
from candle_p1.bench import load, read, step
from candle_p1.bench.load import LoadComparison
from candle_p1.bench.read import ReadComparison
from candle_p1.bench.record import RecordMeasurement
from candle_p1.bench.step import StepComparison
from candle_p1.cluster.doctor import Finding
from candle_p1.data.reader import FileSet
from candle_p1.studies.manifest import write_manifest
from candle_p1.studies.plan import Choice, make_plan
from candle_p1.studies.study_file import find_study
from candle_p1.training.screen import Screen
from tests.conftest import ROOT
from tests.planted_records import plant
from tests.unit.bench.test_bench_load import outcome
from tests.unit.bench.test_bench_read import outcome as reading
from tests.unit.bench.test_bench_step import slower

LONG = "a-directory-whose-name-is-longer-than-half-a-line-of-sixty-columns"
FINDING = Finding(
    "data directory",
    f"/scratch/{LONG}, 3 GiB free",
    "there is little space left",
    "set CANDLE_DATA_DIR to a directory with enough space for the files of the published size",
)
OF_RECORDS = {
    "num_ranks": 6,
    "num_epochs": 1,
    "num_records": 1,
    "file_bytes": {"run.json": 2**20},
    "results": [{"variant": variant, "median_s": 1.0} for variant in ("write", "read", "report")],
}
COMMANDS = [
    "run nt3 --np 2 --epochs 16 --dry-run --data_dir data",
    "submit nt3 --machine slurm --nodes 2 --dry-run",
    "show output/nt3/run000",
    "show output",
    "compare output/nt3/run000 output/nt3/run001",
    "report output -o report",
    "study list",
    "study show strong-nt3",
    "study status strong-nt3",
    "data info",
    "data cache",
    "published p1b3",
    "doctor",
    f"timeline summary {ROOT}/tests/files/horovod_timeline.json",
    f"timeline slice {ROOT}/tests/files/horovod_timeline.json -o slice.json",
    "bench load nt3 --size small --repeats 2",
    "bench read nt3 --size small --np 1,2",
    "bench step nt3 --size small --np 2",
    "bench record --ranks 6 --epochs 1 --records 1",
    "bench scale --ranks 2",
    "no-such-command",
    "run nt5",
    "run nt3 --learning-rat 3",
    "study show strong-nt5",
    "submit nt3 --machine nowhere",
    "show nowhere",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a long path, in which there are runs and a study."""
    place = tmp_path_factory.mktemp("width") / LONG
    directory = place / "output/nt3"
    directory.mkdir(parents=True)
    for _ in range(2):
        plant(directory, "nt3", 2, quality={"accuracy": 0.9}, energy_j=50.0, output_dir=str(place))
    plant(directory, "nt3", 4, output_dir=f"{place}/other", loader="original")
    write_manifest(make_plan(find_study("strong-nt3"), Choice(), place / "output"))
    (place / "data").mkdir()
    for name in ("nt_train2.csv", "nt_test2.csv"):
        (place / "data" / name).write_text("0,1\n1,2\n")
    return place


@pytest.fixture
def output_of(place, monkeypatch, capsys):
    """Returns what a command prints at a width."""
    file = place / "data/nt_train2.csv"
    monkeypatch.chdir(place)
    monkeypatch.setenv("CANDLE_DATA_DIR", f"/scratch/{LONG}")
    monkeypatch.setattr("candle_p1.cli.doctor.examine", lambda: [FINDING, Finding("cores", "2")])
    monkeypatch.setattr(load, "run", lambda job, num_ranks: [outcome()] * num_ranks)
    monkeypatch.setattr(step, "run", slower)
    of_rank = reading(1.0, [(0, 1, 8)])
    monkeypatch.setattr(read, "run", lambda job, num_ranks: [of_rank] * num_ranks)
    report = SimpleNamespace(sections=())
    monkeypatch.setattr("candle_p1.reports.report.make_report", lambda runs, say: report)
    monkeypatch.setattr("candle_p1.reports.writing.write_report", lambda report, out: out / LONG)
    monkeypatch.setattr(RecordMeasurement, "measure", lambda self: OF_RECORDS)
    for kind in (LoadComparison, ReadComparison, StepComparison):
        monkeypatch.setattr(kind, "locate_files", lambda *_: FileSet.of({"train": file}))

    def output_of(command, width):
        if width:
            monkeypatch.setenv("COLUMNS", str(width))
        else:
            monkeypatch.delenv("COLUMNS", raising=False)
        monkeypatch.setattr(sys, "argv", ["candle-p1", *command.split()])
        with pytest.raises(SystemExit):
            cli.main()
        captured = capsys.readouterr()
        if command.startswith("submit nt3 --machine slurm"):
            return captured.err  # the script itself is printed as it is
        return captured.out + captured.err

    return output_of


def words_of(output):
    """Returns the words of an output, without numbers that are measured and without rules."""
    return {word for word in output.split() if not re.fullmatch(r"[─\\]+|~?[\d.,:+%]+[)]?", word)}


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("command", COMMANDS)
def test_lines_are_broken_between_words_only(command, width, output_of):
    output = output_of(command, width)
    words = words_of(output)
    assert words == words_of(output_of(command, None))
    for line in output.splitlines():
        longest = max(map(len, line.split()), default=0)
        assert len(line) <= width or len(line) - longest <= 40, line
        assert len(line) <= width or longest > width / 3, line


@pytest.mark.parametrize("width", [60, 80])
def test_what_a_run_prints_is_broken_between_words(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    screen = Screen()
    screen.warn("x " * 100)
    screen.begin_training(10, 10)
    screen.show_epoch(0, {f"a_metric_with_a_long_name_{i}": 0.123 for i in range(5)})
    screen.end_training()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert lines[-1].endswith("a_metric_with_a_long_name_0 0.1230 ...")
