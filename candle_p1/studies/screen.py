"""What a study shows while it runs: a line for each run, on a terminal with a bar below them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from candle_p1.studies.cost import Cost
from candle_p1.studies.state import OK
from candle_p1.training.screen import Screen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from candle_p1.studies.state import RunState

SHOWN_METRICS = ("accuracy", "r2", "loss")
"""Of a run's quality the first of these, or else the first there is."""


class StudyBar:
    """How far a study is, on a line that stays last.

    Args:
        progress: What draws it.
        num_runs: All of the study's runs.
    """

    def __init__(self, progress: Progress, num_runs: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=num_runs, left="")
        self._left = Cost([])

    def begin(self, num_past: int, name: str, left: Cost) -> None:
        """Shows that a run begins.

        Args:
            num_past: The runs before it.
            name: Its name.
            left: What it and those after it will take.
        """
        self._left = left
        self._progress.update(self._task, completed=num_past, description=name)
        self.tick(0.0)

    def tick(self, elapsed_s: float) -> None:
        """Shows the time left, when the present run has gone on for some, in s."""
        self._progress.update(self._task, left=f"{self._left.words(elapsed_s)} left")


class StudyScreen(Screen):
    """Adds a study's bar to the screen of a run."""

    @contextmanager
    def studying(self, num_runs: int) -> Iterator[StudyBar]:
        """Gives the bar of a study; a log has none."""
        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("runs"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        with progress:
            yield StudyBar(progress, num_runs)


def result_line(state: RunState) -> str:
    """Returns what became of a run, in a line: its time and quality, or why it has none."""
    record: Any = state.record or {}
    if state.status != OK:
        reason = record.get("failure", {}).get("reason", "")
        return f"{state.run.name}  {state.status}" + (f": {reason}" if reason else "")
    return f"{state.run.name}  {record['total_s']:.1f} s  {_quality(record['quality'])}".rstrip()


def _quality(quality: dict[str, Any]) -> str:
    name = next((name for name in (*SHOWN_METRICS, *quality) if name in quality), None)
    if name is None:
        return ""
    value = quality[name]["value"]
    return f"{name} {'not finite' if value is None else format(value, '.4g')}"
