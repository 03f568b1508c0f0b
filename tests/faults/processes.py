"""Starting a run whose processes can be found and killed, however they are related."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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


@contextmanager
def fault_test(doc: str, counted: str) -> Iterator[tuple[argparse.Namespace, Path]]:
    """Reads the options of a program, and makes the directory of its runs and their data.

    Args:
        doc: The program's docstring.
        counted: What its main option counts.
    """
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument(f"--{counted}", type=int, default=100, help=f"number of {counted}")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of what happens")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--engine", default="auto", help="what averages gradients")
    arguments = parser.parse_args()
    # What nohup, or a shell in the background, has this program ignore, its children must notice.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    print(f"{getattr(arguments, counted)} {counted}, --seed {arguments.seed}", flush=True)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as directory:
        os.environ.setdefault("CANDLE_DATA_DIR", f"{directory}/data")
        yield arguments, Path(directory)
    print(f"\nin {(time.monotonic() - begin) / 60:.1f} minutes:")


class StartedRun:
    """A run that has been started, with all its processes; `number` counts those of a directory."""

    def __init__(
        self,
        benchmark: str,
        starter: str,
        num_ranks: int,
        flags: str,
        directory: Path,
        number: int = 0,
    ) -> None:
        self.mark = f"{directory} {number}"
        self.record_path = directory / "run/run.json"
        self.log = directory / (f"output-{number}" if number else "output")
        output = ["--output_dir", str(directory), "--experiment_id", ".", "--run_id", "run"]
        options = [*flags.split(), *output]
        if starter == "mpirun":
            script = find_benchmark(benchmark).script
            command = mpirun(num_ranks, [sys.executable, str(script), *options]).command
        else:
            program = [sys.executable, "-m", "candle_p1.cli", "run", benchmark]
            command = [*program, "--np", str(num_ranks), "--", *options]
        files = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        environment = os.environ | {MARK: self.mark}
        with self.log.open("wb") as log:
            self.launcher = subprocess.Popen(
                command, stdout=log, env=environment, start_new_session=True, **files
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

    def await_end(self, limit_s: float, look: Callable[[], Any] = lambda: None) -> float | None:
        """Waits until no process is left, and looks at the run again and again.

        Returns how long that took, in s; None if it took too long.
        """
        begin = time.monotonic()
        while time.monotonic() - begin < limit_s:
            look()
            if self.launcher.poll() is not None and not self.processes():
                return time.monotonic() - begin
            time.sleep(0.1)
        return None

    def sleep(self, seconds: float) -> bool:
        """Sleeps until the run ends, at most so long; returns whether it is still going on."""
        end = time.monotonic() + seconds
        while self.launcher.poll() is None:
            left_s = end - time.monotonic()
            if left_s <= 0:
                return True
            time.sleep(min(left_s, 0.05))
        return False

    def left(self) -> str:
        """Returns the processes that are alive, as text."""
        return ", ".join(map(str, self.processes()))

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
        with suppress(FileNotFoundError):
            return dict(json.loads(self.record_path.read_text()))
        return None

    def output(self) -> str:
        """Returns what the run has printed."""
        return self.log.read_text(errors="replace")


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}
