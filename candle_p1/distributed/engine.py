"""Engines: a backend of Keras, and what averages gradients with it.

Between its steps a model is an ordinary Keras model of each process, whatever the engine: its
variables are in the memory of this rank's device, so that callbacks, metrics, evaluations and
checkpoints know nothing about engines. `candle_p1.distributed.backend.ENGINES` names them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from candle_p1.distributed.allreduce_log import AllreduceLog, GraphLog, HostLog
from candle_p1.distributed.backend import AUTO, ENGINES, choose_backend, engine_of
from candle_p1.distributed.comm import Communicator, agree
from candle_p1.distributed.launch_environment import read_number
from candle_p1.distributed.reducers.horovod import TIMELINE_VARIABLE, HorovodReducer, is_traced
from candle_p1.distributed.reducers.jax import HostReducer, JaxReducer, join_processes
from candle_p1.distributed.reducers.reducer import GraphReducer, Reducer, SerialReducer
from candle_p1.distributed.reducers.shared_memory import SharedMemoryReducer
from candle_p1.distributed.shared_file import NoRoomError
from candle_p1.errors import SetupError
from candle_p1.instrument.collectives import CommunicationLog

ENGINE_CHOICES = (AUTO, *ENGINES)
SERIAL, HOROVOD, JAX = "serial", "horovod", "jax"
AVERAGING_CHOICES = (AUTO, HOROVOD)
"""What averages gradients on CPUs of one node: memory that the ranks share, or Horovod."""
OF_HOROVOD = re.compile(
    "HOROVOD_(AUTOTUNE|BATCH_|CACHE_|CPU_OPERATIONS|CYCLE_TIME|DISABLE_GROUP|ENABLE_XLA|FUSION"
    "|HIERARCHICAL|MPI_THREADS|NUM_|THREAD_AFFINITY)"
)
"""What the names of variables begin with that change how Horovod averages."""
STALL_CHECK_S = 60
STALL_VARIABLE = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"


class Engine:
    """A backend of Keras, and what averages gradients with it.

    All ranks must call its methods, in the same order.

    Args:
        name: As `--engine` and the record name it: "serial" (one process, which needs neither
            Horovod nor MPI), "horovod" or "jax".
        comm: The ranks.
        backend: Keras's backend.
        shares_gpus: Whether several ranks may compute on one GPU.

    Attributes:
        reducer: What averages gradients, once the engine is started.
    """

    reducer: Reducer

    def __init__(
        self, name: str, comm: Communicator, backend: str, *, shares_gpus: bool = False
    ) -> None:
        self.name, self.comm, self.backend, self.shares_gpus = name, comm, backend, shares_gpus
        if name == SERIAL:
            self.reducer = SerialReducer(comm)

    def join(self) -> None:
        """Joins the processes of the job where a framework needs that, before it looks for devices.

        Raises SetupError on every rank if they cannot be joined.
        """
        if self.name == JAX and not self.shares_gpus:  # JAX forms its collectives by itself
            join_processes(self.comm)

    def start(
        self,
        *,
        averaging: str = AUTO,
        compression: str = "none",
        deterministic: bool = True,
        stall_shutdown_s: int = 300,
        timeline: Path | None = None,
    ) -> dict[str, Any]:
        """Starts averaging, after the devices are set up; variables of Horovod take precedence.

        Args:
            averaging: One of AVERAGING_CHOICES, with TensorFlow.
            compression: One of `candle_p1.distributed.reducers.reducer.COMPRESSIONS`.
            deterministic: Whether repeated runs must be bit-identical. JAX's are on CPUs in any
                case, and on GPUs with XLA's own flag, which `candle_p1.distributed.devices` sets.
            stall_shutdown_s: The time after which a stalled collective of Horovod ends with an
                error on every rank; 0: never. The watchdog finds stalled ranks of JAX.
            timeline: The file into which rank 0 traces Horovod's operations.

        Returns:
            The record's section "distributed".

        Raises:
            SetupError: It cannot be started; the same on every rank.
        """
        facts: dict[str, Any] = {"backend": self.name}
        if self.name == HOROVOD:
            timeout_s = facts["stall_shutdown_s"] = _prepare_horovod(
                self.comm, stall_shutdown_s, timeline, deterministic=deterministic
            )
            self.reducer = _make_tensorflow_reducer(self.comm, averaging, compression, timeout_s)
            facts["settings"] = {"averaging": self.reducer.name} | self.reducer.settings
        elif self.name == JAX:
            if timeline is not None:
                raise SetupError(
                    "--timeline traces Horovod, and the engine is jax: use --step_trace, which"
                    " traces XLA's operations, or --engine horovod"
                ).on_all_ranks()
            kind = HostReducer if self.shares_gpus else JaxReducer
            self.reducer = kind(self.comm, compression)
            facts["settings"] = self.reducer.settings
        return facts

    def compile(self, model: Any, *, is_gpu: bool, **options: Any) -> None:
        """Compiles a built Keras model for this engine, with XLA where that is faster.

        With TensorFlow it is slower on CPUs, and knows no operation that averages
        (docs/performance.md). The options are those of Keras's ``compile``, with an optimizer of
        `candle_p1.distributed.optimizer.distribute_optimizer`.
        """
        xla = self.backend == JAX or (is_gpu and self.comm.size == 1)
        model.compile(jit_compile="auto" if xla else False, auto_scale_loss=False, **options)
        if isinstance(self.reducer, JaxReducer):
            self.reducer.map_steps(model)

    def make_log(self, log: CommunicationLog, *, is_gpu: bool) -> AllreduceLog | None:
        """Returns the log of one model's gradient allreduces, which its step writes.

        None where its times would be wrong: with JAX, GPUs would wait for the host, and JAX 0.6
        calls the host too late; with JAX 0.10, they were compared with those of slow ranks.
        """
        if isinstance(self.reducer, GraphReducer):
            return GraphLog(log, self.reducer.name)
        if is_gpu or not isinstance(self.reducer, JaxReducer):
            return None
        import jax

        return HostLog(log, self.name) if jax.__version_info__ >= (0, 10) else None


def _prepare_horovod(
    comm: Communicator, default_s: int, timeline: Path | None, *, deterministic: bool
) -> int:
    """Sets what Horovod reads from the environment; returns the limit for stalled collectives."""
    give = "a whole number of seconds up to 1000000; 0 means no limit"
    timeout_s = agree(comm, read_number, STALL_VARIABLE, default_s, give, most=10**6)
    check = min(STALL_CHECK_S, timeout_s // 2) if timeout_s else STALL_CHECK_S
    os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(max(check, 1)))
    os.environ[STALL_VARIABLE] = str(timeout_s)
    if deterministic:
        # Timing decides which gradients are fused and thereby, from three ranks on, the order in
        # which MPI adds.
        os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
    if timeline is not None:
        os.environ[TIMELINE_VARIABLE] = str(timeline)
    return timeout_s


def _make_tensorflow_reducer(
    comm: Communicator, averaging: str, compression: str, timeout_s: int
) -> GraphReducer:
    """Returns what averages in TensorFlow's graph: memory that ranks share, or Horovod.

    Ranks that all train on the CPUs of one node average through memory, which is faster than MPI
    (docs/performance.md). Horovod is started only if it averages, because its thread, which asks
    all ranks every millisecond what is ready, runs on the cores that compute.
    """
    import tensorflow as tf

    chosen = averaging == HOROVOD or compression != "none" or is_traced()
    if not (chosen or comm.num_nodes > 1 or tf.config.get_visible_devices("GPU")):
        with suppress(NoRoomError):  # then Horovod averages, as the record says
            return SharedMemoryReducer(comm, timeout_s)
    return HorovodReducer(comm, compression)


def make_engine(name: str, comm: Communicator, *, share_gpus: bool = False) -> Engine:
    """Returns the engine with which a job trains; before Keras is imported.

    The name is one of ENGINE_CHOICES: "auto" takes the one that trains with Keras's backend, which
    `candle_p1.distributed.backend.choose_backend` chooses. A single rank needs no engine, but
    trains with the backend of the one that is named.

    Raises:
        SetupError: The engine trains with another backend than this process must use, or cannot
            share GPUs.
    """
    backend = choose_backend(name)
    if comm.size == 1:
        return Engine(SERIAL, comm, backend)
    if share_gpus and backend != JAX:
        raise SetupError("--share_gpus is for JAX: add --engine jax, or start a rank for each GPU")
    return Engine(engine_of(backend), comm, backend, shares_gpus=share_gpus)


def warn_of_horovod(started: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
    """Returns a warning if variables of Horovod have no effect, after `Engine.start`."""
    averaging = started.get("settings", {}).get("averaging", started["backend"])
    why = {
        SERIAL: "a single rank averages no gradients",
        JAX: "JAX averages the gradients",
        HOROVOD: "several ranks train without XLA",
    }.get(averaging, f"{averaging} averages the gradients, unless --averaging is horovod")
    ignored = re.compile("HOROVOD_ENABLE_XLA") if averaging == HOROVOD else OF_HOROVOD
    # This package itself sets 0.
    names = [n for n in sorted(environ) if ignored.match(n) and environ[n] not in ("", "0")]
    return [f"{', '.join(names)}: no effect, because {why}"] if names else []
