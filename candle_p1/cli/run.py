"""Commands of this machine: run starts a benchmark, doctor examines the installation."""

from __future__ import annotations

import os
import sys

import click

from candle_p1.benchmark import find_benchmark
from candle_p1.cli.base import (
    BenchmarkCommand,
    Command,
    benchmark_argument,
    flags_argument,
    number_option,
    option,
)
from candle_p1.cluster.launchers import on_this_machine
from candle_p1.cluster.process import run_in_terminal
from candle_p1.distributed.launch_environment import TERMINAL_VARIABLE, terminal, without_allocation
from candle_p1.instrument.logs import check_tensorboard
from candle_p1.scaling import epochs_of_ranks
from candle_p1.text import WIDTH_VARIABLE, columns, count
from candle_p1.training.restart import may_restart
from candle_p1.training.screen import Screen


@click.command(
    "run",
    cls=BenchmarkCommand,
    examples=["candle-p1 run nt3 --np 2 --epochs 16", "candle-p1 run nt3 -- --help"],
)
@benchmark_argument
@number_option("--np", "Number of ranks.", 1, name="num_ranks")
@option("--dry_run", "Print the command line and start nothing.", is_flag=True)
@flags_argument
def run_command(benchmark: str, num_ranks: int, dry_run: bool, flags: tuple[str, ...]) -> None:
    """Train BENCHMARK (a name, or the path of a folder) on this machine.

    All other flags go to the benchmark. To list them: candle-p1 run nt3 -- --help.
    """
    found = find_benchmark(benchmark)
    params = found.read_parameters(flags)  # what is wrong is found before anything starts
    found.check_tables(params)
    check_tensorboard(params)
    launch = on_this_machine(num_ranks, [sys.executable, str(found.script), *flags])
    if not may_restart(params):
        epochs_of_ranks(params, num_ranks)
    screen = Screen()
    for note in launch.notes:
        screen.say(f"note: {note}")
    screen.say_command(launch.command)
    if dry_run:
        return
    sys.stdout.flush()
    device = terminal()
    # A single rank takes the place of this process, which a launcher may have started.
    environment = dict(os.environ) if num_ranks == 1 else without_allocation(os.environ, here=True)
    if device:  # the ranks do not see the terminal themselves
        environment |= {TERMINAL_VARIABLE: device, WIDTH_VARIABLE: str(columns() or "")}
    if num_ranks > 1 and os.isatty(1):
        sys.exit(run_in_terminal(launch.command, environment))
    os.execvpe(launch.command[0], launch.command, environment)


@click.command("doctor", cls=Command, examples=["candle-p1 doctor"])
def doctor_command() -> None:
    """Examine the installation; exit with code 1 if several ranks could not train together."""
    from candle_p1.cluster import doctor

    screen, findings = Screen(), []
    for finding in doctor.examine():
        findings.append(finding)
        finding.show(screen)
    num_problems = sum(finding.problem is not None for finding in findings)
    screen.say(f"{count(num_problems, 'problem')} found" if num_problems else "no problems found")
    sys.exit(any(finding.fatal for finding in findings))
