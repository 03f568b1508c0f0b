"""What ranks and nodes measured, and what the record says about it."""

from __future__ import annotations

import platform
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import Self

from candle_p1.checkpoints.policy import are_saved
from candle_p1.checkpoints.writer import CheckpointStatistics
from candle_p1.data.samples import DataSet
from candle_p1.distributed.comm import Communicator, agree
from candle_p1.instrument.collectives import CommunicationLog
from candle_p1.instrument.epochs import efficiencies
from candle_p1.instrument.logs import (
    CallProfile,
    merge_profiles,
    write_profile,
    write_profile_table,
)
from candle_p1.instrument.phases import Phase, PhasePath, summarize_phases
from candle_p1.instrument.power.account import (
    Interval,
    NodeEnergy,
    combine,
    measure_node,
    measure_so_far,
)
from candle_p1.instrument.power.choose import open_sources
from candle_p1.instrument.power.gpus import JobGpus, visible_here
from candle_p1.instrument.power.sampler import Sampler
from candle_p1.models import fast
from candle_p1.models.optimizers import COMPUTE_TYPES
from candle_p1.parameters.parameter_set import ParameterSet
from candle_p1.records.power_trace import write_traces
from candle_p1.records.rank_stats import Bytes, Seconds
from candle_p1.records.record import make_record, utc_now
from candle_p1.records.types import (
    SCHEMA_VERSION,
    JobEnergy,
    LaunchTimes,
    Network,
    Rank,
    RunRecord,
    SavedCheckpoints,
)


class Measured(NamedTuple):
    """What a rank measured, for the record."""

    facts: Rank
    peak_rss_bytes: int
    phases: dict[PhasePath, Phase]
    communication: CommunicationLog
    start: float
    end: float
    checkpoint_wait_s: float | None
    process_s: float | None
    mpi_s: float


def describe_ranks(
    ranks: Sequence[Measured], saved: CheckpointStatistics | None = None
) -> dict[str, Any]:
    """Returns the sections of the record that follow from what all ranks measured and saved."""
    runtimes_s = [rank.end - rank.start for rank in ranks]
    useful_s = [
        runtime_s
        - sum(phase.communication_s for path, phase in rank.phases.items() if len(path) == 1)
        for rank, runtime_s in zip(ranks, runtimes_s, strict=True)
    ]
    process_s, launch = [rank.process_s for rank in ranks], None
    if None not in process_s:
        mpi_s = [rank.mpi_s for rank in ranks]
        launch = LaunchTimes(process=Seconds.over(process_s), mpi=Seconds.over(mpi_s))
    sections: dict[str, Any] = {
        "ranks": [rank.facts for rank in ranks],
        "launch": launch,
        "phases": summarize_phases([rank.phases for rank in ranks], [rank.start for rank in ranks]),
        "peak_rss": Bytes.over([rank.peak_rss_bytes for rank in ranks]),
        "efficiency": efficiencies(useful_s, max(runtimes_s)),
    }
    if saved:
        sections["checkpoints"] = SavedCheckpoints(
            directory=str(saved.directory),
            num_saved=len(saved.written),
            saved_bytes=sum(save.num_bytes for save in saved.written),
            wait=Seconds.over([rank.checkpoint_wait_s for rank in ranks]),
            num_not_taken=saved.num_not_taken,
            errors=list(dict.fromkeys(saved.errors)),
            newest=saved.written[-1].name if saved.written else None,
        )
    return sections


def num_samples(data: DataSet) -> dict[str, int]:
    """Returns how many samples each part of the data has."""
    return {f"num_{part}": len(getattr(data, part)) for part in ("train", "validation", "test")}


def describe_model(model: Any) -> Network:
    """Returns what the record says about a model: what was built, not what was asked for.

    Its kernels are known once it has trained or been evaluated.
    """
    from candle_p1.models.fast.tables import count_whole

    weights: Counter[str] = Counter()
    for layer in model._flatten_layers():
        weights[layer.compute_dtype] += sum(
            prod(weight.shape) for weight in layer._trainable_variables
        )
    data_types = {keras_type: name for name, keras_type in COMPUTE_TYPES.items()}
    (most, _), *_ = weights.most_common()
    used = fast.used()
    return Network(
        num_parameters=count_whole(model),
        optimizer=fast.keras_name(model.optimizer).lower(),
        loss=_loss_name(model.loss),
        data_type=data_types.get(most, most),
        jit_compile=bool(model.jit_compile),
        kernels="fast" if used else "plain",
        fast_kernels=used,
    )


def unmet_requests(params: ParameterSet, facts: Network, *, reads_tables: bool) -> list[str]:
    """Returns, in sentences, what parameters ask for and the model or the data do not have."""
    import keras

    found = [
        f"{name} = {params[name]} ({params.origin(name)}): the model's {name} is {has}"
        for name, has in (("data_type", facts.data_type), ("optimizer", facts.optimizer))
        if str(params[name]).lower() != has
    ]
    has_no_kernels = params["kernels"] == "fast" and not (fast.are_fast() or fast.used())
    idle = {
        "loader": not reads_tables and "here: the benchmark reads its files by itself",
        "kernels": has_no_kernels
        and "here: fast kernels exist for TensorFlow on CPUs and for JAX on GPUs",
        "device_data_mb": keras.backend.backend() != "jax"
        and "here: only JAX's steps take their batches from the device",
    }
    return found + [
        f"{name} = {params[name]} ({params.origin(name)}) has no effect {why}"
        for name, why in idle.items()
        if why and params.origin(name).is_explicit
    ]


def chosen_by_test(params: ParameterSet, on_test: bool) -> list[str]:
    """Returns a warning if validation, on the test samples, decides something."""
    of_best = are_saved(params) and params["ckpt_save_best_metric"].startswith("val_")
    deciding = {"early_stop": True, "ckpt_save_best": of_best}
    chosen = [name for name, decides in deciding.items() if decides and params[name]]
    if not chosen or not on_test:
        return []
    return [
        f"{' and '.join(chosen)}: the validation samples are the test samples, so the test metrics"
        " of the chosen model are optimistic"
    ]


def _loss_name(loss: Any) -> str:
    """Returns the name of a loss, or the names of the losses of several outputs."""
    if isinstance(loss, str):
        return loss
    if loss is None:
        return "computed by the model"
    if isinstance(loss, Mapping):
        return ", ".join(f"{output}: {_loss_name(each)}" for output, each in loss.items())
    if isinstance(loss, list | tuple):
        return ", ".join(map(_loss_name, loss))
    return str(getattr(loss, "__name__", type(loss).__name__))


def describe_rank(comm: Communicator, threads: int, device: str, num_cores: int) -> Rank:
    """Returns what the record says about this rank."""
    return Rank(
        rank=comm.rank,
        host=platform.node(),
        node=comm.node,
        local_rank=comm.local_rank,
        num_cores=num_cores,
        threads=threads,
        device=device,
    )


def first_record(
    benchmark: str, params: ParameterSet, comm: Communicator, launcher: str
) -> RunRecord:
    """Returns the record of a run that begins."""
    parameters = {
        name: {"value": value, "origin": str(params.origin(name))} for name, value in params.items()
    }
    return make_record(
        {
            "schema_version": SCHEMA_VERSION,
            "status": "running",
            "benchmark": benchmark,
            "started": utc_now(),
            "command": sys.argv,
            "num_ranks": comm.size,
            "num_nodes": comm.num_nodes,
            "launcher": launcher,
            "parameters": parameters,
        }
    )


def write_profiles(
    profile: CallProfile, directory: Path, comm: Communicator, warn: Callable[[str], None]
) -> None:
    """Writes this rank's profile and, on rank 0, the table of all, if wanted; collective."""
    own = profile.statistics()
    if own is None:  # on all ranks
        return
    problem = None
    try:
        write_profile(directory, comm.rank, own)
    except OSError as error:  # what was measured is worth more than a profile
        problem = str(error)
    merged = comm.reduce(own, merge_profiles)
    if merged is not None:
        write_profile_table(directory, merged)
    failed = comm.first(problem)
    if failed is not None:
        rank, why = failed
        warn(f"the profile of rank {rank}, at least, could not be written: {why}")


class PowerMeter:
    """Samples while the body of ``with`` runs; the constructor is collective.

    Raises ParameterError, the same on every rank, if a source requested by name is not available;
    see `candle_p1.instrument.power.choose`.
    """

    def __init__(
        self, comm: Communicator, names: str, hz: float, gpus: Sequence[int] | None = None
    ) -> None:
        self._comm = comm
        job = JobGpus(comm.local.allgather(visible_here()), gpus)
        leads = comm.local_rank == 0
        opened = agree(comm, lambda: open_sources(names, job) if leads else None)
        self._absent = opened.absent if opened else {}
        self._sampler = Sampler(opened.sources, hz) if opened else None
        self._measures = comm.any(bool(opened and opened.sources))

    def __enter__(self) -> Self:
        if self._sampler:
            self._sampler.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._sampler:
            self._sampler.stop()

    def measure(
        self, intervals: Sequence[Interval], directory: Path, start_s: float
    ) -> JobEnergy | None:
        """Ends sampling; returns the record's section "energy" on rank 0, else None; collective.

        Each node's readings are written to a file in the run's directory. `intervals` are this
        rank's phases and `start_s` when the run began, by time.perf_counter.
        """
        sampler = self._sampler
        own = self._measure_node(sampler, intervals, directory, start_s) if sampler else None
        gathered = self._comm.gather(own)
        return None if gathered is None else combine(_in_order(gathered))

    def so_far(self, start_s: float) -> JobEnergy | None:
        """Returns the energy of all nodes until now on rank 0; collective if there are several.

        None if it is not known, and on all ranks but rank 0.
        """
        if not self._measures:
            return None
        own = measure_so_far(self._sampler, start_s, self._comm.node) if self._sampler else None
        gathered = self._comm.gather(own) if self._comm.num_nodes > 1 else [own]
        nodes = _in_order(gathered or [])
        if len(nodes) < self._comm.num_nodes:  # not rank 0, or a node does not answer
            return None
        energy = combine(nodes)
        return None if energy.kind == "absent" else energy

    def _measure_node(
        self,
        sampler: Sampler,
        intervals: Sequence[Interval],
        directory: Path,
        start_s: float,
    ) -> NodeEnergy:
        sampler.stop()
        node, file = self._comm.node, directory / f"power-{self._comm.node:04d}.csv"
        measured = measure_node(sampler, intervals, node=node, absent=self._absent, trace=file.name)
        if measured.trace:
            write_traces(file, sampler.traces(), node, start_s)
        return measured


def _in_order(nodes: Sequence[NodeEnergy | None]) -> list[NodeEnergy]:
    return sorted((node for node in nodes if node), key=lambda node: node.node)
