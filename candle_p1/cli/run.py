"""candle-p1 run: starts a benchmark on this machine."""

from __future__ import annotations

import os
import subprocess
import sys

import click

from candle_p1.benchmark import find_benchmark
from candle_p1.cluster.launchers import on_this_machine
from candle_p1.distributed.launch_environment import TERMINAL_VARIABLE, terminal
from candle_p1.training.screen import Screen


@click.command("run")
@click.argument("benchmark")
@click.option(
    "--np",
    "num_ranks",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of ranks.",
)
@click.option("--dry-run", is_flag=True, help="Print the command line and start nothing.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def command(benchmark: str, num_ranks: int, dry_run: bool, flags: tuple[str, ...]) -> None:
    """Train BENCHMARK (a name, or the path of a folder) on this machine.

    Flags after "--" go to the benchmark: candle-p1 run nt3 --np 2 -- --epochs 16. To list them:
    candle-p1 run nt3 -- --help.
    """
    script = [sys.executable, str(find_benchmark(benchmark).script), *flags]
    launch = on_this_machine(num_ranks, script)
    screen = Screen()
    for note in launch.notes:
        screen.say(f"note: {note}")
    screen.say("$ " + subprocess.list2cmdline(launch.command))
    if dry_run:
        return
    sys.stdout.flush()
    device = terminal()
    environment = os.environ | ({TERMINAL_VARIABLE: device} if device else {})
    os.execvpe(launch.command[0], launch.command, environment)
