"""JAX: XLA averages gradients, by Gloo on CPUs and NCCL or RCCL on GPUs, or the host does.

A step is Keras's own step, mapped over one device per rank by ``jax.shard_map``, in which the
optimizer averages the gradients. XLA compiles both into one program, and so overlaps communication
with back-propagation where the hardware allows that. The variables stay local; only while steps
follow one another are they parts of arrays that span the ranks, which takes no copy.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from inspect import signature
from typing import Any

import numpy as np

from candle_p1.distributed.comm import Communicator, agree, on_first_rank
from candle_p1.distributed.gpus import num_visible
from candle_p1.distributed.mpi_library import check_thread_level
from candle_p1.distributed.reducers.reducer import Reducer, average_as_half
from candle_p1.distributed.watchdog import INTERFACE_VARIABLE, addresses
from candle_p1.errors import SetupError
from candle_p1.instrument.collectives import note_collective

AXIS = "ranks"
"""What the ranks are called in the arrays that span them."""
GROUP_BYTES = 1 << 26
LOOPBACK = "127.0.0.1"


class JaxReducer(Reducer):
    """Averages within the step that XLA compiles. Making it is collective.

    Raises SetupError on all ranks if JAX does not see the ranks of the job, or cannot connect them.
    """

    name = "jax"

    def __init__(self, comm: Communicator, compression: str = "none") -> None:
        import jax

        super().__init__(comm, compression)
        why = "JAX was in use before this run, so its processes cannot be joined any more"
        agree(comm, self.check_rank, jax.process_index(), jax.process_count(), why)
        agree(comm, self._meet)

    @property
    def settings(self) -> dict[str, str]:
        """What performs the collectives, and the variables that change what it does."""
        import jax

        collectives = "gloo" if jax.default_backend() == "cpu" else "nccl or rccl"
        begins = ("XLA_", "JAX_", "NCCL_", "RCCL_")
        told = {k: v for k, v in sorted(os.environ.items()) if k.startswith(begins)}
        return {"collectives": collectives, **told}

    def _meet(self) -> None:
        """Lets the ranks connect, or raises SetupError."""
        from jax.lax import psum

        try:
            with _quiet():
                found = int(self.mapped(partial(psum, axis_name=AXIS))(np.int32(1)))
        except Exception as error:  # of many types
            raise SetupError(
                f"JAX cannot connect the ranks for its collectives: {str(error).splitlines()[0]}"
            ) from error
        if found != self.comm.size:
            raise SetupError(f"JAX's collectives reach {found} of {self.comm.size} ranks")

    def average(self, gradients: Mapping[str, Any], after: Sequence[Any] = ()) -> list[Any]:
        """Returns the averages, within a step of `map_steps` or `mapped`."""
        from jax.lax import pmax, pmean, psum

        if self.compression == "none":
            return [pmean(gradient, AXIS) for gradient in gradients.values()]
        largest, total = partial(pmax, axis_name=AXIS), partial(psum, axis_name=AXIS)
        return [
            average_as_half(each, self.comm.size, largest, total) for each in gradients.values()
        ]

    def broadcast(self, variables: Sequence[Any], root: int) -> None:
        """Copies the variables, some arrays at a time.

        Arrays of which all ranks but the root contribute zeros are summed as integers, bit by bit,
        because -0.0 and NaN would not survive a sum of floating-point numbers.
        """
        import jax

        is_root = self.comm.rank == root
        total = self._map(lambda arrays: [jax.lax.psum(each, AXIS) for each in arrays])
        seconds = 0.0
        for group in _groups(variables):
            values = [np.asarray(variable.value) for variable in group]
            bits = [value.view(f"u{value.itemsize}") * is_root for value in values]
            given = list(map(self._across, bits))
            compiled = total.lower(given).compile()
            jax.block_until_ready(given)
            begin = time.perf_counter()
            received = compiled(given)
            jax.block_until_ready(received)
            seconds += time.perf_counter() - begin
            if not is_root:
                for variable, value, each in zip(group, values, received, strict=True):
                    variable.assign(np.asarray(_local(each)).view(value.dtype))
        num_bytes = sum(variable.value.nbytes for variable in variables)
        note_collective(self.name, "broadcast", num_bytes * is_root, seconds)

    def map_steps(self, model: Any) -> None:
        """Lets the training steps of a compiled model span the ranks.

        The model gets two functions for steps of one's own. ``compile_over_ranks`` compiles a
        function of the state and further trees of arrays, which returns logs and state; each rank
        calls it with its own arrays. ``across_ranks`` prepares arrays for many such calls.
        """
        import jax

        def across(tree: Any) -> Any:
            # The state is local at first; then it is what the last step has returned.
            return jax.tree.map(
                lambda value: (
                    self._across(value) if getattr(value, "is_fully_addressable", True) else value
                ),
                tree,
            )

        def compile_over_ranks(function: Callable[..., Any]) -> Callable[..., Any]:
            compiled = self._map(function, donate_argnums=0)

            def call(*arguments: Any) -> tuple[Any, Any]:
                logs, state = compiled(*across(arguments))
                return jax.tree.map(_local, logs), state

            return call

        def make_train_function(force: bool = False) -> None:
            if model.train_function is None or force:
                step = compile_over_ranks(model.train_step)
                model.train_function = model._make_function(step)

        synchronize = model.jax_state_sync

        def jax_state_sync() -> None:  # it puts the state into the variables, as local arrays
            state = getattr(model, "_jax_state", None)
            if state and not model._jax_state_synced:
                model._jax_state = {name: list(map(_local, each)) for name, each in state.items()}
            synchronize()

        model.make_train_function = make_train_function
        model.jax_state_sync = jax_state_sync
        model.compile_over_ranks, model.across_ranks = compile_over_ranks, across

    def mapped(self, function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
        """Returns a function that is called with this rank's arrays, and may average them.

        JAX compiles it. It takes trees of arrays and returns one; the first arguments are placed on
        the device beforehand.
        """
        import jax

        compiled = self._map(function)
        placed = jax.tree.map(self._across, arguments)

        def call(*more: Any) -> Any:
            return jax.tree.map(_local, compiled(*placed, *jax.tree.map(self._across, more)))

        return call

    def _map(self, function: Callable[..., Any], **options: Any) -> Any:
        """Returns a function compiled for the devices of all ranks, with options of ``jax.jit``."""
        import jax

        spec = jax.sharding.PartitionSpec()
        # JAX takes every argument for the same on all ranks. Batches and the states of metrics and
        # random layers are not, but as no device sees another's without a collective, each keeps
        # its own; that is why nothing is to be verified.
        mapped = jax.shard_map(
            function, mesh=self._mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        return jax.jit(mapped, **options)

    def _across(self, value: Any) -> Any:
        """Returns an array of all ranks, of which a local one is this rank's part; not a copy."""
        import jax

        local = jax.device_put(value, self._mesh.local_devices[0])
        sharding = jax.sharding.NamedSharding(self._mesh, jax.sharding.PartitionSpec())
        return jax.make_array_from_single_device_arrays(local.shape, sharding, [local])

    @cached_property
    def _mesh(self) -> Any:
        """The devices of all ranks, one of each, in their order."""
        import jax

        # A rank sees one GPU, if it is known how many there are.
        first = {device.process_index: device for device in reversed(jax.devices())}
        return jax.sharding.Mesh(np.array([first[i] for i in range(self.comm.size)]), (AXIS,))


def _groups(variables: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Returns variables in groups of about GROUP_BYTES, which are compiled and sent at once."""
    begin = 0
    for end in range(1, len(variables) + 1):
        beyond = variables[begin : end + 1]
        if end == len(variables) or sum(each.value.nbytes for each in beyond) > GROUP_BYTES:
            yield variables[begin:end]
            begin = end


def _local(value: Any) -> Any:
    return value if value.is_fully_addressable else value.addressable_data(0)


def join_processes(comm: Communicator) -> None:
    """Connects the processes to rank 0 by TCP, once, before JAX looks for devices; collective.

    Raises SetupError on every rank if JAX is missing or in use, or a rank cannot be reached.
    """
    if agree(comm, _import_jax).distributed.is_initialized():
        return
    agree(comm, _check_names, comm)
    address = on_first_rank(comm, _free_address, comm)
    agree(comm, _connect, comm, address)


def _check_names(comm: Communicator) -> None:
    """Checks that other nodes find this one by its name, or raises SetupError."""
    if comm.num_nodes == 1 or num_visible():
        return
    try:
        address = socket.gethostbyname(platform.node())
    except OSError as error:
        problem = f"is not known here ({error})"
    else:
        if not address.startswith("127."):
            return
        problem = f"is {address} here, where other nodes cannot connect"
    raise SetupError(
        f"node {platform.node()}: JAX's collectives on CPUs (Gloo) listen at the address of the"
        f" host's name, which {problem}: make it resolve to an address of the"
        " network (/etc/hosts), or use --engine horovod"
    )


def _free_address(comm: Communicator) -> str:
    """Returns the address of a free port of this node, for rank 0."""
    several = comm.num_nodes > 1
    host = addresses(os.environ.get(INTERFACE_VARIABLE, ""))[0] if several else LOOPBACK
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{host}:{probe.getsockname()[1]}"


def _connect(comm: Communicator, address: str) -> None:
    import jax

    # A signal is the watchdog's concern, and JAX would take SIGTERM for itself.
    if hasattr(jax.config, "jax_enable_preemption_service"):  # not in JAX 0.6
        jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # gRPC takes a proxy even to 127.0.0.1; without this variable, it looks at no_proxy.
    name = "no_grpc_proxy"
    direct = os.environ.get(name) or os.environ.get("no_proxy", "")
    os.environ[name] = ",".join(filter(None, (direct, address.rpartition(":")[0])))
    options: dict[str, Any] = {"initialization_timeout": 120}
    if "shutdown_timeout_seconds" in signature(jax.distributed.initialize).parameters:
        options["shutdown_timeout_seconds"] = 20  # of a rank that waits for others; not in JAX 0.6
    options["cluster_detection_method"] = "deactivate"
    try:
        jax.distributed.initialize(address, comm.size, comm.rank, **options)
        jax.devices()  # meets the others, too
    except Exception as error:  # of many types
        raise SetupError(
            f"JAX cannot join this process to rank 0 at {address}: {str(error).splitlines()[0]}"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Discards what C++ prints: Gloo has a line for every rank and peer."""
    sys.stdout.flush()
    stdout = os.dup(1)
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 1)
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(nothing)


def _import_jax() -> Any:
    try:
        import jax
    except ImportError as error:
        raise SetupError(
            f"the engine jax needs JAX, which cannot be imported: {error}. Run make setup"
            " ENGINE=jax, or install candle-p1[jax-mpi]"
        ) from error
    return jax


class HostReducer(Reducer):
    """Averages in the memory of the host, for ranks that share a GPU, where NCCL refuses to.

    It is for tests of the path of several ranks: a step waits while all of its gradients go to the
    host and, by MPI, through all ranks, in a thread of XLA's, so its messages have a communicator
    of their own. Making it is collective.

    Raises SetupError on every rank if there are several nodes, or gradients are to be compressed.
    """

    name = "host"

    def __init__(self, comm: Communicator, compression: str = "none") -> None:
        super().__init__(comm, compression)
        if comm.num_nodes > 1 or compression != "none":
            raise SetupError(
                "--share_gpus is for ranks of one node, without --compression"
            ).on_all_ranks()
        check_thread_level(comm)
        self._apart = comm.split_nodes(0).local

    @property
    def settings(self) -> dict[str, str]:
        return {"collectives": self.name}

    def average(self, gradients: Mapping[str, Any], after: Sequence[Any] = ()) -> list[Any]:
        """Returns the averages, within a step that JAX compiles."""
        import jax
        from jax.experimental import io_callback

        given = list(gradients.values())
        like = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in given]
        return list(io_callback(self._average, like, given, ordered=True))

    def _average(self, gradients: Sequence[Any]) -> list[Any]:
        averages = []
        for gradient in map(np.asarray, gradients):
            values = gradient.astype(np.result_type(gradient.dtype, np.float32))
            total = self._apart.allreduce_sum(values) / values.dtype.type(self.comm.size)
            averages.append(total.astype(gradient.dtype))
        return averages

    def broadcast(self, variables: Sequence[Any], root: int) -> None:
        num_bytes, begin = 0, time.perf_counter()
        for variable in variables:
            value = np.asarray(variable.value)
            variable.assign(self.comm.broadcast(value, root))
            num_bytes += value.nbytes * (self.comm.rank == root)
        note_collective(self.name, "broadcast", num_bytes, time.perf_counter() - begin)
