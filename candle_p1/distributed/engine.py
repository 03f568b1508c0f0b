"""Engines: a backend of Keras, and what averages gradients with it.

Between its steps a model is an ordinary Keras model of each process, whatever the engine: its
variables are in the memory of this rank's device, so that callbacks, metrics, evaluations and
checkpoints know nothing about engines. `candle_p1.distributed.backend.ENGINES` names them.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from candle_p1.distributed.allreduce_log import AllreduceLog, GraphLog, HostLog
from candle_p1.distributed.backend import AUTO, ENGINES, choose_backend
from candle_p1.distributed.comm import Communicator, agree
from candle_p1.distributed.launch_environment import read_number
from candle_p1.distributed.reducers.horovod import TIMELINE_VARIABLE, HorovodReducer, is_traced
from candle_p1.distributed.reducers.host import HostReducer
from candle_p1.distributed.reducers.jax import JaxReducer, join_processes
from candle_p1.distributed.reducers.reducer import Reducer, SerialReducer
from candle_p1.distributed.reducers.shared_memory import SharedMemoryReducer
from candle_p1.distributed.shared_file import NoRoomError
from candle_p1.errors import SetupError
from candle_p1.instrument.collectives import CommunicationLog

ENGINE_CHOICES = (AUTO, *ENGINES)
HOROVOD = "horovod"
AVERAGING_CHOICES = (AUTO, HOROVOD)
"""What averages gradients on CPUs of one node: memory that the ranks share, or Horovod."""
OF_HOROVOD = re.compile(
    "HOROVOD_(AUTOTUNE|BATCH_|CACHE_|CPU_OPERATIONS|CYCLE_TIME|DISABLE_GROUP|ENABLE_XLA|FUSION"
    "|HIERARCHICAL|MPI_THREADS|NUM_|THREAD_AFFINITY)"
)
"""What the names of variables begin with that change how Horovod averages."""
STALL_CHECK_S = 60
STALL_VARIABLE = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
GIVE_STALL = "a whole number of seconds up to 1000000; 0 means no limit"
TIMED_SINCE = (0, 10)
"""The release of JAX with which the times of allreduces were compared with those of slow ranks."""


@dataclass(frozen=True)
class StartOptions:
    """How gradients are averaged; what an engine has no use for, it ignores.

    Attributes:
        stall_shutdown_s: The time after which a stalled collective ends with an error on every
            rank; 0: never. Of the engine jax, whose stalled ranks the watchdog finds, not used.
        deterministic: Whether repeated runs must be bit-identical. JAX's are on CPUs in any case,
            and on GPUs with XLA's own flag, which `candle_p1.distributed.devices` sets.
        timeline: The file into which rank 0 traces Horovod's operations; None: no file.
        averaging: One of AVERAGING_CHOICES, for the engine that has them.
        compression: One of `candle_p1.distributed.reducers.reducer.COMPRESSIONS`.
    """

    stall_shutdown_s: int = 300
    deterministic: bool = True
    timeline: Path | None = None
    averaging: str = AUTO
    compression: str = "none"


class Engine(ABC):
    """Trains one model on the ranks of a job. All ranks must call its methods, in the same order.

    Args:
        comm: The ranks.
        backend: Keras's backend.

    Attributes:
        reducer: What averages gradients, once the engine is started.
    """

    name: str
    """As `--engine` and the record name it."""
    shares_gpus = False
    """Whether several of its ranks may compute on one GPU."""
    reducer: Reducer

    def __init__(self, comm: Communicator, backend: str) -> None:
        self.comm, self.backend = comm, backend

    def join(self) -> None:  # noqa: B027
        """Joins the processes of the job, before the framework looks for devices.

        Raises:
            SetupError: They cannot be joined; the same on every rank.
        """

    @abstractmethod
    def start(self, options: StartOptions) -> dict[str, Any]:
        """Starts averaging, after the devices are set up.

        Returns:
            The record's section "distributed".

        Raises:
            SetupError: It cannot be started; the same on every rank.
        """

    def compile(self, model: Any, *, is_gpu: bool, **options: Any) -> None:
        """Compiles a model for this engine, with XLA where that is possible and faster.

        With TensorFlow it is slower on CPUs, and knows no operation that averages
        (docs/performance.md).

        Args:
            model: A built Keras model.
            is_gpu: Whether it computes on a GPU.
            options: Those of Keras's ``compile``: loss, metrics, and an optimizer of
                `candle_p1.distributed.optimizer.distribute_optimizer`.
        """
        xla = self.backend == "jax" or (is_gpu and self.comm.size == 1)
        model.compile(jit_compile="auto" if xla else False, auto_scale_loss=False, **options)

    def make_log(self, log: CommunicationLog, *, is_gpu: bool) -> AllreduceLog | None:
        """Returns the log of one model's gradient allreduces; None: there are no times of them."""
        return None


class SerialEngine(Engine):
    """Trains in one process, and needs neither Horovod nor MPI."""

    name = "serial"

    def __init__(self, comm: Communicator, backend: str) -> None:
        super().__init__(comm, backend)
        self.reducer = SerialReducer(comm)

    def start(self, options: StartOptions) -> dict[str, Any]:
        return {"backend": self.name}


class TensorflowEngine(Engine):
    """TensorFlow, with Horovod or through memory that the ranks of a node share.

    Ranks that all train on the CPUs of one node average through memory, which is faster than MPI
    (docs/performance.md). Horovod is started only if it averages, because its thread, which asks
    all ranks every millisecond what is ready, runs on the cores that compute.
    """

    name = HOROVOD

    def start(self, options: StartOptions) -> dict[str, Any]:
        """Chooses and starts a reducer; Horovod's variables in the environment take precedence."""
        default_s = options.stall_shutdown_s
        timeout_s = agree(self.comm, read_number, STALL_VARIABLE, default_s, GIVE_STALL, most=10**6)
        check = min(STALL_CHECK_S, timeout_s // 2) if timeout_s else STALL_CHECK_S
        os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(max(check, 1)))
        os.environ[STALL_VARIABLE] = str(timeout_s)
        if options.deterministic:
            # Timing decides which gradients are fused and thereby, from three ranks on, the order
            # in which MPI adds.
            os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
        if options.timeline is not None:
            os.environ[TIMELINE_VARIABLE] = str(options.timeline)
        self.reducer = self._make_reducer(options, timeout_s)
        return {
            "backend": self.name,
            "stall_shutdown_s": timeout_s,
            "settings": {"averaging": self.reducer.name} | self.reducer.settings,
        }

    def _make_reducer(self, options: StartOptions, timeout_s: int) -> Reducer:
        import tensorflow as tf

        chosen = options.averaging == HOROVOD or options.compression != "none" or is_traced()
        if not (chosen or self.comm.num_nodes > 1 or tf.config.get_visible_devices("GPU")):
            with suppress(NoRoomError):  # then Horovod averages, as the record says
                return SharedMemoryReducer(self.comm, timeout_s)
        return HorovodReducer(self.comm, options.compression)

    def make_log(self, log: CommunicationLog, *, is_gpu: bool) -> AllreduceLog:
        return GraphLog(log, self.reducer.name)


class JaxEngine(Engine):
    """JAX, whose processes form collectives by themselves: XLA's, within a compiled step."""

    name = "jax"
    reducer: JaxReducer

    def join(self) -> None:
        """Connects the processes to rank 0 by TCP; JAX forms its collectives through it."""
        join_processes(self.comm)

    def start(self, options: StartOptions) -> dict[str, Any]:
        """Makes the mesh of the ranks' devices, and connects them."""
        _check_timeline(options)
        self.reducer = JaxReducer(self.comm, options.compression)
        return {"backend": self.name, "settings": self.reducer.settings}

    def compile(self, model: Any, *, is_gpu: bool, **options: Any) -> None:
        """Compiles, and lets the steps span the ranks."""
        super().compile(model, is_gpu=is_gpu, **options)
        self.reducer.map_steps(model)

    def make_log(self, log: CommunicationLog, *, is_gpu: bool) -> AllreduceLog | None:
        """Returns a log that the step writes; None where its times would be wrong.

        GPUs would wait for the host, and JAX 0.6 calls the host too late.
        """
        import jax

        return None if is_gpu or jax.__version_info__ < TIMED_SINCE else HostLog(log, self.name)


class HostEngine(Engine):
    """JAX, whose processes do not know of each other, because they share a GPU."""

    name = "jax"
    shares_gpus = True

    def start(self, options: StartOptions) -> dict[str, Any]:
        """Makes what averages through the host."""
        _check_timeline(options)
        self.reducer = HostReducer(self.comm, options.compression)
        return {"backend": self.name, "settings": self.reducer.settings}


def _check_timeline(options: StartOptions) -> None:
    if options.timeline is not None:
        raise SetupError(
            "--timeline traces Horovod, and the engine is jax: use --step_trace, which traces"
            " XLA's operations, or --engine horovod"
        ).on_all_ranks()


def make_engine(name: str, comm: Communicator, *, share_gpus: bool = False) -> Engine:
    """Returns the engine with which a job trains; before Keras is imported.

    Args:
        name: One of ENGINE_CHOICES. "auto" takes the one that trains with Keras's backend, which
            `candle_p1.distributed.backend.choose_backend` chooses. A single rank needs no engine,
            but trains with the backend of the one that is named.
        comm: The ranks.
        share_gpus: Whether several ranks may compute on one GPU.

    Raises:
        SetupError: The engine trains with another backend than this process must use, or cannot
            share GPUs.
    """
    backend = choose_backend(name)
    if comm.size == 1:
        return SerialEngine(comm, backend)
    if share_gpus and backend != "jax":
        raise SetupError("--share_gpus is for JAX: add --engine jax, or start a rank for each GPU")
    if share_gpus:
        return HostEngine(comm, backend)
    return JaxEngine(comm, backend) if backend == "jax" else TensorflowEngine(comm, backend)


def warn_of_horovod(started: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
    """Returns a warning if variables of Horovod are set that have no effect.

    Args:
        started: What `Engine.start` returned.
        environ: The environment.
    """
    averaging = started.get("settings", {}).get("averaging", started["backend"])
    why = {
        "serial": "a single rank averages no gradients",
        "jax": "JAX averages the gradients",
        HOROVOD: "several ranks train without XLA",
    }.get(averaging, f"{averaging} averages the gradients, unless --averaging is horovod")
    ignored = re.compile("HOROVOD_ENABLE_XLA") if averaging == HOROVOD else OF_HOROVOD
    # This package itself sets 0.
    names = [n for n in sorted(environ) if ignored.match(n) and environ[n] not in ("", "0")]
    return [f"{', '.join(names)}: no effect, because {why}"] if names else []
