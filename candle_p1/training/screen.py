"""What rank 0 prints."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from candle_p1.distributed.launch_environment import TERMINAL_VARIABLE, launcher_variable
from candle_p1.errors import ParameterError
from candle_p1.records.summary import results
from candle_p1.text import columns, printable, table_lines, wrap, wrap_command

if TYPE_CHECKING:
    from rich.table import Table

    from candle_p1.records.types import RunRecord

EPOCH_COLUMNS = 80  # of an epoch's line where the width of the screen is not known
ELLIPSIS = " ..."
QUIET_S = 30.0  # after which a line with the progress of training is logged


class Screen:
    """The terminal or log to which rank 0 prints; silent on all other ranks.

    Lines are broken between words, to fit the terminal. Each epoch gets a line; on a terminal there
    is also a progress bar. A log file gets all lines as well; ParameterError is raised if it cannot
    be written.
    """

    def __init__(self, rank: int = 0, logfile: str | None = None) -> None:
        self._terminal = _open_terminal() if rank == 0 else None
        self._width = columns(self._terminal)
        self._console = _console(rank, self._terminal, self._width)
        self._log = _open_log(logfile) if logfile and rank == 0 else None
        self._progress: Progress | None = None

    def close(self) -> None:
        """Closes the terminal, if this object opened it, and the log."""
        for file in (self._terminal, self._log):
            if file:
                file.close()

    def say(self, what: str | Table) -> None:
        """Prints a line or a table."""
        rule = "─" if self._console.encoding.startswith("utf") else "-"

        def text(width: int | None) -> str:
            if isinstance(what, str):
                return wrap(what, width)
            return "\n".join(["", *table_lines(what, width, rule), ""])

        self._print(text)

    def say_command(self, argv: Sequence[str], prompt: str = "$ ", after: str = "") -> None:
        """Prints a command as it can be typed, between other text."""
        self._print(lambda width: wrap_command(argv, width, prompt) + after)

    def warn(self, text: str) -> None:
        """Prints a warning."""
        self._print(lambda width: wrap(f"warning: {text}", width), style="yellow")

    def _print(self, text: Callable[[int | None], str], style: str | None = None) -> None:
        """Prints a text that depends on the width; the log gets it without line breaks."""
        self._console.print(printable(text(self._width)), style=style, soft_wrap=True)
        if self._log:
            print(printable(text(None)), file=self._log, flush=True)

    @contextmanager
    def making_data(self, doing: str = "making synthetic") -> Iterator[Any]:
        """Yields a function (file name, bytes so far, bytes expected or 0) that shows a bar."""
        progress = self.bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeRemainingColumn(),
        )
        tasks: dict[str, Any] = {}

        def show(name: str, num_bytes: int, total_bytes: int) -> None:
            if name not in tasks:
                if not self._console.is_terminal:
                    size = f"{total_bytes / 2**20:.1f} MiB" if total_bytes else "size unknown"
                    self.say(f"{doing} {name}, {size}")
                tasks[name] = progress.add_task(f"{doing} {name}", total=total_bytes or None)
            progress.update(tasks[name], completed=num_bytes, total=total_bytes or None)

        with progress:
            yield show

    def bar(self, *columns: ProgressColumn) -> Progress:
        """Returns a progress bar that is shown until it ends, and only on a terminal."""
        return Progress(
            *columns,
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
            refresh_per_second=4,
        )

    def begin_training(self, num_epochs: int, num_steps: int, first_epoch: int = 0) -> None:
        """Shows a bar for all steps of all epochs, empty up to the first that is trained."""
        self._num_epochs, self._num_steps, self._epoch = num_epochs, num_steps, first_epoch
        self._last_line = time.monotonic()
        self._progress = self.bar(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._task = self._progress.add_task("training", total=num_epochs * num_steps)
        self._progress.start()

    def show_step(self, step: int) -> None:
        """Advances the bar, or prints a line now and then; `step` counts from 0 in each epoch."""
        if self._progress is not None and self._console.is_terminal:
            self._progress.update(self._task, completed=self._epoch * self._num_steps + step)
        elif time.monotonic() - self._last_line > QUIET_S:
            self._last_line = time.monotonic()
            self.say(f"epoch {self._epoch + 1}/{self._num_epochs}  step {step}/{self._num_steps}")

    def show_epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Prints those metrics of an epoch, counted from 0, that fit; validation in parentheses."""
        self._epoch, self._last_line = epoch + 1, time.monotonic()
        names = [name for name in metrics if not name.startswith(("val_", "learning_rate"))]
        names.sort(key=lambda name: (not name.endswith("loss"), name != "loss"))
        line = f"epoch {epoch + 1:>{len(str(self._num_epochs))}}/{self._num_epochs}"
        for name in names:
            longer = f"{line}  {name} {_short(metrics[name])}"
            if f"val_{name}" in metrics:
                longer += f" ({_short(metrics[f'val_{name}'])})"
            if len(longer) > (self._width or EPOCH_COLUMNS) - len(ELLIPSIS) * (name != names[-1]):
                line += ELLIPSIS
                break
            line = longer
        self.say(line)

    def end_training(self) -> None:
        """Removes the bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def show_result(self, record: RunRecord, path: Path) -> None:
        """Prints the results of a run, and where its record is."""
        for line in results(record):
            self.say(line)
        self.say_command(["candle-p1", "show", os.path.relpath(path.parent)], "to see more: ")


class _Terminal(io.FileIO):
    """A terminal that may be closed while the job goes on, or ends because of it."""

    def write(self, data: Any) -> int:
        """Writes, or loses what a closed terminal no longer shows."""
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def _open_terminal() -> TextIO | None:
    device = os.environ.get(TERMINAL_VARIABLE)
    if not device:
        return None
    try:
        terminal = _Terminal(device, "w")
    except OSError:  # it was closed in the meantime
        return None
    return io.TextIOWrapper(io.BufferedWriter(terminal), encoding="utf-8")


def _open_log(path: str) -> TextIO:
    file = Path(path).expanduser()
    try:
        if file.is_fifo():  # opening it would wait for a reader
            raise ParameterError(f"logfile {path}: it is a pipe; name a file")
        return file.open("a", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ParameterError(f"logfile {path}: {error.strerror}") from error


def _short(value: float) -> str:
    """Returns a metric in six characters, unless it is very large or small."""
    return f"{value:.4f}" if 0.01 <= abs(value) < 10 else f"{value:.3g}"


def _console(rank: int, terminal: TextIO | None, width: int | None) -> Console:
    """Returns a console that prints text as it is."""
    plain: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False, "width": width}
    if terminal:
        return Console(file=terminal, force_terminal=True, **plain)
    # Open MPI gives rank 0 a pseudo-terminal even if its own output does not go to a terminal.
    is_terminal = launcher_variable() is None and sys.stdout.isatty()
    return Console(quiet=rank != 0, force_terminal=is_terminal, **plain)
