"""What a rank computes on: one GPU per local rank, or a fair share of the node's cores.

This has to be set before the first TensorFlow operation, which fixes thread pools and devices.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from typing import TypeVar

from candle_p1.distributed.backend import import_keras
from candle_p1.distributed.comm import Communicator, agree
from candle_p1.distributed.engine import Engine
from candle_p1.distributed.gpus import card_here, device_name, num_visible, visible_gpus
from candle_p1.distributed.launch_environment import read_number
from candle_p1.distributed.programs import Programs
from candle_p1.errors import ParameterError, SetupError
from candle_p1.instrument.phases import region
from candle_p1.records.environment import Topology, available_cores, core_quota, core_topology
from candle_p1.scaling import share_bounds
from candle_p1.text import count

T = TypeVar("T")
CPU = "cpu"
"""The name of a device that is no GPU."""
XLA_FLAGS_VARIABLE = "XLA_FLAGS"
MAX_THREADS = 1024
"""More would take all memory, or end the process, on any machine with fewer CPUs."""
MEMORY_VARIABLE, MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75
"""The share of a GPU's memory that JAX reserves, and its default."""
DETERMINISTIC_FLAG = "xla_gpu_deterministic_ops"


@dataclass(frozen=True)
class Device:
    """What a rank computes on: "cpu", or a GPU by the framework's name for it.

    One operation uses `threads` CPU threads; the rank may run on `num_cores` cores. `programs` are
    those that JAX compiles, and None with TensorFlow.
    """

    name: str
    threads: int
    num_cores: int
    warnings: list[str] = field(default_factory=list)
    programs: Programs | None = None

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU."""
        return self.name != CPU


@dataclass(frozen=True)
class NodeCores:
    """The cores of a node; one that executes several threads is several cores, as in Linux.

    One that is not in the topology is a physical core of the first socket.
    """

    of_ranks: Sequence[Sequence[int]]  # on which each rank may run, by local rank
    quota: float = inf  # the CPU time that a container may use, in cores
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
        num_ranks, num_cores = len(self.of_ranks), len(set(chain(*self.of_ranks)))
        num_cores = max(1, int(min(num_cores, self.quota)))
        warning = (
            f"{num_ranks} ranks share {num_cores} cores of this node: times will be long and not"
            " representative of the machine"
        )
        shares = [self.of_ranks[local_rank]] if self._are_bound else self.divide()
        num_threads = max(1, min(num_cores // num_ranks, *map(len, shares)))
        return num_threads, warning if num_ranks > num_cores else None

    def own(self, local_rank: int, threads: int, environ: Mapping[str, str]) -> list[int]:
        """Returns the cores to which a rank has to bind itself; none, if it is not to.

        Threads that are not bound often share a core for a while, although others are idle. What
        has been bound by a launcher stays so; and so do ranks that are alone on their node, that
        have more threads than their share has cores, or whose container may use only a part of the
        cores. OMP_PROC_BIND=false in the environment leaves ranks unbound.
        """
        shares = self.divide()
        has_cores = threads <= min(map(len, shares)) and len(self.of_ranks[0]) <= self.quota
        is_wanted = environ.get("OMP_PROC_BIND", "true").lower() not in ("false", "0")
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
    programs: Callable[[Communicator], Programs] = lambda comm: Programs(),
) -> Device:
    """Pins this rank to its GPU, or to its share of the cores, and joins the ranks; collective.

    OMP_NUM_THREADS, if set, is the number of threads, as in section 2.3.2 of the paper; unless they
    are set, KMP_BLOCKTIME and KMP_AFFINITY get the paper's values. Later calls in the same process
    return the result of the first.

    Args:
        comm: The ranks of the job.
        engine: It joins its ranks before the framework finds devices.
        gpus: The indices of the node's GPUs to use; None: all.
        deterministic: Whether kernels must have bit-identical results.
        programs: Tells JAX where to keep compiled programs, before it compiles any.

    Raises:
        CandleError: The same on every rank: `gpus` contains an index that does not exist, Keras's
            backend cannot be imported, OMP_NUM_THREADS is not a number, or the ranks cannot be
            joined.
    """
    global _configured
    if _configured is not None:
        return _configured
    cores = NodeCores.of(comm)
    threads, warnings = agree(comm, _set_threads, comm, cores)
    kept: Programs | None = None
    agree(comm, _import_keras, engine.backend)
    if engine.backend == "jax":
        agree(comm, _choose_jax_gpu, comm, gpus, deterministic, shares=engine.shares_gpus)
        kept = agree(comm, programs, comm)
        warnings += [kept.warning] * bool(kept.warning)
    engine.join()

    def find() -> str:
        if engine.backend == "jax":
            return next(iter(visible_gpus("jax")), CPU)
        try:
            return _configure_tensorflow(comm, gpus, threads, deterministic)
        except RuntimeError as error:  # thread pools and devices can no longer be changed
            warnings.append(f"TensorFlow was in use before this run: {error}")
            import tensorflow as tf

            return next(map(device_name, tf.config.get_visible_devices("GPU")), CPU)

    name = agree(comm, find)
    _configured = Device(name, threads, len(available_cores()), warnings, kept)
    return _configured


def _set_threads(comm: Communicator, cores: NodeCores) -> tuple[int, list[str]]:
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
    os.environ.setdefault("NPROC", str(threads))  # those of XLA on the CPU
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    os.environ.setdefault("KMP_AFFINITY", "granularity=fine,compact,1,0")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    return threads, [warning] if warning else []


def _import_keras(backend: str) -> None:
    """Imports Keras, without what its own file (~/.keras/keras.json) says of numbers and images."""
    for name in ("KERAS_MAX_EPOCHS", "KERAS_MAX_STEPS_PER_EPOCH"):
        if name in os.environ:
            raise SetupError(
                f"{name} is set, with which Keras would end training early: unset it, and use"
                " --epochs or --train_steps"
            )
    try:
        with region("import"):
            import_keras()
    except ImportError as error:
        raise SetupError(
            f"Keras cannot be imported with the backend {backend}: {error}. Install"
            " candle-p1[tensorflow-cpu] or candle-p1[jax]; for several ranks, candle-p1[cpu] or"
            " candle-p1[jax-mpi]; for GPUs, candle-p1[gpu] or candle-p1[jax-gpu]"
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
    found = tf.config.list_physical_devices("GPU")
    _ranks_per_gpu(comm, len(found), gpus)
    mine = _choose(found, gpus, comm)
    if mine is None:
        tf.config.set_visible_devices([], "GPU")
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        return CPU
    tf.config.set_visible_devices(mine, "GPU")
    tf.config.experimental.set_memory_growth(mine, True)
    return device_name(mine)


def _choose_jax_gpu(
    comm: Communicator, gpus: Sequence[int] | None, deterministic: bool, *, shares: bool = False
) -> None:
    """Hides all GPUs but this rank's from JAX, which would reserve the memory of all of them.

    Ranks that share a GPU each reserve a part of what one alone would.
    """
    import jax

    found = range(num_visible())
    most = _ranks_per_gpu(comm, len(found), gpus, share=shares)
    if most > 1:
        os.environ.setdefault(MEMORY_VARIABLE, f"{MEMORY_SHARE / most:.3f}")
    mine = _choose(found, gpus, comm)
    if mine is None:
        return
    jax.config.update("jax_cuda_visible_devices", str(mine))
    jax.config.update("jax_rocm_visible_devices", str(mine))
    flags = os.environ.get(XLA_FLAGS_VARIABLE, "")
    if deterministic and DETERMINISTIC_FLAG not in flags:
        os.environ[XLA_FLAGS_VARIABLE] = f"{flags} --{DETERMINISTIC_FLAG}=true".strip()


def _choose(found: Sequence[T], gpus: Sequence[int] | None, comm: Communicator) -> T | None:
    """Returns this rank's GPU of those found, among which `gpus` are to be used; None: none there.

    Whether that is an error, `candle_p1.distributed.gpus.check_gpus` finds out. A rank sees one GPU
    if each rank is given its own (jsrun -g1), else all.
    """
    if found and gpus is not None:
        if any(index >= len(found) for index in gpus):
            raise ParameterError(
                f"gpus {list(gpus)}: this node has {len(found)} GPUs, numbered from 0"
            )
        found = [found[index] for index in gpus]
    return found[comm.local_rank % len(found)] if found else None


def _ranks_per_gpu(
    comm: Communicator, num_found: int, gpus: Sequence[int] | None, *, share: bool = False
) -> int:
    """Returns how many ranks of this node compute on one GPU, at most; collective over the node.

    A rank that sees one GPU has its own if its launcher gives each rank another one (jsrun -g1),
    which NVML knows. Where it is not installed, NCCL will say so. More ranks than GPUs, which they
    are not to share, are a SetupError on every rank of the node.
    """
    num_found = len(gpus) if gpus is not None and num_found else num_found
    card = card_here(gpus) if num_found == 1 and comm.local_size > 1 else None
    seen = comm.local.allgather((num_found, card))
    cards = {card for _, card in seen}
    num = max(num for num, _ in seen)
    if num == 1:
        num = comm.local_size if None in cards else len(cards)
    if 0 < num < comm.local_size and not share:
        raise SetupError(
            f"{comm.local_size} ranks on a node with {count(num, 'GPU')}: a GPU can be that of one"
            f" rank only, so start {count(num, 'rank')} on a node (--np {num} on this machine) or,"
            " to test the path of several ranks, add --engine jax --share_gpus True"
        )
    return -(-comm.local_size // num) if num else 1
