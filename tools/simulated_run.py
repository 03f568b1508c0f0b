"""A run of a simulated job, which shows what its ranks send each other in every phase.

The ranks call what those of a real run call, in the order of candle_p1.train; they read real files,
and write real checkpoints and a real record. What TensorFlow would do is left out, and with it what
Horovod sends: the broadcast of the model and the averages of gradients. Times of steps, sums of
metrics and predictions of the same form take its place. The watchdog is left out, too: ranks reach
it by TCP.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from candle_p1.benchmark import Benchmark, find_benchmark
from candle_p1.checkpoints.writer import CheckpointWriter
from candle_p1.data.reader import Reader, describe_together, loading
from candle_p1.data.samples import DataSet, Samples
from candle_p1.data.transforms import scale_features
from candle_p1.distributed.callbacks import reduce_metrics
from candle_p1.distributed.comm import agree, check_ranks, on_first_rank
from candle_p1.distributed.gpus import check_gpus
from candle_p1.distributed.launch_environment import LaunchedRank
from candle_p1.distributed.mpi_library import check_thread_level
from candle_p1.distributed.reducers.horovod import open_timeline
from candle_p1.errors import DataError, RunInterrupted
from candle_p1.instrument.collectives import CommunicationLog
from candle_p1.instrument.epochs import Epoch
from candle_p1.instrument.logs import CallProfile, check_tensorboard
from candle_p1.instrument.phases import Phase, PhasePath, PhaseTimer, Usage
from candle_p1.models.evaluation import Trained, find_nan
from candle_p1.models.scores import ConfusionScore
from candle_p1.parameters.parameter_set import ParameterSet
from candle_p1.records import environment
from candle_p1.records.power_trace import Channel, Trace, write_traces
from candle_p1.records.record import write_record
from candle_p1.records.types import Position
from candle_p1.scaling import ScalingPlan, epochs_of_ranks
from candle_p1.training.epochs import GatheredEpochs, epoch_arrays
from candle_p1.training.lifecycle import Run
from candle_p1.training.measured import PowerMeter, describe_rank, first_record
from candle_p1.training.restart import Restart
from candle_p1.training.run_directory import RunDirectory
from candle_p1.training.saver import SaveTrigger
from candle_p1.training.screen import Screen
from candle_p1.training.setup import check_same_data, check_same_parameters, locate_files
from tools.simulated import ArrayInMemory, SimulatedCommunicator

BENCHMARK = "nt3"
METRICS = ("loss", "accuracy")
NUM_EPOCHS = 8
STEPS_S = [0.2] * 500
"""Of each epoch. P1B3 has 9,001 steps; what is sent must not depend on their number."""
NUM_ROWS, NUM_COLUMNS = 4096, 8
NUM_GPUS = 6
"""On each node, as on Summit."""
HOUR_S = 3600.0
RECORDED = (
    "startup load load/read load/parse digest preprocess build broadcast broadcast/wait"
    " broadcast/transfer train evaluate report"
)
"""The phases that are recorded for every rank."""
STATE = np.zeros((1024, 512), np.float32)


@dataclass(frozen=True)
class Scenario:
    """What all ranks are given; `phases` and `communication` are recorded for each of them."""

    benchmark: Benchmark
    params: ParameterSet
    block_bytes: int
    phases: dict[PhasePath, Phase]
    communication: CommunicationLog

    @classmethod
    def make(cls, directory: Path, num_ranks: int) -> Scenario:
        """Writes the files of a run, of which every rank reads one block."""
        table, recording = directory / "table.csv", directory / "power.csv"
        table.write_text((",".join(["0.25"] * NUM_COLUMNS) + "\n") * NUM_ROWS)
        gpus = [
            Channel(f"gpu:GPU-{i:032x}", "Tesla V100-SXM2-16GB", "gpu", "nvml", "power")
            for i in range(NUM_GPUS)
        ]
        times_s, watts = np.array([0.0, HOUR_S]), np.array([300.0, 300.0])
        traces = [Trace(gpu, times_s, watts, HOUR_S) for gpu in gpus]
        write_traces(recording, traces, node=0, start_s=0.0)
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
        benchmark = find_benchmark(BENCHMARK)
        rng = np.random.default_rng(num_ranks)
        return cls(
            benchmark,
            benchmark.bind(benchmark.declaration.parse(argv, benchmark.model_file)),
            block_bytes=-(-table.stat().st_size // num_ranks),
            phases=fake_phases(rng),
            communication=fake_communication(rng),
        )


def fake_phases(rng: np.random.Generator) -> dict[PhasePath, Phase]:
    """Returns the phases of a rank, with random times."""
    found, begin_s = {}, time.perf_counter()
    for name in RECORDED.split():
        seconds = 0.1 * rng.uniform(0.9, 1.1)
        usage = None if "/" in name else Usage(*rng.integers(0, 10**6, 6).tolist())
        found[tuple(map(sys.intern, name.split("/")))] = Phase(
            begin_s, seconds, 0.1 * seconds, usage, 2**31, 2**31
        )
        begin_s += seconds
    return found


def fake_communication(rng: np.random.Generator) -> CommunicationLog:
    """Returns the log of a rank that has averaged the gradients of 16 arrays."""
    log = CommunicationLog()
    for i in range(16):
        log.add("horovod", f"allreduce gradient {i}", 4 << i, rng.uniform(1, 2), 56)
    for name in ("allgather", "barrier", "broadcast", "gather"):
        log.add("mpi", name, 1000, rng.uniform(0, 1), 10)
    return log


def fake_model() -> Any:
    """Returns a model that has metrics, each a sum and a count, and has seen samples."""
    state = SimpleNamespace(shape=(), numpy=lambda: np.array(1.0), assign=lambda value: None)
    metrics = [SimpleNamespace(variables=[state, state]) for _ in METRICS]
    return SimpleNamespace(metrics=metrics, get_metrics_result=lambda: dict.fromkeys(METRICS, 0.5))


class FakeTrained(Trained):
    """Predicts one sample on each rank, without Keras."""

    def _predictions(
        self, samples: Samples, max_steps: int, model: Any
    ) -> Iterator[tuple[Any, Any]]:
        yield np.zeros(1), np.ones((1, 2))


class RankOfRun:
    """One rank of the run. Its methods are the phases, in the order of `PHASES`; all collective."""

    def __init__(self, scenario: Scenario, comm: SimulatedCommunicator) -> None:
        self._scenario, self._comm, self._params = scenario, comm, scenario.params
        self._start_s = min(phase.begin_s for phase in scenario.phases.values())
        self._model = fake_model()
        self.resources = ExitStack()

    def begin(self) -> None:
        comm = self._comm
        params = agree(comm, lambda: self._params)
        check_ranks(LaunchedRank("mpirun", comm.rank, comm.size, None, None, None, "node"), comm)
        check_same_parameters(params, comm)
        on_first_rank(comm, self._scenario.benchmark.check_tables, params)
        agree(comm, epochs_of_ranks, params, comm.size)
        agree(comm, check_tensorboard, params)
        agree(comm, open_timeline, params["timeline"], comm)
        power = PowerMeter(comm, params["power"], params["power_hz"], params["gpus"])
        self.resources.enter_context(power)
        record = first_record(BENCHMARK, params, comm, "none")
        screen = agree(comm, Screen, 1)  # silent on every rank
        opening = RunDirectory(BENCHMARK, params)
        self.resources.callback(opening.close)
        on_first_rank(comm, opening.find)
        watchdog: Any = SimpleNamespace(
            steps=len(STEPS_S), save_signal=None, report_record=lambda path: None
        )
        directory, segment = on_first_rank(comm, opening.open, record, watchdog)
        self._running = opening.record or record
        self._run = Run(
            directory,
            self._running,
            PhaseTimer(),
            self._scenario.communication,
            power,
            CallProfile(False),
            screen,
            comm,
            watchdog,
            self._start_s,
            segment,
        )
        Restart.of(opening.checkpoint, comm)
        self._run.result_directory(params["save_path"])
        check_gpus(comm, has_gpu=False, request=None, backend="tensorflow", node="node")
        check_thread_level(comm)

    def find_files(self) -> None:
        locate = partial(locate_files, self._scenario.benchmark, self._params)
        found = on_first_rank(self._comm, locate)
        # As if it were known: otherwise the digest would be kept for a file that goes away.
        self._files = replace(found, sha256=dict.fromkeys(found.paths, "0" * 64))

    def load_parallel(self) -> None:
        how = loading(self._params, self._comm, num_threads=1)
        how = replace(how, block_bytes=self._scenario.block_bytes)
        self._reader = Reader(self._files, how)
        self._table = self._reader.read("train")

    def load_cached(self) -> None:
        how = loading(self._params, self._comm, num_threads=1)
        Reader(self._files, replace(how, method="cached")).read("train")

    def preprocess(self) -> None:
        self._reader.digest()
        scale_features("maxabs", self._table.values)

    def meet(self) -> None:
        sizes = {"epochs": NUM_EPOCHS, "num_samples": NUM_ROWS, "batch_size": 4}
        how: Any = sizes | {"num_ranks": self._comm.size, "epochs_scaling": "weak"}
        make = partial(ScalingPlan.make, learning_rate=0.001, **how)
        self._plan = agree(self._comm, make)
        check_same_data(self._reader, self._comm)

    def train_epoch(self) -> None:
        for _ in range(2):  # metrics of training and of validation
            reduce_metrics(self._model, self._comm)
        SaveTrigger(self._comm, HOUR_S, lambda: False).agree()
        self._comm.broadcast(False)  # as TimeLimit does, which is a callback of Keras

    def checkpoint(self) -> None:
        history: Any = SimpleNamespace(history={name: [0.5] * NUM_EPOCHS for name in METRICS})
        self._epochs = GatheredEpochs(self._comm, history, NUM_ROWS)
        epoch = Epoch(1.0, 2.0, STEPS_S, 0.1, 0.2, 0)
        for number in range(NUM_EPOCHS):
            self._epochs.add(replace(epoch, first_step=None) if number else epoch, 0.5)
        root = self._run.directory / "ckpts"
        self._writer = CheckpointWriter(self._comm, root, say=self._run.screen.say)
        own = {f"seed{number}": np.zeros(2, np.uint32) for number in range(2)}
        own |= {f"metric{number}": np.zeros((), np.float32) for number in range(2 * len(METRICS))}
        own |= epoch_arrays(epoch)
        self._writer.best_is_lost()
        facts = {"run": self._run.saved_run().model_dump(), "plan": self._plan.model_dump()}
        facts |= self._epochs.to_facts()
        arrays = {"weights": ArrayInMemory(STATE)}
        assert self._writer.save(Position(NUM_EPOCHS, 1), arrays, own, facts, wait=True)

    def evaluate(self) -> None:
        comm = self._comm
        nothing = Samples(np.zeros((0, NUM_COLUMNS)), np.zeros((0, 2)))
        data = DataSet(nothing, nothing, nothing)
        evaluated = FakeTrained(self._model, data, self._params, comm, self._run.directory, True)
        reduce_metrics(self._model, comm)
        assert evaluated.score(nothing, ConfusionScore(2)).sums.sum() == comm.size
        comm.broadcast(find_nan({}, {}))

    def end(self, **how: Any) -> None:
        comm, run = self._comm, self._run
        run.phases.phases = self._scenario.phases
        self._epochs.gather()
        checkpoints = self._writer.close()
        files = describe_together(self._reader, comm, self._start_s)
        run.finish(
            describe_rank(comm, threads=1, device="cpu", num_cores=1),
            checkpoints=checkpoints,
            data={"synthetic": True, "loader": "parallel", "files": files},
            plan=self._plan,
            model={"num_parameters": STATE.size, "optimizer": "sgd"},
            distributed={"backend": "serial"},
            training={"epochs": self._epochs.facts},
            quality={},
            environment=environment.capture() if comm.rank == 0 else {},
            **how,
        )

    def end_after_signal(self) -> None:
        watchdog: Any = self._run.watchdog
        watchdog.save_signal = int(signal.SIGUSR1)
        if self._comm.rank == 0:  # as if the run had not ended before
            write_record(self._run.record_path, self._running)
        with suppress(RunInterrupted):
            self.end(interrupted=True)

    def fail_together(self) -> None:
        def fail() -> None:
            raise DataError("the file is empty", self._files.paths["train"])

        with suppress(DataError):
            agree(self._comm, fail)


PHASES: dict[str, Callable[[RankOfRun], None]] = {
    "begin": RankOfRun.begin,
    "find the files": RankOfRun.find_files,
    "load, parallel": RankOfRun.load_parallel,
    "load, first time cached": RankOfRun.load_cached,
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
