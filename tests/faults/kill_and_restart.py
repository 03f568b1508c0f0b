"""Kills runs with checkpoints at random moments, restarts them, and compares how they end.

NT3 and P1B1 are trained with checkpoints every few steps or seconds. At random moments one rank,
all ranks or the launcher are killed by SIGKILL; at least every second kill is aimed at a checkpoint
that is being written. The same command is then given again, until the run is "ok". After every
kill, no process and nothing in /dev/shm may be left, and every complete checkpoint must verify as a
whole. The record of the restarted run says how many steps were lost. In the end the record must
have a part for each start that came so far as to begin one, and weights, optimizer, the states of
random layers and history.csv must be equal, bit for bit, to those of a run of the same command that
nobody killed.

Usage: python -m tests.faults.kill_and_restart [--kills 100] [--seed N] [--jobs 2]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from candle_p1.benchmark import find_benchmark
from candle_p1.checkpoints.checkpoint import Checkpoint
from candle_p1.checkpoints.root import CheckpointRoot, name_order
from candle_p1.datasets.synthetic import ensure
from candle_p1.errors import CheckpointError
from tests.faults.killed_run import EVERY_S, MODELS, MOST_LOST, STARTING_S, Kill, KilledRun, draw
from tests.faults.processes import LIMIT_S, StartedRun
from tests.faults.unkilled_run import TRAINING_S, References

SKIPPED = "because the one before is still being written"
"""What a run prints when it skips a checkpoint, for the first one only."""
MAX_ATTEMPTS = 4
"""How often runs are added because kills came after their runs had ended."""
SHM = Path("/dev/shm")
UNFINISHED = re.compile(r"\.epoch-.*\.tmp-")


def unfinished(root: Path) -> set[str]:
    """Returns the names of checkpoints that are not complete, or no longer."""
    with suppress(FileNotFoundError), os.scandir(root) as entries:
        return {each.name for each in entries if UNFINISHED.match(each.name) and each.is_dir()}
    return set()


class Killer:
    """Executes a KilledRun.

    Args:
        run: The run.
        directory: A directory for its files, which is made.
        references: What it has to end like.
    """

    def __init__(self, run: KilledRun, directory: Path, references: References) -> None:
        self.run, self._directory = run, directory
        self._root = directory / "run/ckpts"
        self._reference = references.of(run.command)
        self._left: set[str] = set()  # unfinished checkpoints that were there before this start
        self._ranks: list[psutil.Process] = []
        self._shared: set[Path] = set()  # what this start has in /dev/shm

    def execute(self) -> KilledRun:
        """Kills and restarts until the run is "ok"; it may be over before all its kills."""
        self._directory.mkdir(parents=True)
        for kill in [*self.run.kills, None]:
            if not self._start(kill):
                break
        self._judge()
        return self.run

    def _start(self, kill: Kill | None) -> bool:
        """Starts the command and kills it, or lets it end; returns whether it has to go on."""
        run = self.run
        self._left, self._shared, self._ranks = unfinished(self._root), set(), []
        run.num_starts += 1
        command = run.command
        started = StartedRun(
            command.benchmark,
            run.starter,
            command.num_ranks,
            command.flags,
            self._directory,
            run.num_starts,
        )
        problems = run.problems if kill is None else kill.problems
        try:
            has_killed = kill is not None and self._await(kill, started)
            if kill is not None and has_killed:
                self._strike(kill, started)
            ended_s = started.await_end(LIMIT_S if has_killed else TRAINING_S)
            if ended_s is None:
                problems.append(f"still running: {started.left()}")
        finally:
            started.clear()
        run.output = started.output()
        left = sorted(path.name for path in self._shared if path.exists())
        if left:
            problems.append(f"left in {SHM}: {', '.join(left)}")
        record = self._read_record(started, problems)
        num_parts, run.num_parts = run.num_parts, number_of_parts(record)
        status = record["status"] if record else "none"
        if kill is not None and has_killed and status != "ok":
            kill.counts, kill.ended_s = True, ended_s
            kill.most_lost = most_lost(run.output)
            self._examine(kill, run.num_parts - num_parts)
            return True
        if status != "ok" or started.launcher.returncode != 0:
            problems.append(f"it ended with code {started.launcher.returncode} and is {status}")
        return False

    def _being_written(self) -> str:
        """Returns the name of the checkpoint that this start is writing, "" if there is none.

        One that is being removed has such a name, too, but an earlier position.
        """
        complete = max(CheckpointRoot(self._root).names(), key=name_order, default="")
        for name in unfinished(self._root) - self._left:
            if name_order(name[1:].partition(".")[0]) > name_order(complete):
                return name
        return ""

    def _await(self, kill: Kill, started: StartedRun) -> bool:
        """Waits for the moment of a kill; returns whether the run has not ended before."""
        if kill.aim == "starting":
            return self._sleep(kill.moment * STARTING_S, started) and self._await_ranks(started)
        num_saves = 1 + int(kill.moment * 3) if kill.aim == "writing" else 1
        seen: set[str] = set()
        begin = time.monotonic()
        while len(seen) < num_saves:
            seen |= {self._being_written()} - {""}
            if not self._sleep(0.001, started):
                return False
            if seen and not self._ranks:  # later, this would take time between looking and killing
                self._know(started)
            if time.monotonic() - begin > TRAINING_S:
                kill.problems.append("the run has written no checkpoint")
                return self._await_ranks(started)
        if kill.aim == "training":
            return self._sleep(kill.moment * 2 * EVERY_S, started)
        # Anywhere in the time of writing; if this one was faster, at the begin of the next one.
        is_running = self._sleep(chance_of(kill) * self._reference.write_s, started)
        while is_running and not self._being_written():
            is_running = self._sleep(0.001, started)
        return is_running

    def _await_ranks(self, started: StartedRun) -> bool:
        while len(self._ranks) < self.run.command.num_ranks:
            if not self._sleep(0.01, started):
                return False
            self._know(started)
        return True

    def _know(self, started: StartedRun) -> None:
        """Notes the ranks of this start, and what it has in /dev/shm."""
        self._ranks = [process for _, process in sorted(started.ranks().items())]
        self._shared = shared_files(self._ranks)

    def _sleep(self, seconds: float, started: StartedRun) -> bool:
        """Sleeps; returns whether the run is still going on."""
        end = time.monotonic() + seconds
        while started.launcher.poll() is None:
            left_s = end - time.monotonic()
            if left_s <= 0:
                return True
            time.sleep(min(left_s, 0.05))
        return False

    def _strike(self, kill: Kill, started: StartedRun) -> None:
        victims = self._ranks
        if kill.victim == "a rank":
            victims = [victims[int(chance_of(kill) * len(victims))]]
        elif kill.victim == "the launcher":
            victims = [psutil.Process(started.launcher.pid)]
        kill.writing = self._being_written()
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.kill()

    def _examine(self, kill: Kill, num_new_parts: int) -> None:
        """Looks at what a kill has left."""
        if kill.ended_s is None:
            return
        if num_new_parts != 1 and (kill.aim != "starting" or num_new_parts):
            kill.problems.append(f"the record has {num_new_parts} more parts, not 1")
        kill.has_part = num_new_parts == 1
        root = CheckpointRoot(self._root)
        for name in root.names():
            try:
                Checkpoint(self._root / name).verify()
                kill.num_good += 1
            except CheckpointError as error:
                kill.num_bad += 1
                kill.problems.append(f"not good: {error}")
        latest = root.latest()
        if latest is not None:
            kill.newest = (latest.position.epoch, latest.position.step)

    def _read_record(self, started: StartedRun, problems: list[str]) -> dict[str, Any] | None:
        try:
            return started.read_record()
        except ValueError as error:
            problems.append(f"the record is incomplete: {error}")
            return None

    def _judge(self) -> None:
        """Compares the end of the run with the reference, and the losses with the interval."""
        run, directory = self.run, self._directory / "run"
        if run.all_problems:
            return
        kills = [kill for kill in run.kills if kill.has_part]
        record: dict[str, Any] = json.loads((directory / "run.json").read_text())
        parts = record.get("parts", [record])
        if len(parts) != len(kills) + 1:
            run.problems.append(f"the record has {len(parts)} parts, not {len(kills) + 1}")
            return
        for kill, before, after in zip(kills, parts, parts[1:], strict=False):
            begin = (after["begin"]["epoch"], after["begin"]["step"])
            if begin != kill.newest:
                kill.problems.append(f"the next part begins at {begin}, not at {kill.newest}")
            kill.lost_steps = before.get("lost_steps")
            if kill.lost_steps is None:
                kill.problems.append("the record does not say how many steps were lost")
                continue
            kill.lost_intervals = self._reference.intervals(kill.lost_steps, record)
            if kill.lost_intervals > kill.most_lost:
                kill.problems.append(f"{kill.lost_steps} steps were lost")
        run.problems += self._reference.differences(directory)
        left = [path.name for path in (directory / "ckpts").iterdir() if path.name[0] == "."]
        if left:
            run.problems.append(f"unfinished checkpoints are left: {', '.join(left)}")


def chance_of(kill: Kill) -> float:
    """Returns a second number from 0 to 1 that follows from the moment of a kill."""
    return kill.moment * 1000 % 1


def most_lost(output: str) -> float:
    """Returns the intervals that a kill may cost: one more if a checkpoint was skipped."""
    return MOST_LOST + (SKIPPED in " ".join(output.split()))


def number_of_parts(record: dict[str, Any] | None) -> int:
    """Returns the number of parts of a record; one that was never continued does not list them."""
    return 0 if record is None else len(record.get("parts") or [record])


def shared_files(processes: list[psutil.Process]) -> set[Path]:
    """Returns the files in /dev/shm that processes have mapped and that have a name."""
    found = set()
    for process in processes:
        with suppress(psutil.Error, OSError):
            found |= {Path(each.path) for each in process.memory_maps()}
    return {path for path in found if path.parent == SHM and path.exists()}


def main() -> None:
    """Runs the test; exits with 1 if a run has failed it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="number of kills that count")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the kills")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    arguments = parser.parse_args()
    # A background process of a shell script ignores Ctrl-C, and so would all its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print(f"{arguments.kills} kills, --seed {arguments.seed}", flush=True)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills-") as directory:
        os.environ.setdefault("CANDLE_DATA_DIR", f"{directory}/data")
        runs = execute_all(arguments.kills, arguments.seed, arguments.jobs, Path(directory))
    print("\n".join(summary(runs, time.monotonic() - begin)))
    sys.exit(any(run.all_problems for run in runs) or is_too_easy(runs))


def execute_all(num_kills: int, seed: int, num_jobs: int, directory: Path) -> list[KilledRun]:
    """Kills so often that enough kills count: further runs replace those that came too late."""
    for name in MODELS:
        ensure(find_benchmark(name).recipe, "small", 2019)
    references = References(directory)
    done: list[KilledRun] = []
    with ThreadPoolExecutor(num_jobs) as pool:
        for attempt in range(MAX_ATTEMPTS):
            missing = num_kills - sum(kill.counts for run in done for kill in run.kills)
            if missing <= 0:
                break
            runs = draw(missing, seed + attempt)

            def execute(run: KilledRun, attempt: int = attempt) -> KilledRun:
                where = directory / f"{attempt}-{run.number}"
                return Killer(run, where, references).execute()

            for run in pool.map(execute, runs):
                print(run, flush=True)
                done.append(run)
    return done


def is_too_easy(runs: list[KilledRun]) -> bool:
    """Returns whether fewer than a third of the kills have hit a checkpoint being written."""
    kills = [kill for run in runs for kill in run.kills if kill.counts]
    return 3 * sum(bool(kill.writing) for kill in kills) < len(kills)


def summary(runs: list[KilledRun], seconds: float) -> list[str]:
    """Returns the results as lines."""
    kills = [kill for run in runs for kill in run.kills if kill.counts]
    victims = Counter(kill.victim for kill in kills)
    ranks = Counter(run.command.num_ranks for run in runs for kill in run.kills if kill.counts)
    lost = [kill.lost_intervals for kill in kills if kill.lost_intervals is not None]
    passed = sum(not run.all_problems for run in runs)
    ended = [kill.ended_s for kill in kills if kill.ended_s is not None]
    return [
        "",
        f"{len(kills)} kills in {seconds / 60:.1f} minutes: "
        + ", ".join(f"{num} of {victim}" for victim, num in sorted(victims.items()))
        + "; "
        + ", ".join(f"{num} on {size} ranks" for size, num in sorted(ranks.items())),
        f"{sum(bool(kill.writing) for kill in kills)} while a checkpoint was being written",
        f"{sum(kill.num_good for kill in kills)} complete checkpoints were verified as a whole"
        f" after kills, {sum(kill.num_bad for kill in kills)} could not be read",
        f"a kill lost {max(lost, default=0):.2f} intervals at most (allowed: {MOST_LOST:g}, the"
        " one since the last checkpoint and the one during which the next is being written; one"
        " more where a checkpoint was skipped)",
        f"all processes were gone {max(ended, default=0):.1f} s after a kill at the latest",
        f"{sum(run.num_starts for run in runs)} starts, {sum(run.num_parts for run in runs)} parts"
        " in the records (a start that was killed before its record began has none)",
        f"{passed} of {len(runs)} runs ended ok, with weights, optimizer, random states and"
        " history.csv equal bit for bit to those of a run that was not killed",
    ]


if __name__ == "__main__":
    main()
