"""candle-p1 bench: measured comparisons, shown beside what the paper published."""

from __future__ import annotations

import click

from candle_p1.cli.bench_verbs import Verbs


@click.group("bench", cls=Verbs)
def command() -> None:
    """Measure and compare: loaders, reading, steps, messages, checkpoints, start-up, GPUs."""
