"""Starting a run whose processes can be found and killed, however they are related."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from candle_p1.benchmark import find_benchmark
from candle_p1.cluster.launchers import mpirun

MARK = "FAULT_TEST_RUN"
"""An environment variable by which all processes of a run are found."""
STARTERS = ("candle-p1", "mpirun")
LIMIT_S = 30.0
"""How long the processes of a run may take to end."""


class StartedRun:
    """A run that has been started, with all its processes; `number` counts those of a directory."""

    def __init__(
        self,
        benchmark: str,
        starter: str,
        num_ranks: int,
        flags: list[str],
        directory: Path,
        number: int = 0,
    ) -> None:
        self.mark = f"{directory} {number}"
        self.record_path = directory / "run/run.json"
        self.log = directory / (f"output-{number}" if number else "output")
        flags = [*flags, "--output_dir", str(directory), "--experiment_id", ".", "--run_id", "run"]
        if starter == "mpirun":
            script = find_benchmark(benchmark).script
            command = mpirun(num_ranks, [sys.executable, str(script), *flags]).command
        else:
            program = [sys.executable, "-m", "candle_p1.cli", "run", benchmark]
            command = [*program, "--np", str(num_ranks), "--", *flags]
        with self.log.open("wb") as output:
            self.launcher = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {MARK: self.mark},
                start_new_session=True,
            )

    def processes(self) -> list[psutil.Process]:
        """Returns the processes of this run that are alive."""
        found = []
        for pid in psutil.pids():  # psutil.process_iter must not be used by several threads
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if _environment(process).get(MARK) == self.mark:
                    found.append(process)
        return found

    def ranks(self) -> dict[int, psutil.Process]:
        """Returns the ranks that are alive; they may have children with the same environment."""
        found = {}
        for each in self.processes():
            with suppress(psutil.Error):
                rank = _environment(each).get("OMPI_COMM_WORLD_RANK")
                if rank is not None and each.ppid() == self.launcher.pid:
                    found[int(rank)] = each
        return found

    def await_end(self, limit_s: float) -> float | None:
        """Waits until no process is left; returns how long that took, None if it took too long."""
        begin = time.monotonic()
        while time.monotonic() - begin < limit_s:
            if self.launcher.poll() is not None and not self.processes():
                return time.monotonic() - begin
            time.sleep(0.1)
        return None

    def left(self) -> str:
        """Returns the processes that are alive, as text."""
        return ", ".join(f"{each.pid}: {' '.join(_cmdline(each)[:4])}" for each in self.processes())

    def clear(self) -> None:
        """Kills whatever is left."""
        for each in self.processes():
            with suppress(psutil.Error):
                each.kill()
        self.launcher.wait()

    def read_record(self) -> dict[str, Any] | None:
        """Returns the record, if there is one.

        Raises:
            ValueError: It is incomplete.
        """
        try:
            record: dict[str, Any] = json.loads(self.record_path.read_text())
        except FileNotFoundError:
            return None
        return record

    def output(self) -> str:
        """Returns what the run has printed."""
        return self.log.read_text(errors="replace")


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return ["?"]
