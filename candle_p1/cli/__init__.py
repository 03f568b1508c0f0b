"""The command line, ``candle-p1 COMMAND``: one file per command, which only parses and calls."""

from __future__ import annotations

import importlib
import sys

import click

from candle_p1 import __version__
from candle_p1.errors import EXIT_CODE, CandleError
from candle_p1.text import print_error

COMMANDS = (
    "run",
    "submit",
    "study",
    "show",
    "report",
    "compare",
    "timeline",
    "data",
    "bench",
    "doctor",
)


class _Commands(click.Group):
    """Imports the module of a command only when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"candle_p1.cli.{cmd_name}")
        command: click.Command = module.command
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="candle-p1")
def cli() -> None:
    """The CANDLE Pilot1 benchmarks, data-parallel through Horovod."""


def main() -> None:
    """Runs the command line; an error that the user can resolve is printed and gives code 2."""
    try:
        cli(prog_name="candle-p1")
    except CandleError as error:
        print_error(error)
        sys.exit(EXIT_CODE)
