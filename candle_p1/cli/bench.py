"""candle-p1 bench: measured comparisons, whose verbs are modules of candle_p1.bench."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

import candle_p1.bench
from candle_p1.cli import base
from candle_p1.cluster.process import Interrupted, signals_interrupt
from candle_p1.errors import ParameterError
from candle_p1.files import write_atomically
from candle_p1.options import FiniteRange
from candle_p1.training.screen import Screen

if TYPE_CHECKING:
    from candle_p1.bench.harness import Comparison

MODULE, MAX_RANKS = "candle_p1.bench.", 1024
COMPLETIONS = {"loaders": base.complete_loaders, "benchmarks": base.complete_benchmark}
DATA_OPTIONS = (
    base.option("--size", "Use synthetic files of this size (default: small).", ["small", "full"]),
    base.option("--data_dir", "Use CANDLE's files in this directory.", metavar="DIR"),
)
RESULT_OPTIONS = (
    base.json_option(),
    base.file_option(
        "--markdown", "Write the tables, with date and machine, to this Markdown file."
    ),
)


class Verbs(base.Group):
    """Finds the verbs, which are the modules with a `VERB`; imports one only when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names of the verbs."""
        names = (module.name for module in pkgutil.iter_modules(candle_p1.bench.__path__))
        return list(filter(_is_verb, names))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns the command of a verb."""
        if not _is_verb(cmd_name):
            return None
        return verb_command(cmd_name, importlib.import_module(MODULE + cmd_name).VERB)


def _is_verb(name: str) -> bool:
    spec = find_spec(MODULE + name) if name.isidentifier() else None
    return "\nVERB = " in Path(spec.origin or "").read_text("utf-8") if spec else False


@click.group("bench", cls=Verbs)
def bench_command() -> None:
    """Measure and compare: loaders, reading, steps, messages, checkpoints, start-up, GPUs."""


def verb_command(name: str, verb: type[Comparison]) -> click.Command:
    """Returns the command of a verb, whose options are the fields of its class."""
    from candle_p1.bench.harness import BenchmarkComparison

    own = [_parameter(each) for each in dataclasses.fields(verb) if "help" in each.metadata]
    options, kind, text = [*own, *RESULT_OPTIONS], base.Command, verb.__doc__ or ""
    if issubclass(verb, BenchmarkComparison):
        options = [base.benchmark_argument, *DATA_OPTIONS, *options, base.flags_argument]
        kind = base.BenchmarkCommand
        text = f"{text.rstrip()}\n\n    All other flags go to the benchmark.\n"

    def callback(json_file: Path | None, markdown: Path | None, **given: Any) -> None:
        if "flags" in given:
            named = {f"--{name}": given.pop(name) for name in ("size", "data_dir")}
            if all(named.values()):
                raise ParameterError(
                    "--size and --data_dir select different files: give only one of them"
                )
            words = [word for flag, value in named.items() if value for word in (flag, value)]
            given["flags"] = [*words, *given["flags"]]
        _measure(verb(**given), json_file, markdown)

    command = click.command(name, cls=kind, examples=verb.examples, help=text)
    return command(base.together(*options)(callback))


def _parameter(field: dataclasses.Field[Any]) -> Callable[..., Any]:
    more: dict[str, Any] = dict(field.metadata)
    text, default = more.pop("help"), field.default
    flag = more.pop("flag") or f"--{field.name}"
    more["shell_complete"] = COMPLETIONS.get(more.pop("complete", ""))
    if more.pop("is_file", False):
        return base.file_option(flag, text, name=field.name)
    if more.pop("is_directory", False):
        more["type"] = click.Path(exists=True, file_okay=False, writable=True)
    if more.pop("is_readable", False):
        more["type"] = click.Path(exists=True, dir_okay=False, path_type=Path)
    if more.pop("is_argument", False):
        return click.argument(field.name, **more)
    if within := more.pop("within", None):
        is_real = any(isinstance(each, float) for each in (default, *within))
        more["type"] = (FiniteRange if is_real else click.IntRange)(*within)
    if more.pop("is_list", False):
        more["type"] = base.NumberList(MAX_RANKS)
    if choices := more.pop("choices", None):
        more["type"] = click.Choice(choices)
    more["is_flag"] = default is False
    return click.option(flag, field.name, default=default, help=text, **more)


def _measure(comparison: Comparison, json_file: Path | None, markdown: Path | None) -> None:
    screen = Screen()
    with screen.making_data() as progress:
        notes = comparison.prepare(progress)
    for note in notes:
        screen.say(f"note: {note}")
    report = _with_progress(comparison, json_file)
    if report is None:  # another rank shows it
        return
    for part in comparison.render(report):
        screen.say(part)
    base.write_json(json_file, report)
    if markdown:
        write_atomically(markdown, comparison.markdown(report))
        screen.say(f"tables: {markdown}")
    for line in comparison.draw(report):
        screen.say(line)


def _with_progress(comparison: Comparison, json_file: Path | None) -> Any:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    try:
        with signals_interrupt(), Screen().bar(*columns, TimeElapsedColumn()) as bar:
            task = bar.add_task("", total=None)

            def on_start(done: int, total: int, what: str) -> None:
                bar.update(task, completed=done, total=total, description=what)

            def on_result(line: str, report: Mapping[str, Any]) -> None:
                bar.console.print(line, soft_wrap=True, highlight=False, markup=False)
                if json_file and json_file != base.STDOUT:
                    write_atomically(json_file, base.as_json(report))

            comparison.on_result = on_result
            return comparison.measure(on_start)
    except Interrupted as interrupted:
        raise click.exceptions.Exit(128 + interrupted.number) from None
