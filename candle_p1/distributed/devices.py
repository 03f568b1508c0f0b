"""What a rank computes on: one GPU per local rank, or a fair share of the node's cores.

This has to be set before the first TensorFlow operation, which fixes thread pools and devices.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, Any

from candle_p1.distributed.comm import Attempt
from candle_p1.distributed.gpus import num_visible
from candle_p1.distributed.installation import visible_gpus
from candle_p1.distributed.keras_import import import_keras
from candle_p1.distributed.launch_environment import read_number
from candle_p1.errors import ParameterError, SetupError
from candle_p1.instrument.phases import part
from candle_p1.records.environment import available_cores, core_quota, core_topology
from candle_p1.scaling import share_bounds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from candle_p1.distributed.comm import Communicator
    from candle_p1.distributed.engines.engine import Engine
    from candle_p1.records.environment import Topology

CPU = "cpu"
"""The name of a device that is no GPU."""
XLA_THREADS_VARIABLE = "NPROC"
"""Tells XLA how many threads to use on the CPU."""
XLA_FLAGS_VARIABLE = "XLA_FLAGS"
BINDING_VARIABLE = "OMP_PROC_BIND"
"""OpenMP's: whether threads stay on their cores."""
MAX_THREADS = 1024
"""More would take all memory, or end the process, on any machine with fewer CPUs."""
LIMITS_OF_KERAS = ("KERAS_MAX_EPOCHS", "KERAS_MAX_STEPS_PER_EPOCH")
DETERMINISTIC_FLAG = "xla_gpu_deterministic_ops"


@dataclass(frozen=True)
class Device:
    """What a rank computes on.

    Attributes:
        name: "cpu", or the framework's name for the GPU.
        threads: The number of CPU threads of one operation.
        num_cores: The number of cores on which this rank may run.
        warnings: Warnings for the user.
    """

    name: str
    threads: int
    num_cores: int
    warnings: list[str] = field(default_factory=list)

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU."""
        return self.name != CPU


@dataclass(frozen=True)
class NodeCores:
    """The cores of a node; one that executes several threads is several cores, as in Linux.

    Attributes:
        of_ranks: Those on which each rank may run, by local rank.
        quota: The CPU time that a container may use, in cores.
        topology: Where they are. One that is not in it is a physical core of the first socket.
    """

    of_ranks: Sequence[Sequence[int]]
    quota: float = inf
    topology: Topology = field(default_factory=dict)

    @classmethod
    def of(cls, comm: Communicator) -> NodeCores:
        """Returns those of this node; collective over the node."""
        mine = available_cores()
        return cls(comm.local.allgather(mine), core_quota(), core_topology(mine))

    def divide(self) -> list[list[int]]:
        """Returns shares of the first rank's cores: physical cores, each within one socket.

        Only ranks that are fewer than the sockets get several; and where there are more ranks than
        physical cores, these are divided, too.
        """
        num_ranks, sockets = len(self.of_ranks), dict[int, dict[str, list[int]]]()
        for core in sorted(self.of_ranks[0]):
            socket, siblings = self.topology.get(core, (0, str(core)))
            sockets.setdefault(socket, {}).setdefault(siblings, []).append(core)
        wholes = [list(physical.values()) for physical in sockets.values()]
        if num_ranks < len(wholes):
            wholes = [[list(chain(*each)) for each in wholes]]
        elif num_ranks > sum(map(len, wholes)):
            wholes = [[[core] for core in chain(*each)] for each in wholes]
        counts = [0] * len(wholes)
        for _ in range(num_ranks):  # each to the socket where most is left for it
            rooms = [len(each) / (num + 1) for each, num in zip(wholes, counts, strict=True)]
            counts[rooms.index(max(rooms))] += 1
        return [
            sorted(chain(*each[slice(*share_bounds(len(each), k, num))]))
            for each, num in zip(wholes, counts, strict=True)
            for k in range(num)
        ]

    def threads(self, local_rank: int) -> tuple[int, str | None]:
        """Returns the number of threads of a rank, and a warning if ranks must share cores.

        A rank gets the node's cores divided by the number of ranks, but no more than its share, or
        than a launcher has bound it to. Ranks that are bound to their own cores thus use all of
        them, and no core runs threads of two ranks unless there are more ranks than cores.
        """
        num_cores = len({core for cores in self.of_ranks for core in cores})
        num_cores = max(1, int(min(num_cores, self.quota)))
        num_ranks = len(self.of_ranks)
        warning = None
        if num_ranks > num_cores:
            warning = (
                f"{num_ranks} ranks share {num_cores} cores of this node: times will be long and"
                " not representative of the machine"
            )
        shares = [self.of_ranks[local_rank]] if self._are_bound else self.divide()
        return max(1, min(num_cores // num_ranks, *map(len, shares))), warning

    def own(self, local_rank: int, threads: int, environ: Mapping[str, str]) -> list[int]:
        """Returns the cores to which a rank has to bind itself; none, if it is not to.

        Threads that are not bound often share a core for a while, although others are idle. What
        has been bound by a launcher stays so; and so do ranks that are alone on their node, that
        have more threads than their share has cores, or whose container may use only a part of the
        cores. OMP_PROC_BIND=false in the environment leaves ranks unbound.
        """
        shares = self.divide()
        has_cores = threads <= min(map(len, shares)) and len(self.of_ranks[0]) <= self.quota
        is_wanted = environ.get(BINDING_VARIABLE, "true").lower() not in ("false", "0")
        if len(self.of_ranks) == 1 or self._are_bound or not (has_cores and is_wanted):
            return []
        return shares[local_rank]

    @property
    def _are_bound(self) -> bool:
        """Whether a launcher has given the ranks different cores."""
        return any(sorted(others) != sorted(self.of_ranks[0]) for others in self.of_ranks)


_configured: Device | None = None


def configure(
    comm: Communicator,
    engine: Engine,
    *,
    gpus: Sequence[int] | None = None,
    deterministic: bool = True,
) -> Device:
    """Pins this rank to its GPU, or to its share of the cores, and joins the ranks; collective.

    OMP_NUM_THREADS, if set, is the number of threads, as in section 2.3.2 of the paper; unless they
    are set, KMP_BLOCKTIME and KMP_AFFINITY get the paper's values. Later calls in the same process
    return the result of the first.

    Args:
        comm: The ranks of the job, which share its nodes.
        engine: What averages gradients; it joins its ranks before the framework finds devices.
        gpus: The indices of the node's GPUs to use; None: all.
        deterministic: Whether kernels must have bit-identical results.

    Raises:
        ParameterError: `gpus` contains an index that does not exist.
        SetupError: Keras's backend cannot be imported, OMP_NUM_THREADS is not a number, or the
            ranks cannot be joined.
        CandleError: One of these on some ranks only. All are the same on every rank.
    """
    global _configured
    if _configured is None:
        _configured = _configure(comm, engine, gpus, deterministic)
    return _configured


def _configure(
    comm: Communicator, engine: Engine, gpus: Sequence[int] | None, deterministic: bool
) -> Device:
    cores = NodeCores.of(comm)
    threads, warnings = Attempt(lambda: _set_threads(comm, engine, cores)).agree(comm)
    if engine.backend == "jax":
        Attempt(lambda: _choose_jax_gpu(comm, gpus, deterministic)).agree(comm)
    engine.join()

    def find() -> str:
        if engine.backend == "jax":
            return next(iter(visible_gpus("jax")), CPU)
        try:
            return _configure_tensorflow(comm, gpus, threads, deterministic)
        except RuntimeError as error:  # thread pools and devices can no longer be changed
            warnings.append(f"TensorFlow was in use before this run: {error}")
            return _tensorflow_device_in_use()

    name = Attempt(find).agree(comm)
    return Device(name, threads, len(available_cores()), warnings)


def _set_threads(comm: Communicator, engine: Engine, cores: NodeCores) -> tuple[int, list[str]]:
    """Returns the number of threads, of which the environment tells libraries, and warnings."""
    threads, warning = cores.threads(comm.local_rank)
    most = max(MAX_THREADS, os.cpu_count() or 0)
    give = f"a number of threads, from 1 to {most}"
    threads = read_number("OMP_NUM_THREADS", threads, give, least=1, most=most, is_list=True)
    mine = cores.own(comm.local_rank, threads, os.environ)
    if mine:
        os.sched_setaffinity(0, mine)  # of this thread, and of those that it is going to start
    if not os.environ.get("OMP_NUM_THREADS"):
        os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    os.environ.setdefault("KMP_AFFINITY", "granularity=fine,compact,1,0")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault(XLA_THREADS_VARIABLE, str(threads))
    _check_backend(engine.backend)
    return threads, [warning] if warning else []


def _check_backend(backend: str) -> None:
    """Imports Keras, without what its own file (~/.keras/keras.json) says of numbers and images.

    Raises:
        SetupError: It cannot be imported with this backend, or would end training early.
    """
    for name in LIMITS_OF_KERAS:
        if name in os.environ:
            raise SetupError(
                f"{name} is set, with which Keras would end training early: unset it, and use"
                " --epochs or --train_steps"
            )
    try:
        with part("import"):
            import_keras()
    except ImportError as error:
        raise SetupError(
            f"Keras cannot be imported with the backend {backend}: {error}. Install candle-p1[cpu]"
            " or candle-p1[gpu]; for the engine jax, candle-p1[jax-mpi] or candle-p1[jax-gpu]"
        ) from error
    import keras

    keras.config.set_floatx("float32")
    keras.config.set_epsilon(1e-7)
    keras.config.set_image_data_format("channels_last")


def _configure_tensorflow(
    comm: Communicator, gpus: Sequence[int] | None, threads: int, deterministic: bool
) -> str:
    import tensorflow as tf

    if deterministic:
        tf.config.experimental.enable_op_determinism()
    found = _select(tf.config.list_physical_devices("GPU"), gpus)
    if not found:
        tf.config.set_visible_devices([], "GPU")
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        return CPU
    mine = _of_rank(found, comm)
    tf.config.set_visible_devices(mine, "GPU")
    tf.config.experimental.set_memory_growth(mine, True)
    return _name_of(mine)


def _tensorflow_device_in_use() -> str:
    import tensorflow as tf

    visible = tf.config.get_visible_devices("GPU")
    return _name_of(visible[0]) if visible else CPU


def _name_of(gpu: Any) -> str:
    import tensorflow as tf

    return str(tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name))


def _choose_jax_gpu(comm: Communicator, gpus: Sequence[int] | None, deterministic: bool) -> None:
    """Hides all GPUs but this rank's from JAX, which would reserve the memory of all of them."""
    import jax

    found = _select(list(range(num_visible())), gpus)
    if not found:
        return
    mine = str(_of_rank(found, comm))
    jax.config.update("jax_cuda_visible_devices", mine)
    jax.config.update("jax_rocm_visible_devices", mine)
    flags = os.environ.get(XLA_FLAGS_VARIABLE, "")
    if deterministic and DETERMINISTIC_FLAG not in flags:
        os.environ[XLA_FLAGS_VARIABLE] = f"{flags} --{DETERMINISTIC_FLAG}=true".strip()


def _of_rank(found: Sequence[Any], comm: Communicator) -> Any:
    """Returns the GPU of this rank.

    A rank sees one GPU if the launcher gives each rank its own (jsrun -g1), else all of the node.

    Raises:
        SetupError: There are more ranks than GPUs.
    """
    if 1 < len(found) < comm.local_size:
        raise SetupError(
            f"{comm.local_size} ranks on a node with {len(found)} GPUs: start at most one per GPU"
        )
    return found[comm.local_rank % len(found)]


def _select(found: list[Any], gpus: Sequence[int] | None) -> list[Any]:
    """Returns those of a node's GPUs that are to be used.

    Where there is none, the ranks find out together (candle_p1.distributed.gpus).

    Raises:
        ParameterError: There are some, but not all of these.
    """
    if gpus is None or not found:
        return found
    if any(index >= len(found) for index in gpus):
        raise ParameterError(f"gpus {list(gpus)}: this node has {len(found)} GPUs, numbered from 0")
    return [found[index] for index in gpus]
