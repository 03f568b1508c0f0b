"""What commands share: types of options, files to write, help, a benchmark's flags, completion."""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from candle_p1.errors import ParameterError, UnknownFlagError, did_you_mean
from candle_p1.files import write_atomically
from candle_p1.text import wrap_command

if TYPE_CHECKING:
    from candle_p1.benchmark import Benchmark
    from candle_p1.reports.frame import Runs
    from candle_p1.training.screen import Screen

PATH = click.Path(path_type=Path)
DIRECTORY = click.Path(file_okay=False, path_type=Path)
STDOUT = Path("-")
_STDOUT_KEY = f"{__name__}.stdout"


class NumberList(click.ParamType):  # type: ignore[type-arg]
    """Positive integers such as "1,2,4", each once and in the order given."""

    name = "N,N,..."

    def __init__(self, most: int = 10**9) -> None:
        self.number = click.IntRange(1, most)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        """Returns the numbers, or fails as click's other types do."""
        numbers = [self.number.convert(word.strip(), param, ctx) for word in value.split(",")]
        return list(dict.fromkeys(numbers))


def together(*options: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a decorator that adds some options to a command, in this order."""
    return lambda command: functools.reduce(lambda made, add: add(made), options[::-1], command)


def option(
    flags: str, text: str, kind: Any = None, *, name: str = "", **more: Any
) -> Callable[..., Any]:
    """Returns an option with one flag or several; a list is of words to choose from."""
    kind = click.Choice(kind) if isinstance(kind, (list, tuple)) else kind
    return click.option(*flags.split(), *name.split(), type=kind, help=text, **more)


def number_option(
    flags: str, text: str, default: int | None = None, least: int = 1, most: Any = None, **more: Any
) -> Callable[..., Any]:
    """Returns an option that takes an integer."""
    return option(flags, text, click.IntRange(least, most), default=default, **more)


def file_option(
    flags: str, text: str, *, allow_dash: bool = False, **more: Any
) -> Callable[..., Any]:
    """Returns an option that takes a file to write, in a directory where this is possible."""

    def check(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
        if allow_dash and path == STDOUT:
            context.meta[_STDOUT_KEY] = sys.stdout
            context.with_resource(redirect_stdout(sys.stderr))
        elif path and not os.access(path.absolute().parent, os.W_OK):
            flag = flags.split()[0]
            raise ParameterError(f"{flag} {path}: the directory does not exist or is read-only")
        return path

    kind = click.Path(dir_okay=False, allow_dash=allow_dash, path_type=Path)
    return option(flags, text, kind, callback=check, **more)


def json_option(what: str = "all results") -> Callable[..., Any]:
    """Returns the option --json, whose value `write_json` takes.

    If it is "-", everything else that the command prints goes to standard error.
    """
    text = f"Write {what} to this file; - is standard output."
    return file_option("--json", text, name="json_file", allow_dash=True)


def as_json(content: Any) -> str:
    """Returns what --json writes."""
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def write_json(json_file: Path | None, content: Any) -> None:
    """Writes what --json asks for, if it is given."""
    if json_file is None:
        return
    text = as_json(content)
    if json_file == STDOUT:
        click.echo(text, nl=False, file=click.get_current_context().meta[_STDOUT_KEY])
        return
    from candle_p1.training.screen import Screen

    write_atomically(json_file, text)
    Screen().say(f"results: {json_file}")


def read_runs(paths: Iterable[Path], screen: Screen) -> Runs:
    """Reads all runs in or below some paths, and warns of records that cannot be read."""
    from candle_p1.reports import frame

    found = frame.read_runs(paths)
    for record, reason in found.problems.items():
        screen.warn(f"{record}: {reason}")
    return found


class CommandContext(click.Context):
    """The context of a command: shows defaults, and takes "-" and "_" in options for the same."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.show_default = True
        self.token_normalize_func = lambda name: name.replace("-", "_")


class Command(click.Command):
    """A command whose help ends with examples, which are command lines."""

    context_class = CommandContext

    def __init__(self, *args: Any, examples: Sequence[str] = (), **options: Any) -> None:
        super().__init__(*args, **options)
        self.examples = examples

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the examples."""
        if not self.examples:
            return
        with formatter.section("Examples" if len(self.examples) > 1 else "Example"):
            for example in self.examples:
                text = wrap_command(shlex.split(example), formatter.width - 2)
                formatter.write(textwrap.indent(f"{text}\n", "  "))


class Group(click.Group):
    """A group of commands, which lists whole sentences and suggests names."""

    context_class = CommandContext
    command_class = Command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Shows the help if there is nothing to parse."""
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Returns the command that the arguments name."""
        name, known = args[0], self.list_commands(ctx)
        if not (name in known or name.startswith("-") or ctx.resilient_parsing):
            near = did_you_mean(name, known)
            ctx.fail(f"There is no command {name!r}{near}; choose from {', '.join(known)}.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands, each with the first sentence of its help."""
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            text = " ".join(((command and command.help) or "").split("\n\n")[0].split())
            rows.append((name, re.split(r"(?<=[^.]\.)\s", text)[0]))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class BenchmarkCommand(Command):
    """A command that passes options which it does not know on to the benchmark, as "flags".

    The same options may follow "--", which is needed only for those that the command knows, too.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ignore_unknown_options = True

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the command's own options; all others become flags of the benchmark."""
        rest = super().parse_args(ctx, args)
        first = next(each for each in self.params if isinstance(each, click.Argument))
        given = ctx.params.get(first.name or "")
        if given and given.startswith("-") and not ctx.resilient_parsing:
            ctx.fail(f"expected {first.human_readable_name}, got {given!r}.")
        return rest

    def invoke(self, ctx: click.Context) -> Any:
        """Calls the command; an unknown flag may have been meant for the command itself."""
        try:
            return super().invoke(ctx)
        except UnknownFlagError as error:
            own = [name for each in self.params for name in each.opts if name.startswith("--")]
            if error.flag in own:
                raise ParameterError(
                    f"{error.flag} is an option of {ctx.command_path}: write it before --"
                ) from error
            near = did_you_mean(error.flag, [*own, *error.known])
            raise ParameterError(
                f"{error.flag} is neither an option of {ctx.command_path} nor a flag of the"
                f" benchmark{near}"
            ) from error

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completes the options of the command, then those of the benchmark."""
        found = super().shell_complete(ctx, incomplete)
        if incomplete.startswith("-") and (benchmark := _benchmark_of(ctx)):
            parameters = benchmark.declaration.parameters
            found += _matching((f"--{name}" for name in parameters), incomplete)
        return found


def complete_flags(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Completes the value of the benchmark's flag that was typed last."""
    flags, benchmark = ctx.params.get("flags") or (), _benchmark_of(ctx)
    last = next((each for each in reversed(flags) if each.startswith("--")), "")
    parameter = benchmark.declaration.parameters.get(last[2:]) if benchmark else None
    if parameter and parameter.type is bool:
        return _matching(("True", "False", *parameter.words), incomplete)
    if parameter and parameter.choices:
        return _matching(map(str, parameter.choices), incomplete)
    return [CompletionItem(incomplete, type="file")]


def _benchmark_of(ctx: click.Context) -> Benchmark | None:
    from candle_p1.benchmark import find_benchmark

    try:
        return find_benchmark(ctx.params["benchmark"])
    except Exception:  # there is nothing to complete, and nobody to tell
        return None


def _completing(
    module: str, names: str, kind: str = "file", listed: bool = False
) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Returns the completion of one of the names that a function of a module returns.

    Instead, a path may be given (kind "file" or "dir"), or a list separated by commas.
    """

    def complete(
        ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        before = incomplete[: incomplete.rfind(",") + 1] if listed else ""
        paths = [CompletionItem(incomplete, type=kind)] if kind else []
        known = getattr(importlib.import_module(f"candle_p1.{module}"), names)
        known = known() if callable(known) else known
        return paths + _matching((before + name for name in known), incomplete)

    return complete


def _matching(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


complete_benchmark = _completing("benchmark", "list_benchmarks", "dir")
complete_study = _completing("studies.study_file", "list_studies")
complete_machine = _completing("cluster.machine", "list_machines")
complete_loaders = _completing("bench.load", "METHODS", "", listed=True)

benchmark_argument = click.argument("benchmark", shell_complete=complete_benchmark)
flags_argument = click.argument(
    "flags", metavar="[FLAGS]...", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_flags
)
"""The flags of the benchmark."""
