"""The command line, ``candle-p1 COMMAND``: its modules only parse and call."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from typing import NoReturn

import click

from candle_p1 import __version__
from candle_p1.cli.base import Group
from candle_p1.errors import EXIT_CODE, CandleError
from candle_p1.text import print_error

COMMANDS = {
    "run": "run", "submit": "submit", "study": "study", "show": "results", "report": "results",
    "compare": "results", "model": "results", "forecast": "results", "timeline": "timeline",
    "data": "data", "predict": "networks", "evaluate": "networks", "bench": "bench",
    "published": "results", "doctor": "run",
}  # fmt: skip
"""The module of each command, which is imported only when it is needed."""


class _Commands(Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"candle_p1.cli.{COMMANDS[cmd_name]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="candle-p1")
def cli() -> None:
    """The CANDLE Pilot1 benchmarks, data-parallel through Horovod or JAX."""


def main() -> None:
    """Runs the command line.

    An error that the user can resolve is one message and gives code 2. Ctrl-C, and a reader that
    stops reading, end the command without a message.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files may hold any bytes
            stream.reconfigure(errors="backslashreplace")
    try:
        code = cli.main(prog_name="candle-p1", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        more = f" See: {context.command_path} --help" if context else ""
        _fail(error.format_message() + more)
    except CandleError as error:
        _fail(error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes it at exit
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}")
    except MemoryError:
        _fail("there is not enough memory: choose smaller sizes or numbers")
    except (KeyboardInterrupt, click.Abort):
        sys.exit(128 + signal.SIGINT)
    sys.exit(code)


def _fail(message: object) -> NoReturn:
    print_error(message)
    sys.exit(EXIT_CODE)
