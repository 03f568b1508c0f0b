from __future__ import annotations

import sys

import click
import pytest
from click.testing import CliRunner

from candle_p1 import cli
from candle_p1.cluster.doctor import Finding
from candle_p1.errors import EXIT_CODE, ParameterError


def invoke(*argv):
    return CliRunner().invoke(cli.cli, [str(argument) for argument in argv])


def commands(group, path=()):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


@pytest.mark.parametrize("path", [path for path, _ in commands(cli.cli)])
def test_every_command_and_option_has_help(path):
    result = invoke(*path, "--help")
    assert result.exit_code == 0
    assert "Usage: " in result.output
    command = dict(commands(cli.cli))[path]
    assert command.help
    for parameter in command.params:
        assert isinstance(parameter, click.Argument) or parameter.help


def test_help_names_every_command():
    result = invoke("--help")
    assert all(f"\n  {name} " in result.output for name in cli.COMMANDS)


def test_run_shows_the_command_line_it_would_start():
    result = invoke("run", "nt3", "--np", 2, "--dry-run", "--", "--epochs", 16)
    assert result.exit_code == 0
    line = result.output.splitlines()[-1]
    assert "mpirun -np 2 --bind-to none" in line
    assert line.endswith("nt3_baseline_keras2.py --epochs 16")


def test_one_rank_needs_no_launcher():
    result = invoke("run", "nt3", "--dry-run")
    assert "mpirun" not in result.output
    assert f"$ {sys.executable} " in result.output


@pytest.mark.parametrize("benchmark", ["nt4", "./nt4", "no.such.module"])
def test_an_unknown_benchmark_is_an_error_that_names_it(benchmark):
    result = invoke("run", benchmark)
    assert isinstance(result.exception, ParameterError)
    assert benchmark in str(result.exception)


def test_an_error_is_one_line_and_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["candle-p1", "run", "nt4"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == EXIT_CODE == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: ")
    assert "'nt3'" in output.err  # the nearest name
    assert output.err.count("\n") == 1


@pytest.mark.parametrize(("fatal", "code"), [(True, 1), (False, 0)])
def test_the_doctor_shows_problem_and_fix(monkeypatch, fatal, code):
    from candle_p1.cli import doctor

    findings = [Finding("cores", "2"), Finding("Horovod", "not usable", "no MPI", "rebuild", fatal)]
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    result = invoke("doctor")
    assert result.exit_code == code
    assert "no MPI" in result.output
    assert "rebuild" in result.output
