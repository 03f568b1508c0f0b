"""A run of a simulated job, which shows what its ranks send each other in every phase.

The ranks call what those of a real run call, in the order of candle_p1.train; they read real files,
and write real checkpoints and a real record. What TensorFlow would do is left out, and with it what
Horovod sends: the broadcast of the model and the averages of gradients. Times of steps, sums of
metrics and predictions of the same form stand in for what comes of it. The watchdog is left out,
too: ranks reach it by TCP.
"""

from __future__ import annotations

import signal
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.bench.record import synthetic_communication, synthetic_phases
from candle_p1.bench.stand_ins import (
    HOUR_S,
    METRICS,
    ModelWithMetrics,
    WithoutKeras,
    write_power,
)
from candle_p1.benchmark import find_benchmark
from candle_p1.checkpoints.manifest import Position
from candle_p1.checkpoints.source import ArrayInMemory
from candle_p1.checkpoints.writer import CheckpointWriter
from candle_p1.data.reader import Reader, describe_together, loading
from candle_p1.data.samples import DataSet, Samples
from candle_p1.data.transforms import scale_features
from candle_p1.distributed.comm import Attempt, check_ranks, on_first_rank
from candle_p1.distributed.gpus import check_gpus
from candle_p1.distributed.launch_environment import LaunchedRank
from candle_p1.distributed.metrics import reduce_metrics
from candle_p1.distributed.mpi_library import check_thread_level
from candle_p1.distributed.timeline import open_timeline
from candle_p1.errors import DataError, DistributedError, RunInterrupted
from candle_p1.instrument.epochs import Epoch
from candle_p1.instrument.phases import PhaseTimer
from candle_p1.instrument.profiles import CallProfile
from candle_p1.instrument.tensorboard import check_tensorboard
from candle_p1.models.evaluation import find_nan
from candle_p1.models.scores import ConfusionScore
from candle_p1.records import environment
from candle_p1.records.record import make_record, utc_now
from candle_p1.records.types import SCHEMA_VERSION
from candle_p1.scaling import ScalingPlan, epochs_of_ranks
from candle_p1.training.agreement import check_same_data, check_same_parameters
from candle_p1.training.epoch_facts import GatheredEpochs, epoch_arrays
from candle_p1.training.lifecycle import Run
from candle_p1.training.measured import describe_rank
from candle_p1.training.opening import RunOpening
from candle_p1.training.power_meter import PowerMeter
from candle_p1.training.pulse import Pulse
from candle_p1.training.restart import Restart
from candle_p1.training.screen import Screen
from candle_p1.training.setup import locate_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from candle_p1.benchmark import Benchmark
    from candle_p1.data.csv import Loading
    from candle_p1.data.reader import FileSet
    from candle_p1.data.table import Table
    from candle_p1.distributed.simulated import SimulatedCommunicator
    from candle_p1.instrument.collectives import CommunicationLog
    from candle_p1.instrument.phases import Phase, PhasePath
    from candle_p1.parameters.parameter_set import ParameterSet

BENCHMARK = "nt3"
NUM_EPOCHS = 8
NUM_STEPS = 500
"""In each epoch. P1B3 has 9,001; what is sent must not depend on it."""
NUM_ROWS, NUM_COLUMNS = 4096, 8
STATE = np.zeros((1024, 512), np.float32)


@dataclass(frozen=True)
class Scenario:
    """What all ranks are given.

    Attributes:
        benchmark: The benchmark.
        params: Its parameters.
        directory: For all files.
        block_bytes: How much a rank reads at a time.
        phases: Times of phases, which stand for those of every rank.
        communication: The same for the log of communication.
    """

    benchmark: Benchmark
    params: ParameterSet
    directory: Path
    block_bytes: int
    phases: dict[PhasePath, Phase]
    communication: CommunicationLog

    @classmethod
    def make(cls, directory: Path, num_ranks: int) -> Scenario:
        """Writes the files that a run needs, and returns what its ranks are given.

        Args:
            directory: Where everything goes.
            num_ranks: The number of ranks, each of which gets a block of the file to read.
        """
        table, recording = directory / "table.csv", directory / "power.csv"
        line = ",".join(["0.25"] * NUM_COLUMNS) + "\n"
        table.write_text(line * NUM_ROWS)
        write_power(recording)
        benchmark = find_benchmark(BENCHMARK)
        flags = {
            "train_data": table,
            "test_data": table,
            "output_dir": directory / "output",
            "epochs": NUM_EPOCHS,
            "epochs_scaling": "weak",
            "cache_dir": directory / "cache",
            "power": f"replay:{recording}",
            "power_hz": 0.1,
        }
        argv = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        params = benchmark.bind(benchmark.declaration.parse(argv, benchmark.model_file))
        rng = np.random.default_rng(num_ranks)
        return cls(
            benchmark,
            params,
            directory,
            block_bytes=-(-table.stat().st_size // num_ranks),
            phases=synthetic_phases(rng, time.perf_counter(), 1.0),
            communication=synthetic_communication(rng),
        )


class RankOfRun:
    """One rank of the run. Its methods are the phases, in the order of `PHASES`; all collective.

    Args:
        scenario: What all ranks are given.
        comm: The ranks.
    """

    run: Run
    files: FileSet
    reader: Reader
    table: Table
    epochs: GatheredEpochs
    writer: CheckpointWriter
    plan: ScalingPlan

    def __init__(self, scenario: Scenario, comm: SimulatedCommunicator) -> None:
        self._scenario, self._comm, self._params = scenario, comm, scenario.params
        self._start_s = time.perf_counter()
        self._model = ModelWithMetrics()
        self._resources = ExitStack()
        self._timer = SimpleNamespace(epochs=[])
        self._validation = SimpleNamespace(seconds=[])

    def close(self) -> None:
        """Lets go of what the run holds."""
        self._resources.close()

    def begin(self) -> None:
        """Compares the ranks and their parameters, and opens the run's directory and record."""
        comm = self._comm
        params = Attempt(lambda: self._params).agree(comm)
        check_ranks(LaunchedRank("mpirun", comm.rank, comm.size, None, None, None, "node"), comm)
        check_same_parameters(params, comm)
        on_first_rank(partial(self._scenario.benchmark.check_tables, params), comm)
        for check in (
            partial(epochs_of_ranks, params, comm.size),
            partial(check_tensorboard, params),
            partial(open_timeline, params["timeline"], comm),
        ):
            Attempt(check).agree(comm)
        power = PowerMeter(comm, params["power"], params["power_hz"], params["gpus"])
        self._resources.enter_context(power)
        record = make_record(
            {
                "schema_version": SCHEMA_VERSION,
                "status": "running",
                "benchmark": BENCHMARK,
                "started": utc_now(),
                "command": sys.argv,
                "num_ranks": comm.size,
                "num_nodes": comm.num_nodes,
                "launcher": "none",
                "parameters": {
                    name: {"value": value, "origin": str(params.origin(name))}
                    for name, value in params.items()
                },
            }
        )
        screen = Attempt(lambda: Screen(1)).agree(comm)  # silent on every rank
        opening = RunOpening(BENCHMARK, params)
        self._resources.callback(opening.close)
        on_first_rank(opening.find, comm)
        watchdog: Any = SimpleNamespace(
            steps=NUM_STEPS, save_signal=None, report_record=lambda path: None
        )
        directory, part = on_first_rank(partial(opening.open, record, watchdog), comm)
        self.run = Run(
            directory,
            opening.record or record,
            PhaseTimer(),
            self._scenario.communication,
            power,
            CallProfile(False),
            screen,
            comm,
            watchdog,
            self._start_s,
            part,
        )
        Restart.of(opening.restart, comm)
        self.run.result_directory(params["save_path"])
        check_gpus(comm, has_gpu=False, request=None, backend="tensorflow", node="node")
        check_thread_level(comm)

    def find_files(self) -> None:
        """Has rank 0 find, or make, the files."""
        found = on_first_rank(
            partial(locate_files, self._scenario.benchmark, self._params), self._comm
        )
        # As if it were known: otherwise the digest would be kept for a file that goes away.
        self.files = replace(found, sha256=dict.fromkeys(found.paths, "0" * 64))

    def load_parallel(self) -> None:
        """Reads the file, a block on each rank."""
        how = replace(self._loading(), block_bytes=self._scenario.block_bytes)
        self.reader = Reader(self.files, how)
        self.table = self.reader.read("train")

    def make_cache(self) -> None:
        """Reads the file and makes its cache."""
        self._read_cached()

    def load_cached(self) -> None:
        """Reads the cache."""
        self._read_cached()

    def _read_cached(self) -> None:
        Reader(self.files, replace(self._loading(), method="cached")).read("train")

    def _loading(self) -> Loading:
        return loading(self._params, self._comm, num_threads=1)

    def preprocess(self) -> None:
        """Computes the digest of what was read, and scales it."""
        self.reader.digest()
        scale_features("maxabs", self.table.values)

    def meet(self) -> None:
        """Meets before the broadcast: errors so far, and whether all have read the same."""
        self.plan = Attempt(self._make_plan).agree(self._comm)
        check_same_data(self.reader, self._comm)

    def _make_plan(self) -> ScalingPlan:
        return ScalingPlan.make(
            num_ranks=self._comm.size,
            epochs=NUM_EPOCHS,
            batch_size=4,
            learning_rate=0.001,
            num_samples=NUM_ROWS,
            epochs_scaling="weak",
        )

    def train_epoch(self) -> None:
        """Sums the metrics of training and validation; agrees on the time and on signals."""
        comm = self._comm
        for _ in range(2):
            reduce_metrics(self._model, comm)
        Pulse(comm, HOUR_S, lambda: False).agree()
        comm.broadcast(False)  # as TimeLimit does, which is a callback of Keras
        first = None if self._timer.epochs else 0
        self._timer.epochs.append(Epoch(1.0, 2.0, _STEPS_S, 0.1, 0.2, first))
        self._validation.seconds.append(0.5)

    def checkpoint(self) -> None:
        """Saves a checkpoint within an epoch."""
        comm, run = self._comm, self.run
        for _ in range(NUM_EPOCHS - len(self._timer.epochs)):  # those that were not counted
            self._timer.epochs.append(self._timer.epochs[0])
            self._validation.seconds.append(0.5)
        history: Any = SimpleNamespace(history={name: [0.5] * NUM_EPOCHS for name in METRICS})
        timer: Any = self._timer
        validation: Any = self._validation
        self.epochs = GatheredEpochs(comm, timer, validation, history, NUM_ROWS)
        root = run.directory / "ckpts"
        self.writer = CheckpointWriter(comm, root, say=run.screen.say)
        own = {f"seed{number}": np.zeros(2, np.uint32) for number in range(2)}
        own |= {f"metric{number}": np.zeros((), np.float32) for number in range(2 * len(METRICS))}
        own |= epoch_arrays(self._timer.epochs[-1])
        self.writer.best_is_lost()
        facts = {"run": run.run_facts(), "plan": self.plan.to_dict(), **self.epochs.to_facts()}
        arrays = {"weights": ArrayInMemory(STATE)}
        if not self.writer.save(Position(NUM_EPOCHS, 1), arrays, own, facts, wait=True):
            raise DataError("the checkpoint could not be written", root)

    def evaluate(self) -> None:
        """Sums the metrics and the scores of the test, and looks for losses that are no numbers."""
        comm = self._comm
        nothing = Samples(np.zeros((0, NUM_COLUMNS)), np.zeros((0, 2)))
        data = DataSet(nothing, nothing, nothing)
        evaluated = WithoutKeras(self._model, data, self._params, comm, self.run.directory, True)
        reduce_metrics(self._model, comm)
        score = evaluated.score(nothing, ConfusionScore(2))
        if score.sums.sum() != comm.size:
            raise DistributedError("the scores of the ranks were not added")
        comm.broadcast(find_nan({}, {}))

    def end(self) -> None:
        """Gathers what all ranks have measured, and writes the record."""
        self._finish()

    def end_after_signal(self) -> None:
        """Does the same for a run that a signal to every rank has ended."""
        watchdog: Any = self.run.watchdog
        watchdog.save_signal = int(signal.SIGUSR1)
        with suppress(RunInterrupted):
            self._finish(interrupted=True)

    def fail_together(self) -> None:
        """Agrees on the error of a file that no rank can read."""

        def fail() -> None:
            raise DataError("the file is empty", self.files.paths["train"])

        with suppress(DataError):
            Attempt(fail).agree(self._comm)

    def _finish(self, **how: Any) -> None:
        comm, run = self._comm, self.run
        run.phases.phases = self._scenario.phases
        self.epochs.gather()
        checkpoints = self.writer.close()
        files = describe_together(self.reader, comm, self._start_s)
        run.finish(
            describe_rank(comm, threads=1, device="cpu", num_cores=1),
            logged=True,
            checkpoints=checkpoints,
            data={"synthetic": True, "loader": "parallel", "files": files},
            plan=self.plan.to_dict(),
            model={"num_parameters": STATE.size, "optimizer": "sgd"},
            distributed={"backend": "serial"},
            training={"epochs": self.epochs.facts},
            quality={},
            environment=environment.capture() if comm.rank == 0 else {},
            **how,
        )


PHASES: dict[str, Callable[[RankOfRun], None]] = {
    "begin": RankOfRun.begin,
    "find the files": RankOfRun.find_files,
    "load, parallel": RankOfRun.load_parallel,
    "load, first time cached": RankOfRun.make_cache,
    "load, cached": RankOfRun.load_cached,
    "digest and scale": RankOfRun.preprocess,
    "meet before the broadcast": RankOfRun.meet,
    "an epoch": RankOfRun.train_epoch,
    "a checkpoint": RankOfRun.checkpoint,
    "evaluate": RankOfRun.evaluate,
    "end": RankOfRun.end,
    "end after a signal": RankOfRun.end_after_signal,
    "an error of all ranks": RankOfRun.fail_together,
}
"""The phases, in order. The last two do not occur in a run that ends well."""

_STEPS_S = [0.2] * NUM_STEPS
