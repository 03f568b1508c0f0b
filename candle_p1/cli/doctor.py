"""candle-p1 doctor: what is installed, what is wrong with it, and how to fix that."""

from __future__ import annotations

import sys

import click

from candle_p1.cli.base import Command
from candle_p1.cluster.doctor import examine
from candle_p1.text import count
from candle_p1.training.screen import Screen


@click.command("doctor", cls=Command, examples=["candle-p1 doctor"])
def command() -> None:
    """Examine the installation; exit with code 1 if several ranks could not train together."""
    screen = Screen()
    findings = []
    for finding in examine():
        findings.append(finding)
        finding.show(screen)
    num_problems = sum(finding.problem is not None for finding in findings)
    screen.say(f"{count(num_problems, 'problem')} found" if num_problems else "no problems found")
    sys.exit(any(finding.fatal for finding in findings))
