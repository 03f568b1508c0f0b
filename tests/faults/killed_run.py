"""What is run and killed: commands with checkpoints, kills, and what was found after them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.faults.processes import STARTERS

KILLS_PER_RUN = 5
MODELS = {
    "nt3": "--conv 4 20 1 --pool 10 --dense 4000 600 --epochs 120 --epochs_scaling weak",
    "p1b1": "--dense 1000 400 2 400 1000 --epochs 150 --epochs_scaling weak",
}
EVERY_STEPS, EVERY_S = 40, 2.0
INTERVALS = {"steps": f"--ckpt_every_steps {EVERY_STEPS}", "seconds": f"--ckpt_every_s {EVERY_S}"}
CONFIGURATIONS = {
    2: [("nt3", "steps"), ("p1b1", "seconds"), ("nt3", "seconds"), ("p1b1", "steps")],
    4: [("nt3", "steps"), ("p1b1", "seconds")],
}
VICTIMS = ("a rank", "all ranks", "the launcher")
AIMS = ("writing", "training", "starting")
"""When a kill comes: while a checkpoint is being written, some time after the first one of this
start, or some time after the start."""
STARTING_S = 15.0
MOST_LOST = 2.0
"""The intervals that may be lost: one since a checkpoint, and one while the next was written."""


@dataclass(frozen=True)
class Command:
    """What is run: a benchmark with flags, on some ranks."""

    benchmark: str
    interval: str
    num_ranks: int

    def __str__(self) -> str:
        return f"{self.benchmark} on {self.num_ranks} ranks, by {self.interval}"

    @property
    def flags(self) -> list[str]:
        """The benchmark's flags."""
        flags = f"--size small {MODELS[self.benchmark]} {INTERVALS[self.interval]}"
        return [*flags.split(), "--ckpt_save_best", "False", "--ckpt_keep_limit", "3"]


@dataclass
class Kill:
    """One kill, and what was found after it.

    Attributes:
        victim: One of VICTIMS.
        aim: One of AIMS.
        moment: A number from 0 to 1 that says when: early or late.
        counts: Whether it came before the record said "ok".
        writing: The checkpoint that was being written, "" if none was.
        has_part: Whether the record has a part for the start that was killed.
        num_good: The complete checkpoints that were found afterwards.
        num_bad: Those that could not be read as a whole.
        newest: The position of "latest", (0, 0) if there is none.
        lost_steps: The steps that had to be repeated.
        lost_intervals: The same in intervals between checkpoints.
        most_lost: The intervals that may be lost.
        ended_s: How long it took until no process was left.
        problems: What is wrong.
    """

    victim: str
    aim: str
    moment: float
    counts: bool = False
    writing: str = ""
    has_part: bool = False
    num_good: int = 0
    num_bad: int = 0
    newest: tuple[int, int] = (0, 0)
    lost_steps: int | None = None
    lost_intervals: float | None = None
    most_lost: float = MOST_LOST
    ended_s: float | None = None
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.counts:
            return f"{self.victim}, {self.aim}: too late"
        during = f"writing {self.writing[1:].partition('.')[0]}" if self.writing else self.aim
        ended = "late" if self.ended_s is None else f"after {self.ended_s:.1f} s"
        lost = "" if self.lost_steps is None else f", {self.lost_steps} steps lost"
        return (
            f"{self.victim}, {during}: gone {ended}, {self.num_good} good checkpoints, goes on at"
            f" epoch {self.newest[0]}, step {self.newest[1]}{lost}"
        )


@dataclass
class KilledRun:
    """A run that is killed several times and restarted until it is "ok".

    Attributes:
        number: Of the run.
        command: What is run.
        starter: What starts it.
        kills: The kills that it is to get; those that come too late do not count.
        num_starts: How often the command was given.
        num_parts: The parts in the record.
        problems: What is wrong, apart from the problems of the kills.
        output: What the last start printed.
    """

    number: int
    command: Command
    starter: str
    kills: list[Kill]
    num_starts: int = 0
    num_parts: int = 0
    problems: list[str] = field(default_factory=list)
    output: str = ""

    @property
    def all_problems(self) -> list[str]:
        """All problems, with the kill they belong to."""
        of_kills = [
            f"kill {i + 1}: {problem}"
            for i, kill in enumerate(self.kills)
            for problem in kill.problems
        ]
        return of_kills + self.problems

    def __str__(self) -> str:
        verdict = "; ".join(self.all_problems) or "equal to the run that was not killed"
        lines = [f"{self.command}, started by {self.starter} {self.num_starts} times: {verdict}"]
        lines += [f"     {i + 1}. {kill}" for i, kill in enumerate(self.kills)]
        if self.all_problems:
            lines += [f"     | {line}" for line in self.output.splitlines()[-30:]]
        return "\n".join(lines)


def draw(num_kills: int, seed: int) -> list[KilledRun]:
    """Returns runs with so many kills in all, which follow from the seed; a tenth on four ranks."""
    runs: list[KilledRun] = []
    on_four = num_kills // 10
    for num_ranks, num in ((2, num_kills - on_four), (4, on_four)):
        per_run = min(KILLS_PER_RUN, -(-num // 2))
        for turn, first in enumerate(range(0, num, per_run or 1)):
            chance = random.Random(f"{seed} {len(runs)}")
            configurations = CONFIGURATIONS[num_ranks]
            command = Command(*configurations[turn % len(configurations)], num_ranks)
            kills = [
                Kill(
                    chance.choice(VICTIMS),
                    AIMS[0] if i % 2 == 0 else chance.choice(AIMS),
                    chance.random(),
                )
                for i in range(min(per_run, num - first))
            ]
            runs.append(KilledRun(len(runs), command, chance.choice(STARTERS), kills))
    return runs
