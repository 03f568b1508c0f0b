"""Kills runs with checkpoints at random moments, restarts them, and compares how they end.

NT3 and P1B1 are trained with checkpoints every few steps or seconds. At random moments one rank,
all ranks or the launcher are killed by SIGKILL; at least every second kill is aimed at a checkpoint
that is being written. The same command is then given again, until the run is "ok". After every
kill, no process and nothing in /dev/shm may be left, and every complete checkpoint must verify as a
whole. The record of the restarted run says how many steps were lost. In the end the record must
have a segment for each start that came so far as to begin one, and weights, optimizer, the states
of random layers and history.csv must be equal, bit for bit, to those of a run of the same command
that nobody killed.

Usage: python -m tests.faults.kill_and_restart [--kills 100] [--seed N] [--jobs 2] [--engine jax]
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import psutil

from candle_p1.benchmark import find_benchmark
from candle_p1.checkpoints.checkpoint import Checkpoint, CheckpointRoot
from candle_p1.checkpoints.manifest import name_order
from candle_p1.datasets.synthetic import ensure
from candle_p1.errors import CheckpointError
from tests.faults.processes import LIMIT_S, STARTERS, StartedRun, fault_test

MODELS = {
    "nt3": "--conv 4 20 1 --pool 10 --dense 4000 600",
    "p1b1": "--dense 1000 400 2 400 1000",
}
EPOCHS_PER_KILL = {"nt3": 24, "p1b1": 30}
"""Enough for checkpoints before each kill."""
EVERY_STEPS, EVERY_S = 40, 2.0
INTERVALS = {"steps": f"--ckpt_every_steps {EVERY_STEPS}", "seconds": f"--ckpt_every_s {EVERY_S}"}
TRAINING_S = 900.0
"""How long a run may take until its first checkpoint, or until its end, on a busy machine."""
KILLS_PER_RUN = 5
CONFIGURATIONS = {
    2: [("nt3", "steps"), ("p1b1", "seconds"), ("nt3", "seconds"), ("p1b1", "steps")],
    4: [("nt3", "steps"), ("p1b1", "seconds")],
}
VICTIMS = ("a rank", "all ranks", "the launcher")
AIMS = ("writing", "training", "starting")
"""When a kill comes: while a checkpoint is being written, some time after the first one of this
start, or some time after the start."""
STARTING_S = 15.0
MOST_LOST = 2 * EVERY_STEPS
"""The steps that may be lost: those since a checkpoint, and those while the next was written."""
SKIPPED = "because the one before is still being written"
"""What a run prints when it skips a checkpoint, which costs another interval."""
MAX_ATTEMPTS = 4
"""How often runs are added because kills came after their runs had ended."""
SHM = Path("/dev/shm")
UNFINISHED = re.compile(r"\.epoch-.*\.tmp-")


@dataclass(frozen=True)
class Command:
    """A benchmark with flags, on some ranks, which trains long enough for some kills."""

    benchmark: str
    interval: str
    num_ranks: int
    num_kills: int
    engine: str = "auto"

    def start(self, starter: str, directory: Path, number: int = 0) -> StartedRun:
        """Starts the command in a directory, for the time that has this number."""
        epochs = self.num_kills * EPOCHS_PER_KILL[self.benchmark]
        flags = (
            f"--size small {MODELS[self.benchmark]} {INTERVALS[self.interval]} --epochs {epochs}"
            f" --epochs_scaling weak --engine {self.engine} --ckpt_save_best False"
            " --ckpt_keep_limit 3"
        )
        return StartedRun(self.benchmark, starter, self.num_ranks, flags, directory, number)


class Reference:
    """A run of a command that nobody kills: what the killed ones have to end like.

    Attributes:
        write_s: The mean time from saving a checkpoint until its directory was complete, in s.
    """

    def __init__(self, command: Command, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._directory = directory / "run"
        run = command.start("mpirun", directory)
        try:
            if run.await_end(TRAINING_S) is None or run.launcher.returncode:
                raise RuntimeError(f"{command}, not killed, failed:\n{run.output()}")
        finally:
            run.clear()
        times = []
        for path in self._directory.glob("ckpts/epoch-*"):
            created = Checkpoint(path).manifest.created.replace("Z", "+00:00")
            times.append(path.stat().st_mtime - datetime.fromisoformat(created).timestamp())
        self.write_s = mean(times)

    def differences(self, directory: Path) -> list[str]:
        """Returns what is not equal, bit for bit, in another run of the same command."""
        places = self._directory, directory
        one, other = ((each / "history.csv").read_bytes() for each in places)
        found = ["history.csv differs"] * (one != other)
        expected, newest = (CheckpointRoot(each / "ckpts").newest() for each in places)
        if expected is None or newest is None or expected.position != newest.position:
            return [*found, "the last checkpoint has another position"]
        if expected.arrays != newest.arrays:
            return [*found, "other arrays are saved"]
        pairs = {name: (expected.read(name), newest.read(name)) for name in expected.arrays}
        states = zip(expected.rank_states(), newest.rank_states(), strict=True)
        for rank, (mine, others) in enumerate(states):
            if mine.keys() != others.keys():
                found.append(f"rank {rank} has other states")
                continue
            pairs |= {f"{name} of rank {rank}": (mine[name], others[name]) for name in mine}
        return found + [f"{name} differs" for name, pair in pairs.items() if not equal(*pair)]


def equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Returns whether two arrays have the same bits."""
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


@dataclass
class Kill:
    """One kill, and what was found after it."""

    victim: str
    aim: str
    moment: float  # early or late: from 0 to 1
    chance: float  # from 0 to 1
    counts: bool = False  # whether it came before the record said "ok"
    writing: str = ""  # the checkpoint that was being written
    has_segment: bool = False  # whether the record has a segment for the start that was killed
    num_good: int = 0  # complete checkpoints that were verified afterwards
    newest: tuple[int, int] = (0, 0)  # the position of the newest of them
    lost_steps: int | None = None  # those that had to be repeated
    most_lost: int = MOST_LOST

    def __str__(self) -> str:
        if not self.counts:
            return f"{self.victim}, {self.aim}: too late"
        during = f"writing {self.writing[1:].partition('.')[0]}" if self.writing else self.aim
        lost = "" if self.lost_steps is None else f", {self.lost_steps} steps lost"
        return (
            f"{self.victim}, {during}: {self.num_good} good checkpoints, goes on at epoch"
            f" {self.newest[0]}, step {self.newest[1]}{lost}"
        )


@dataclass
class KilledRun:
    """A run that is killed several times and restarted until it is "ok"."""

    command: Command
    starter: str
    kills: list[Kill]
    num_starts: int = 0
    num_segments: int = 0
    problems: list[str] = field(default_factory=list)
    output: str = ""  # of the last start

    def __str__(self) -> str:
        what = self.command
        verdict = "; ".join(self.problems) or "equal to the run that was not killed"
        lines = [
            f"{what.benchmark} on {what.num_ranks} ranks, by {what.interval}, started by"
            f" {self.starter} {self.num_starts} times: {verdict}"
        ]
        lines += [f"     {kill}" for kill in self.kills]
        lines += [f"     | {line}" for line in self.output.splitlines()[-30:] if self.problems]
        return "\n".join(lines)


def draw(num_kills: int, seed: int, engine: str = "auto") -> list[KilledRun]:
    """Returns runs with so many kills in all, which follow from the seed; a tenth on four ranks."""
    runs: list[KilledRun] = []
    on_four = num_kills // 10
    for num_ranks, num in ((2, num_kills - on_four), (4, on_four)):
        per_run = min(KILLS_PER_RUN, -(-num // 2))
        for turn, first in enumerate(range(0, num, per_run or 1)):
            chance = random.Random(f"{seed} {len(runs)}")
            benchmark, interval = CONFIGURATIONS[num_ranks][turn % len(CONFIGURATIONS[num_ranks])]
            kills = []
            for i in range(min(per_run, num - first)):
                victim, aim = chance.choice(VICTIMS), chance.choice(AIMS if i % 2 else AIMS[:1])
                kills.append(Kill(victim, aim, moment=chance.random(), chance=chance.random()))
            command = Command(benchmark, interval, num_ranks, per_run, engine)
            runs.append(KilledRun(command, chance.choice(STARTERS), kills))
    return runs


class Killer:
    """Executes a KilledRun in a directory, which is made, and compares its end with a reference."""

    def __init__(self, run: KilledRun, directory: Path, reference: Reference) -> None:
        self.run, self._directory, self._reference = run, directory, reference
        self._root = CheckpointRoot(directory / "run/ckpts")
        self._left: set[str] = set()  # unfinished checkpoints that were there before this start
        self._ranks: list[psutil.Process] = []
        self._shared: set[Path] = set()  # what this start has in /dev/shm

    def execute(self) -> KilledRun:
        """Kills and restarts until the run is "ok"; it may be over before all its kills."""
        self._directory.mkdir(parents=True)
        for kill in [*self.run.kills, None]:
            if not self._start(kill):
                break
        if not self.run.problems:
            self._judge()
        return self.run

    def _start(self, kill: Kill | None) -> bool:
        """Starts the command and kills it, or lets it end; returns whether it has to go on."""
        run = self.run
        self._left, self._shared, self._ranks = self._unfinished(), set(), []
        run.num_starts += 1
        started = run.command.start(run.starter, self._directory, run.num_starts)
        try:
            has_killed = kill is not None and self._await(kill, started)
            if kill is not None and has_killed:
                self._strike(kill, started)
            if started.await_end(LIMIT_S if has_killed else TRAINING_S) is None:
                run.problems.append(f"still running: {started.left()}")
        finally:
            started.clear()
        run.output = started.output()
        run.problems += [f"left in {SHM}: {each.name}" for each in self._shared if each.exists()]
        record = started.read_record()  # fails if the record is incomplete
        num_before, run.num_segments = run.num_segments, len(segments_of(record))
        status = record["status"] if record else "none"
        if kill is not None and has_killed and status != "ok":
            kill.counts = True
            kill.most_lost += EVERY_STEPS * (SKIPPED in " ".join(run.output.split()))
            self._examine(kill, run.num_segments - num_before)
            return True
        if status != "ok" or started.launcher.returncode != 0:
            run.problems.append(f"it ended with code {started.launcher.returncode}, {status}")
        return False

    def _unfinished(self) -> set[str]:
        """Returns the names of checkpoints that are not complete, or no longer."""
        with suppress(FileNotFoundError), os.scandir(self._directory / "run/ckpts") as entries:
            return {each.name for each in entries if UNFINISHED.match(each.name) and each.is_dir()}
        return set()

    def _being_written(self) -> str:
        """Returns the name of the checkpoint that this start is writing, "" if there is none.

        One that is being removed has such a name, too, but an earlier position.
        """
        complete = max(self._root.names(), key=name_order, default="")
        for name in self._unfinished() - self._left:
            if name_order(name[1:].partition(".")[0]) > name_order(complete):
                return name
        return ""

    def _await(self, kill: Kill, started: StartedRun) -> bool:
        """Waits for the moment of a kill; returns whether the run has not ended before."""
        if kill.aim == "starting":
            return started.sleep(kill.moment * STARTING_S) and self._await_ranks(started)
        num_saves = 1 + int(kill.moment * 3) if kill.aim == "writing" else 1
        seen: set[str] = set()
        begin = time.monotonic()
        while len(seen) < num_saves:
            seen |= {self._being_written()} - {""}
            if not started.sleep(0.001):
                return False
            if seen and not self._ranks:  # later, this would take time between looking and killing
                self._know(started)
            if time.monotonic() - begin > TRAINING_S:
                self.run.problems.append("the run has written no checkpoint")
                return self._await_ranks(started)
        if kill.aim == "training":
            return started.sleep(kill.moment * 2 * EVERY_S)
        # Anywhere in the time of writing; if this one was faster, at the begin of the next one.
        is_running = started.sleep(kill.chance * self._reference.write_s)
        while is_running and not self._being_written():
            is_running = started.sleep(0.001)
        return is_running

    def _await_ranks(self, started: StartedRun) -> bool:
        while len(self._ranks) < self.run.command.num_ranks:
            if not started.sleep(0.01):
                return False
            self._know(started)
        return True

    def _know(self, started: StartedRun) -> None:
        """Notes the ranks of this start, and the files in /dev/shm that they have mapped."""
        self._ranks = [process for _, process in sorted(started.ranks().items())]
        for process in self._ranks:
            with suppress(psutil.Error, OSError):
                paths = {Path(each.path) for each in process.memory_maps()}
                self._shared |= {path for path in paths if path.parent == SHM and path.exists()}

    def _strike(self, kill: Kill, started: StartedRun) -> None:
        victims = self._ranks
        if kill.victim == "a rank":
            victims = [victims[int(kill.chance * len(victims))]]
        elif kill.victim == "the launcher":
            victims = [psutil.Process(started.launcher.pid)]
        kill.writing = self._being_written()
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.kill()

    def _examine(self, kill: Kill, num_new_segments: int) -> None:
        """Looks at what a kill has left."""
        if num_new_segments != 1 and (kill.aim != "starting" or num_new_segments):
            self.run.problems.append(f"the record has {num_new_segments} more segments, not 1")
        kill.has_segment = num_new_segments == 1
        for name in self._root.names():
            try:
                Checkpoint(self._directory / "run/ckpts" / name).verify()
                kill.num_good += 1
            except CheckpointError as error:
                self.run.problems.append(f"not good: {error}")
        newest = self._root.newest()
        if newest is not None:
            kill.newest = (newest.position.epoch, newest.position.step)

    def _judge(self) -> None:
        """Compares the end of the run with the reference, and the losses with the interval."""
        run, directory = self.run, self._directory / "run"
        kills = [kill for kill in run.kills if kill.has_segment]
        run.problems += self._reference.differences(directory)
        left = [path.name for path in (directory / "ckpts").iterdir() if path.name[0] == "."]
        run.problems += [f"an unfinished checkpoint is left: {name}" for name in left]
        segments = segments_of(json.loads((directory / "run.json").read_text()))
        if len(segments) != len(kills) + 1:
            run.problems.append(f"the record has {len(segments)} segments, not {len(kills) + 1}")
            return
        for kill, before, after in zip(kills, segments, segments[1:], strict=False):
            begin = (after["begin"]["epoch"], after["begin"]["step"])
            if begin != kill.newest:
                run.problems.append(f"a segment begins at {begin}, not at {kill.newest}")
            kill.lost_steps = before.get("lost_steps")
            if kill.lost_steps is None:
                run.problems.append("the record does not say how many steps were lost")
            elif run.command.interval == "steps" and kill.lost_steps > kill.most_lost:
                run.problems.append(f"{kill.lost_steps} steps were lost")


def segments_of(record: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Returns the segments of a record, which lists them if it was continued."""
    return [] if record is None else record.get("segments") or [record]


def execute_all(
    num_kills: int, seed: int, num_jobs: int, directory: Path, engine: str = "auto"
) -> list[KilledRun]:
    """Kills so often that enough kills count: further runs replace those that came too late."""
    for name in MODELS:
        ensure(find_benchmark(name).recipe, "small", 2019)
    references: dict[Command, Reference] = {}
    lock = threading.Lock()

    def execute(run: KilledRun) -> KilledRun:
        with lock:
            if run.command not in references:
                place = directory / f"of-{len(references)}"
                references[run.command] = Reference(run.command, place)
        where = Path(tempfile.mkdtemp(dir=directory)) / "killed"
        return Killer(run, where, references[run.command]).execute()

    done: list[KilledRun] = []
    with ThreadPoolExecutor(num_jobs) as pool:
        for attempt in range(MAX_ATTEMPTS):
            drawn = draw(num_kills - len(kills_of(done)), seed + attempt, engine)
            for run in pool.map(execute, drawn):
                print(run, flush=True)
                done.append(run)
    return done


def kills_of(runs: list[KilledRun]) -> list[Kill]:
    """Returns the kills that count."""
    return [kill for run in runs for kill in run.kills if kill.counts]


def is_too_easy(runs: list[KilledRun]) -> bool:
    """Returns whether fewer than a third of the kills have hit a checkpoint being written."""
    kills = kills_of(runs)
    return 3 * sum(bool(kill.writing) for kill in kills) < len(kills)


def summary(runs: list[KilledRun]) -> str:
    """Returns the results in some lines."""
    kills = kills_of(runs)
    victims = Counter(kill.victim for kill in kills)
    lost = [kill.lost_steps for kill in kills if kill.lost_steps is not None]
    num_equal = sum(not run.problems for run in runs)
    return f"""\
{len(kills)} kills: {", ".join(f"{num} of {each}" for each, num in victims.items())}
{sum(bool(kill.writing) for kill in kills)} while a checkpoint was being written
{sum(kill.num_good for kill in kills)} checkpoints were verified as a whole
a kill lost {max(lost, default=0)} steps at most
{sum(run.num_starts for run in runs)} starts, {sum(run.num_segments for run in runs)} segments
{num_equal} of {len(runs)} runs ended ok, equal bit for bit to one that was not killed"""


def main() -> None:
    """Runs the test; exits with 1 if a run has failed it."""
    with fault_test(__doc__ or "", "kills") as (arguments, directory):
        options = arguments.seed, arguments.jobs, directory, arguments.engine
        runs = execute_all(arguments.kills, *options)
    print(summary(runs))
    sys.exit(any(run.problems for run in runs) or is_too_easy(runs))


if __name__ == "__main__":
    main()
