"""JAX's distributed runtime: XLA averages gradients, by Gloo on CPUs and NCCL or RCCL on GPUs.

A step is Keras's own step, mapped over one device per rank by ``jax.shard_map``, in which the
optimizer averages the gradients. XLA compiles both into one program, and so overlaps communication
with back-propagation where the hardware allows that.

``keras.distribution`` is not used: it spreads every variable over the job when it is made, so that
building a model is a collective on each of its arrays, and nothing but training can use them. Here
the variables stay local; only while steps follow one another are they parts of arrays that span the
ranks, which takes no copy.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import contextmanager
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.distributed.backend import AUTO
from candle_p1.distributed.comm import Attempt, on_first_rank
from candle_p1.distributed.compression import LARGEST_BYTES, average_as_half
from candle_p1.distributed.engines.engine import Engine
from candle_p1.distributed.gpus import num_visible
from candle_p1.distributed.host_log import HostLog
from candle_p1.distributed.watchdog import settings
from candle_p1.errors import SetupError
from candle_p1.instrument.collectives import note_collective

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from candle_p1.distributed.allreduce_log import AllreduceLog
    from candle_p1.instrument.collectives import CommunicationLog

AXIS = "ranks"
"""What the ranks are called in the arrays that span them."""
JOIN_S = 120
"""How long ranks wait for each other while they join."""
SHUTDOWN_S = 20
"""How long a rank that has finished waits for the others to finish, too."""
GROUP_BYTES = 1 << 26
TIMED_SINCE = (0, 10)
"""The release of JAX with which the times of allreduces were compared with those of slow ranks."""
LOOPBACK = "127.0.0.1"
OF_XLA = ("XLA_", "JAX_", "NCCL_", "RCCL_")
"""What the names of environment variables begin with that change what this engine does."""

_joined = False


class JaxEngine(Engine):
    """Averages gradients within the step that XLA compiles."""

    name = "jax"

    def join(self) -> None:
        """Connects the processes to rank 0 by TCP; JAX forms its collectives through it.

        Raises:
            SetupError: JAX is missing or has been used before, or a rank cannot be reached.
        """
        global _joined
        if _joined:
            return
        Attempt(_import).agree(self.comm)
        Attempt(self._check_names).agree(self.comm)
        address = on_first_rank(self._free_address, self.comm)
        Attempt(lambda: self._connect(address)).agree(self.comm)
        _joined = True

    def start(
        self,
        *,
        stall_shutdown_s: int = 300,
        deterministic: bool = True,
        timeline: Path | None = None,
        averaging: str = AUTO,
    ) -> dict[str, Any]:
        """Makes the mesh of the ranks' devices, and connects them.

        Repeated runs are bit-identical on CPUs in any case, and on GPUs with XLA's own flag, which
        `candle_p1.distributed.devices` sets. A rank that stalls is found by the watchdog.

        Raises:
            SetupError: JAX does not see the ranks of the job, or cannot connect them; or a timeline
                is asked for.
        """
        jax = _import()
        if timeline is not None:
            raise SetupError(
                "--timeline traces Horovod, and the engine is jax: use --step_trace, which traces"
                " XLA's operations, or --engine horovod"
            ).on_all_ranks()

        def compare() -> None:
            if (jax.process_index(), jax.process_count()) != (self.comm.rank, self.comm.size):
                raise SetupError(
                    f"this is process {jax.process_index()} of {jax.process_count()} for JAX and"
                    f" rank {self.comm.rank} of {self.comm.size} for MPI: JAX was in use before"
                    " this run, so its processes cannot be joined any more"
                )

        Attempt(compare).agree(self.comm)
        Attempt(self._meet).agree(self.comm)
        return {
            "backend": self.name,
            "settings": {
                "collectives": "gloo" if jax.default_backend() == "cpu" else "nccl or rccl",
                **{k: v for k, v in sorted(os.environ.items()) if k.startswith(OF_XLA)},
            },
        }

    def make_log(self, log: CommunicationLog, *, is_gpu: bool) -> AllreduceLog | None:
        """Returns a log that the step writes; None where its times would be wrong.

        GPUs would wait for the host, and JAX 0.6 calls the host too late.
        """
        import jax

        return None if is_gpu or jax.__version_info__ < TIMED_SINCE else HostLog(log)

    def average(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        compression: str = "none",
        log: AllreduceLog | None = None,
    ) -> list[Any]:
        """Returns the gradients averaged over ranks, within a step of `prepare`."""
        import jax

        given = [gradient for gradient in gradients if gradient is not None]
        if isinstance(log, HostLog):
            log.note_ready(given, sum(_num_bytes(each, compression) for each in given))
        if compression == "fp16":
            averaged = [
                average_as_half(
                    each,
                    self.comm.size,
                    lambda largest: jax.lax.pmax(largest, AXIS),
                    lambda values: jax.lax.psum(values, AXIS),
                )
                for each in given
            ]
        else:
            averaged = [jax.lax.pmean(each, AXIS) for each in given]
        if isinstance(log, HostLog):
            log.note_done(averaged)
        remaining = iter(averaged)
        return [None if gradient is None else next(remaining) for gradient in gradients]

    def at_last_pass(
        self,
        optimizer: Any,
        average: Callable[[Sequence[Any]], list[Any]],
        gradients: Sequence[Any],
    ) -> list[Any]:
        """Returns the averages at the last pass; with JAX, Keras clips at all, to no effect."""
        import jax

        is_last = (optimizer._iterations + 1) % optimizer.gradient_accumulation_steps == 0
        averaged: list[Any] = jax.lax.cond(is_last, average, list, gradients)
        return averaged

    def prepare(self, model: Any) -> None:
        """Lets the model's training steps span the ranks."""
        steps = _Steps(model, self._map, self._across)

        def make_train_function(force: bool = False) -> None:
            if model.train_function is None or force:
                steps.compile()
                model.train_function = model._make_function(steps)

        keep_local = model.jax_state_sync

        def jax_state_sync() -> None:
            steps.localize()
            keep_local()

        model.make_train_function = make_train_function
        model.jax_state_sync = jax_state_sync

    def broadcast_state(self, model: Any, root: int = 0) -> None:
        """Copies the root's weights and optimizer state to every rank, some arrays at a time.

        Arrays of which all ranks but the root contribute zeros are summed as integers, bit by bit,
        because -0.0 and NaN would not survive a sum of floating-point numbers.
        """
        import jax

        is_root = self.comm.rank == root
        variables = [*model.weights, *model.optimizer.variables]
        total = self._map(lambda arrays: [jax.lax.psum(each, AXIS) for each in arrays])
        seconds = 0.0
        for group in _groups(variables):
            bits = [_bits(each.value) for each in group]
            mine = bits if is_root else list(map(jax.numpy.zeros_like, bits))
            given = list(map(self._across, mine))
            compiled = total.lower(given).compile()
            jax.block_until_ready(given)
            begin = time.perf_counter()
            received = compiled(given)
            jax.block_until_ready(received)
            seconds += time.perf_counter() - begin
            if not is_root:
                for variable, each in zip(group, received, strict=True):
                    variable.assign(_as_values(_local(each), variable.value.dtype))
        num_bytes = sum(variable.value.nbytes for variable in variables)
        note_collective("jax", "broadcast", num_bytes * is_root, seconds)

    def mapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that is called with this rank's arrays, and may average them.

        Args:
            function: A function of trees of arrays that JAX can compile; it returns such a tree.
        """
        import jax

        compiled = self._map(function)

        def call(*arguments: Any) -> Any:
            return jax.tree.map(_local, compiled(*jax.tree.map(self._across, arguments)))

        return call

    def prepared(self, function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
        """Returns what `mapped` does, with its first arguments placed on the device beforehand.

        Args:
            function: See `mapped`.
            arguments: This rank's first arguments of it.
        """
        import jax

        compiled = self._map(function)
        placed = jax.tree.map(self._across, arguments)

        def call(*more: Any) -> Any:
            return jax.tree.map(_local, compiled(*placed, *jax.tree.map(self._across, more)))

        return call

    def _map(self, function: Callable[..., Any], *, batch: bool = False, **options: Any) -> Any:
        """Returns a function compiled for the devices of all ranks.

        Args:
            function: Its arguments are what is the ranks' own or the same on all of them.
            batch: Whether its second argument is a batch, of which each rank has a part.
            options: Those of ``jax.jit``.
        """
        import jax

        spec = jax.sharding.PartitionSpec
        # JAX takes every state for the same on all ranks. Those of metrics and random layers are
        # not, but as no device sees another's without a collective, each keeps its own; that is
        # why nothing is to be verified.
        mapped = jax.shard_map(
            function,
            mesh=self._mesh,
            in_specs=(spec(), spec(AXIS)) if batch else spec(),
            out_specs=spec(),
            check_vma=False,
        )
        return jax.jit(mapped, **options)

    def _across(self, value: Any, *, batch: bool = False) -> Any:
        """Returns an array of all ranks, of which a local one is this rank's part; not a copy."""
        import jax

        spec = jax.sharding.PartitionSpec(AXIS) if batch else jax.sharding.PartitionSpec()
        local = jax.device_put(value, self._mesh.local_devices[0])
        shape = (self.comm.size * local.shape[0], *local.shape[1:]) if batch else local.shape
        sharding = jax.sharding.NamedSharding(self._mesh, spec)
        return jax.make_array_from_single_device_arrays(shape, sharding, [local])

    @cached_property
    def _mesh(self) -> Any:
        """The devices of all ranks, one of each, in their order."""
        import jax

        of_ranks: dict[int, Any] = {}
        for device in jax.devices():  # a rank sees one GPU, if it is known how many there are
            of_ranks.setdefault(device.process_index, device)
        devices = [of_ranks[rank] for rank in range(self.comm.size)]
        return jax.sharding.Mesh(np.array(devices), (AXIS,))

    def _meet(self) -> None:
        """Lets the ranks connect, and checks that they do.

        Raises:
            SetupError: They do not.
        """
        import jax

        try:
            with _quiet():
                found = int(self.mapped(lambda one: jax.lax.psum(one, AXIS))(np.int32(1)))
        except Exception as error:  # of many types
            raise SetupError(
                f"JAX cannot connect the ranks for its collectives: {str(error).splitlines()[0]}"
            ) from error
        if found != self.comm.size:
            raise SetupError(f"JAX's collectives reach {found} of {self.comm.size} ranks")

    def _check_names(self) -> None:
        """Checks that other nodes find this one by its name, where Gloo listens.

        Raises:
            SetupError: They do not.
        """
        if self.comm.num_nodes == 1 or num_visible():
            return
        name = socket.gethostname()
        try:
            address = socket.gethostbyname(name)
        except OSError as error:
            raise SetupError(
                f"node {name}: JAX's collectives on CPUs (Gloo) listen at the address of the"
                f" host's name, which is not known here ({error}): add it to /etc/hosts, or use"
                " --engine horovod"
            ) from error
        if address.startswith("127."):
            raise SetupError(
                f"node {name}: JAX's collectives on CPUs (Gloo) listen at the address of the"
                f" host's name, which is {address} here, where other nodes cannot connect: let the"
                " name mean an address of the network (/etc/hosts), or use --engine horovod"
            )

    def _free_address(self) -> str:
        """Returns the address of a free port of this node, for rank 0."""
        host = LOOPBACK
        if self.comm.num_nodes > 1:
            host = settings.addresses(settings.interface())[0]
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{host}:{probe.getsockname()[1]}"

    def _connect(self, address: str) -> None:
        import jax

        # A signal is the watchdog's concern, and JAX would take SIGTERM for itself.
        _set(jax, "jax_enable_preemption_service", False)
        _set(jax, "jax_cpu_collectives_implementation", "gloo")
        # gRPC takes a proxy even to 127.0.0.1; without this variable, it looks at no_proxy.
        name = "no_grpc_proxy"
        direct = os.environ.get(name) or os.environ.get("no_proxy", "")
        os.environ[name] = ",".join(filter(None, (direct, address.rpartition(":")[0])))
        options: dict[str, Any] = {}
        if "shutdown_timeout_seconds" in signature(jax.distributed.initialize).parameters:
            options["shutdown_timeout_seconds"] = SHUTDOWN_S  # not in JAX 0.6
        try:
            jax.distributed.initialize(
                address,
                self.comm.size,
                self.comm.rank,
                cluster_detection_method="deactivate",
                initialization_timeout=JOIN_S,
                **options,
            )
            jax.devices()  # meets the others, too
        except Exception as error:  # of many types
            raise SetupError(
                f"JAX cannot join this process to rank 0 at {address}: {str(error).splitlines()[0]}"
            ) from error


ENGINE = JaxEngine


class _Steps:
    """The training steps of a model, on the devices of all ranks.

    Args:
        model: The compiled model.
        map_over: `JaxEngine._map`.
        across: `JaxEngine._across`.
    """

    def __init__(
        self, model: Any, map_over: Callable[..., Any], across: Callable[..., Any]
    ) -> None:
        self._model, self._map, self._across = model, map_over, across

    def compile(self) -> None:
        """Compiles the step; its state takes the place of the one before."""
        self._step = self._map(self._model.train_step, batch=True, donate_argnums=0)

    def __call__(self, state: Any, data: Any) -> tuple[Any, Any]:
        """Returns the metrics and the state after a step.

        Args:
            state: Lists of arrays: local ones at the first step, later those that the last step has
                returned.
            data: This rank's batch.
        """
        import jax

        state = jax.tree.map(
            lambda value: self._across(value) if value.is_fully_addressable else value, state
        )
        batch = jax.tree.map(lambda value: self._across(value, batch=True), data)
        logs, state = self._step(state, batch)
        return jax.tree.map(_local, logs), state

    def localize(self) -> None:
        """Makes the state of the last step local, before Keras puts it into the variables."""
        state = getattr(self._model, "_jax_state", None)
        if state and not self._model._jax_state_synced:
            self._model._jax_state = {
                name: list(map(_local, values)) for name, values in state.items()
            }


def _groups(variables: Sequence[Any]) -> Iterator[list[Any]]:
    """Returns variables in groups of about GROUP_BYTES, which are compiled and sent at once."""
    group: list[Any] = []
    for variable in variables:
        if group and sum(each.value.nbytes for each in [*group, variable]) > GROUP_BYTES:
            yield group
            group = []
        group.append(variable)
    if group:
        yield group


@contextmanager
def _quiet() -> Iterator[None]:
    """Discards what C++ prints: Gloo has a line for every rank and peer."""
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        with Path(os.devnull).open("w") as nothing:
            os.dup2(nothing.fileno(), 1)
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _local(value: Any) -> Any:
    return value if value.is_fully_addressable else value.addressable_data(0)


def _bits(value: Any) -> Any:
    """Returns the bits of an array as unsigned integers of the same size."""
    import jax

    if value.dtype.kind == "b":
        return value.astype("uint8")
    return jax.lax.bitcast_convert_type(value, f"uint{8 * value.dtype.itemsize}")


def _as_values(bits: Any, dtype: Any) -> Any:
    """Returns the array of which `_bits` has returned the bits."""
    import jax

    return bits.astype(dtype) if dtype.kind == "b" else jax.lax.bitcast_convert_type(bits, dtype)


def _num_bytes(gradient: Any, compression: str) -> int:
    """Returns how many bytes of a gradient a rank sends."""
    if compression == "fp16":
        return int(gradient.size) * 2 + LARGEST_BYTES
    return int(gradient.size) * int(gradient.dtype.itemsize)


def _set(jax: Any, name: str, value: Any) -> None:
    """Sets an option that not all releases of JAX have."""
    if hasattr(jax.config, name):
        jax.config.update(name, value)


def _import() -> Any:
    try:
        import jax
    except ImportError as error:
        raise SetupError(
            f"the engine jax needs JAX, which cannot be imported: {error}. Run make setup"
            " ENGINE=jax, or install candle-p1[jax-mpi]"
        ) from error
    return jax
