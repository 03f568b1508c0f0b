import json
import os
import shlex
import signal
import subprocess
import sys
import time

import click
import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from candle_p1 import cli
from candle_p1.cluster import doctor
from candle_p1.cluster.checks import Finding
from candle_p1.cluster.preflight import command as preflight
from candle_p1.errors import EXIT_CODE
from candle_p1.parameters.catalog import PARAMETERS
from tests.conftest import CANDLE_P1, ROOT
from tests.documentation import ALL, LEAVES
from tests.planted_records import plant
from tests.transcripts import Transcripts

COMMANDS = Transcripts(ROOT / "tests/files/cli")
BENCHMARK_COMMANDS = {
    ("run",), ("submit",), ("study", "show"), ("study", "run"),
    ("bench", "load"), ("bench", "step"), ("bench", "checkpoint"), ("bench", "startup"),
}  # fmt: skip
"""The commands that pass flags on to a benchmark."""


@pytest.fixture(autouse=True)
def of_unlimited_width(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)


def invoke(*argv):
    return CliRunner().invoke(cli.cli, [str(argument) for argument in argv])


@pytest.mark.parametrize("path", [(), *ALL])
def test_every_command_and_option_has_help(path):
    result = invoke(*path, "--help")
    command = ALL.get(path, cli.cli)
    assert (result.exit_code, "Usage: " in result.output, bool(command.help)) == (0, True, True)
    assert all(isinstance(each, click.Argument) or each.help for each in command.params)
    if isinstance(command, click.Group):
        assert invoke(*path).output == result.output
        assert all(f"\n  {name[-1]} " in result.output for name in ALL if name[:-1] == path)


def test_no_option_takes_nan_or_infinity():
    every = [each for command in ALL.values() for each in command.params]
    floats = (click.FloatRange, click.types.FloatParamType)
    numbers = [each for each in [*every, *preflight.params] if isinstance(each.type, floats)]
    assert len(numbers) > 5
    for option in numbers:
        for text in ("nan", "inf"):
            with pytest.raises(click.BadParameter):
                option.process_value(click.Context(preflight), text)


@pytest.mark.parametrize("path", LEAVES)
def test_every_command_has_examples_that_parse(path, monkeypatch):
    command = LEAVES[path]
    assert command.examples
    for example in command.examples:
        argv = shlex.split(example)
        assert argv[: 1 + len(path)] == ["candle-p1", *path]
        context = command.make_context(path[-1], argv[1 + len(path) :])
        assert all(not flag.startswith("-") for flag in context.args)
        assert not context.params.get("flags") or path in BENCHMARK_COMMANDS


def test_the_options_that_hide_flags_of_benchmarks_are_known():
    names = {f"--{parameter.name}" for parameter in PARAMETERS}
    options = {path: [name for each in ALL[path].params for name in each.opts] for path in LEAVES}
    hidden = {path: names.intersection(options[path]) for path in BENCHMARK_COMMANDS}
    of_studies = {path: {"--folds", "--size"} for path in hidden if path[0] == "study"}
    of_bench = {path: {"--size", "--data_dir"} for path in hidden if path[0] == "bench"}
    assert {path: found for path, found in hidden.items() if found} == of_studies | of_bench


FLAGS = "--epochs 96 --base_lr -1e-3 -lr 0.1 --dense=5 6"


@pytest.mark.parametrize(
    "argv", [f"--np 2 nt3 -- {FLAGS}", f"nt3 {FLAGS.replace(' -lr', ' --np=2 -lr')}"]
)
def test_flags_of_the_benchmark_need_no_separator(argv):
    context = ALL["run",].make_context("run", argv.split())
    assert (context.params["benchmark"], context.params["num_ranks"]) == ("nt3", 2)
    assert list(context.params["flags"]) == FLAGS.split()


def run(*argv, text=True, cwd=None, **variables):
    # Not inherited: the readline module sets COLUMNS in a process behind Python's back.
    options = {"capture_output": True, "timeout": 120, "env": os.environ | variables}
    return subprocess.run([*CANDLE_P1, *map(os.fsencode, argv)], text=text, cwd=cwd, **options)


@pytest.mark.parametrize("name", COMMANDS.cases)
def test_commands(name, tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("CANDLE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("RUN", str(plant(tmp_path, "nt3", 1).parent))
    monkeypatch.setenv("ROOT", str(ROOT))
    monkeypatch.setenv("TIMELINE", str(ROOT / "tests/files/horovod_timeline.json"))
    COMMANDS.check(name, tmp_path / "work", monkeypatch)


def test_names_that_are_too_long_are_one_message(environment, monkeypatch, capsys):
    name = "\udcff" * 5000
    for argv in (
        ["report", name, "-o", "x"],
        ["data", "fetch", "nt3", "--data_url", "file:///", "--out", name],
    ):
        monkeypatch.setattr(sys, "argv", ["candle-p1", *argv])
        with pytest.raises(SystemExit, match=str(EXIT_CODE)):
            cli.main()
        errors = capsys.readouterr().err
        assert (errors.startswith("error: "), errors.count("\n")) == (True, 1)


@pytest.mark.parametrize(
    "argv", ["published nt3", "data info nt3", "data cache", "compare {run} {run}"]
)
def test_json_goes_to_a_file_or_alone_to_standard_output(argv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = argv.format(run=plant(tmp_path, "nt3", 1).parent).split()
    to_stdout = invoke(*words, "--json", "-")
    to_file = invoke(*words, "--json", "out.json")
    content = json.loads((tmp_path / "out.json").read_text())
    assert json.loads(to_stdout.stdout) == content
    assert to_file.stdout == f"{to_stdout.stderr}results: out.json\n"


def test_what_a_run_would_start_is_shown():
    output = invoke("run", "nt3", "--np", 2, "--", "--help").output
    assert ("--learning_rate" in output, "mpirun" in output) == (True, False)
    line = invoke("run", "nt3", "--np", 2, "--dry_run", "--epochs", 16).output.splitlines()[-1]
    assert "mpirun -np 2 --host localhost:2 --bind-to none" in line
    assert line.endswith("nt3_baseline_keras2.py --epochs 16")
    single = invoke("run", "nt3", "--dry_run").output
    assert ("mpirun" not in single, f"$ {sys.executable} " in single) == (True, True)


@pytest.mark.parametrize(("fatal", "code"), [(True, 1), (False, 0)])
def test_the_doctor_shows_problem_and_fix(monkeypatch, fatal, code):
    findings = [Finding("cores", "2"), Finding("Horovod", "not usable", "no MPI", "rebuild", fatal)]
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    result = invoke("doctor")
    assert result.exit_code == code
    assert all(each in result.output for each in ("no MPI", "rebuild"))


@pytest.fixture
def runs(tmp_path):
    for name in ("nt3", "nt3", "p1b1"):
        directory = tmp_path / "output" / name / "EXP000"
        directory.mkdir(parents=True, exist_ok=True)
        plant(directory, name, 2)
    return tmp_path / "output"


def test_show_takes_the_only_run_below_a_directory(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    *lines, _ = invoke("show", runs / "p1b1/EXP000/run000").output.splitlines()
    assert lines[0].startswith("p1b1: ok, 2 ranks on node vm")
    whole = invoke("show", runs / "p1b1/EXP000/run000", "--full").output
    assert whole.splitlines()[: len(lines)] == lines
    for directory in ("output/p1b1", "output/p1b1/EXP000/run000/run.json"):
        assert invoke("show", directory, "--full", "--html", "x.html").output.startswith(whole)


def test_show_lists_runs_where_there_are_several(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["nt3/EXP000/run000", "nt3/EXP000/run001", "p1b1/EXP000/run000"]
    listed = [line.split()[:4] for line in invoke("show").output.splitlines() if " ok " in line]
    assert listed == [[name, name.split("/")[0], "ok", "2"] for name in names]
    assert invoke("show", runs / "nt3/EXP000").output.count(" ok ") == 2
    assert "3 runs" in str(invoke("show", "output", "--html", "run.html").exception)
    (runs / "nt3/EXP000/run001/run.json").write_text("{")
    output = invoke("show", runs).output
    assert ("warning: " in output, output.count(" ok ")) == (True, 2)


@pytest.mark.extended
def test_a_reader_that_stops_reading_ends_the_command_quietly(tmp_path):
    command = f"{shlex.join(CANDLE_P1)} study show strong-nt3 --repeats 99 | head -n 1"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout.count("\n"), done.stderr) == (1, "")


def test_ctrl_c_is_quiet(tmp_path, start):
    program = (
        "import candle_p1.cluster.doctor as d, candle_p1.cli, time\n"
        "def wait():\n    print('waiting', flush=True)\n    time.sleep(600)\n    yield\n"
        "d.examine = wait\ncandle_p1.cli.main()"
    )
    process = start([sys.executable, "-c", program, "doctor"], stderr=subprocess.PIPE)
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.5)  # it may still be printing
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT
    assert (output + errors).strip() == ""


def test_any_file_name_can_be_printed_in_any_locale(runs):
    variables = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    odd = os.fsencode(runs / "nt3") + b"/\xff\xc3\xa4"
    (runs / "nt3/EXP000").rename(os.fsdecode(odd))
    done = run("show", runs, text=False, **variables)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"run001" in done.stdout
    done = run("show", odd + b"/none", text=False, **variables)
    assert done.returncode == EXIT_CODE
    assert done.stderr.startswith(b"error: ")


def test_a_run_says_what_it_does_before_its_long_import(tmp_path):
    (tmp_path / "tensorflow.py").write_text("import os; print('import', flush=True); os._exit(7)")
    variables = {"PYTHONPATH": str(tmp_path), "KERAS_BACKEND": "tensorflow"}
    done = run("run", "nt3", cwd=tmp_path, **variables)
    command, told, last = done.stdout.splitlines()
    assert (command.startswith("$ "), told.startswith("importing Keras")) == (True, True)
    assert (last, done.returncode) == ("import", 7)


def completions(line):
    """Returns what the shell is offered after a line, with "file" or "dir" where it adds paths."""
    *words, incomplete = line.split(" ")
    found = BashComplete(cli.cli, {}, "candle-p1", "_X").get_completions(words[1:], incomplete)
    return {(item.type, item.value) for item in found}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("candle-p1 bench ", {"load", "read", "step", "comm", "gpu", "checkpoint", "startup"}),
        ("candle-p1 run ", {"nt3", "p1b1", "p1b2", "p1b3"}),
        ("candle-p1 run nt3 --np 2 --noise_co", {"--noise_column", "--noise_correlated"}),
        ("candle-p1 run nt3 --loader ch", {"chunked", "chunked_rows"}),
        ("candle-p1 run nt3 --epochs 2 --early_stop ", {"True", "False"}),
        ("candle-p1 submit nt3 --machine polaris --study batch-p", {"batch-p1b3"}),
        ("candle-p1 bench load nt3 --methods dask,parq", {"dask,parquet"}),
    ],
)
def test_the_shell_completes_names(line, expected):
    assert {name for kind, name in completions(line) if kind == "plain"} == expected


def test_the_shell_completes_paths_of_benchmarks_and_files():
    assert completions("candle-p1 run ./b") == {("dir", "./b")}
    assert completions("candle-p1 run nt3 --train_data x") == {("file", "x")}
    assert completions("candle-p1 run ./absent --lo") == set()


def test_the_shell_is_answered(tmp_path):
    words = {"COMP_WORDS": "candle-p1 study run weak-n", "COMP_CWORD": "3"}
    done = run(cwd=tmp_path, **words, _CANDLE_P1_COMPLETE="bash_complete")
    assert (done.stdout.split(), done.stderr) == (["file,weak-n", "plain,weak-nt3"], "")
