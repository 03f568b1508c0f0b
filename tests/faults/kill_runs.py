"""Kills ranks and launchers of real runs at random moments, and checks how the runs end.

Each run trains NT3 on two ranks, started by `candle-p1 run` or by mpirun itself. At a random
moment one of its processes gets a random signal. The run passes if within the time limit none of
its processes is left, its exit code is not 0, and its record, if there was one when the signal
came, says what docs/faults.md promises. Whenever the record is there, it must be complete.

Usage: python -m tests.faults.kill_runs [--runs 100] [--seed N] [--jobs 2] [--engine jax]
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from candle_p1.benchmark import find_benchmark
from candle_p1.datasets.synthetic import ensure
from tests.faults.processes import LIMIT_S, STARTERS, StartedRun, fault_test

FLAGS = "--size small --conv 4 20 1 --pool 10 --dense 8 --epochs 100000 --epochs_scaling weak"
MOMENTS = {"start": (0.0, 2.0), "startup": (2.0, 10.0), "training": (0.0, 4.0)}
"""When signals come, in s: after the start, or after training has begun."""
TRAINING_S = 120.0
"""How long a run may take until it trains, on a busy machine."""
NUM_RANKS = 2
SIGNALS = ("KILL", "TERM", "INT", "HUP", "STOP")
VICTIMS = ("launcher", "rank 0", "rank 1")
INTERRUPTIONS = ("TERM", "INT", "HUP")


@dataclass
class Fault:
    """What happens to a run, and how it ended."""

    number: int
    starter: str
    victim: str
    signal: str
    period: str
    moment_s: float  # from when it begins its period; once it has been sent, from the start
    ended_s: float | None = None  # from the signal until no process was left
    code: int | None = None  # the launcher's
    status: str = "none"  # the record's
    rank: int | None = None
    problems: list[str] = field(default_factory=list)
    output: str = field(default="", repr=False)


def draw(number: int, seed: int) -> Fault:
    """Returns the fault of a run, which follows from the seed and its number."""
    chance = random.Random(f"{seed} {number}")
    period = chance.choice(list(MOMENTS))
    return Fault(
        number,
        starter=chance.choice(STARTERS),
        victim=chance.choice(VICTIMS),
        signal=chance.choice(SIGNALS),
        period=period,
        moment_s=chance.uniform(*MOMENTS[period]),
    )


class FaultyRun:
    """A run, and the fault that it is given."""

    def __init__(self, fault: Fault, directory: Path, engine: str = "auto") -> None:
        self.fault, self._directory = fault, directory
        self._flags = f"{FLAGS} --engine {engine}"

    def execute(self) -> Fault:
        """Starts the run, sends the signal, waits for the end and judges it."""
        fault = self.fault
        self._directory.mkdir(parents=True)
        start = time.monotonic()
        self._run = StartedRun("nt3", fault.starter, NUM_RANKS, self._flags, self._directory)
        try:
            had_record = self._send_signal(start)
            fault.ended_s = self._run.await_end(LIMIT_S, self._read_record)
            if fault.ended_s is None:
                fault.problems.append(f"still running after {LIMIT_S:g} s: {self._run.left()}")
            self._judge(had_record)
        finally:
            self._run.clear()
        fault.output = self._run.output()
        return fault

    def _send_signal(self, start: float) -> bool:
        """Sends the signal at its moment; returns whether the run had a record by then."""
        fault, launcher, record = self.fault, self._run.launcher, self._run.record_path
        since = start
        while fault.period == "training" and not record.with_name("history.csv").exists():
            since = time.monotonic()
            if since - start > TRAINING_S or launcher.poll() is not None:
                fault.problems.append("the run never trained")
                break
            time.sleep(0.05)
        while time.monotonic() - since < fault.moment_s:
            self._read_record()
            time.sleep(0.01)
        victim: psutil.Process | None = psutil.Process(launcher.pid)
        if fault.victim != "launcher":
            rank = int(fault.victim.removeprefix("rank "))
            while (victim := self._run.ranks().get(rank)) is None:
                if launcher.poll() is not None:
                    raise RuntimeError(f"the run ended before rank {rank} began: {self._directory}")
                time.sleep(0.01)
        elif fault.signal == "STOP" and 0 not in self._run.ranks():
            # There is no run yet, only a launcher that has been suspended. It goes on.
            launcher.send_signal(signal.SIGSTOP)
            time.sleep(1)
            launcher.send_signal(signal.SIGCONT)
            while 0 not in self._run.ranks():
                time.sleep(0.01)
        fault.moment_s = time.monotonic() - start
        if launcher.poll() is not None:
            fault.problems.append("the run ended before the signal")
        had_record = record.exists()
        assert victim is not None
        victim.send_signal(signal.Signals[f"SIG{fault.signal}"])
        return had_record

    def _judge(self, had_record: bool) -> None:
        fault = self.fault
        fault.code = self._run.launcher.poll()
        if fault.code == 0:
            fault.problems.append("the exit code is 0")
        record = self._read_record()
        if record is None:
            if had_record:
                fault.problems.append("the record has gone")
            return
        fault.status = record["status"]
        fault.rank = record.get("failure", {}).get("rank")
        expected = "interrupted" if fault.signal in INTERRUPTIONS else "failed"
        if fault.status != expected:
            fault.problems.append(f"expected {expected}")
        if fault.victim != "launcher" and fault.victim != f"rank {fault.rank}":
            fault.problems.append(f"expected {fault.victim}")
        if fault.victim == "launcher" and expected == "failed" and fault.rank is not None:
            fault.problems.append("no rank is to blame")

    def _read_record(self) -> dict[str, Any] | None:
        """Returns the record, if there is one; it must always be complete."""
        try:
            return self._run.read_record()
        except ValueError as error:
            self.fault.problems.append(f"the record was incomplete: {error}")
            return None


def main() -> None:
    """Runs the test; exits with 1 if a run has failed it."""
    faults = []
    with fault_test(__doc__ or "", "runs") as (arguments, directory):
        ensure(find_benchmark("nt3").recipe, "small", 2019)
        drawn = [draw(number, arguments.seed) for number in range(arguments.runs)]
        runs = [FaultyRun(each, directory / f"{each.number}", arguments.engine) for each in drawn]
        with ThreadPoolExecutor(arguments.jobs) as pool:
            for fault in pool.map(FaultyRun.execute, runs):
                print(fault, flush=True)
                if fault.problems:
                    print("".join(f"     | {line}\n" for line in fault.output.splitlines()[-30:]))
                faults.append(fault)
    print(_summary(faults))
    sys.exit(any(fault.problems for fault in faults))


def _summary(faults: list[Fault]) -> str:
    """Returns how many passed, by victim and signal, and how long the longest took to end."""
    drawn = Counter((each.victim, each.signal) for each in faults)
    passed = Counter((each.victim, each.signal) for each in faults if not each.problems)
    lines = [
        f"{each[1]:4} to {each[0]:8}: {passed[each]} of {drawn[each]}" for each in sorted(drawn)
    ]
    longest_s = max(each.ended_s or LIMIT_S for each in faults)
    statuses = ", ".join(
        f"{num} {of}" for of, num in Counter(each.status for each in faults).items()
    )
    total = f"{passed.total()} of {len(faults)} passed, gone after {longest_s:.1f} s at most"
    return "\n".join([*lines, f"{total}; records: {statuses}"])


if __name__ == "__main__":
    main()
