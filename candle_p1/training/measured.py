"""What each rank measured, and what the record says about it."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from candle_p1.checkpoints.writer import CheckpointStatistics
from candle_p1.distributed.comm import Communicator
from candle_p1.instrument.collectives import CommunicationLog
from candle_p1.instrument.epochs import efficiencies
from candle_p1.instrument.phases import Phase, PhasePath, summarize_phases
from candle_p1.models import fast
from candle_p1.models.optimizers import COMPUTE_TYPES
from candle_p1.parameters.parameter_set import ParameterSet
from candle_p1.records.rank_stats import Bytes, Seconds
from candle_p1.records.types import LaunchTimes, Network, Rank, SavedCheckpoints


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


def describe_checkpoints(
    saved: CheckpointStatistics, waits_s: Sequence[float | None]
) -> SavedCheckpoints:
    """Returns what the record says about checkpoints, with how long each rank waited for them."""
    written = saved.written
    return SavedCheckpoints(
        directory=str(saved.directory),
        num_saved=len(written),
        saved_bytes=sum(save.num_bytes for save in written),
        wait=Seconds.over(waits_s),
        num_not_taken=saved.num_not_taken,
        errors=list(dict.fromkeys(saved.errors)),
        newest=written[-1].name if written else None,
    )


def describe_ranks(ranks: Sequence[Measured]) -> dict[str, Any]:
    """Returns the sections of the record that follow from what all ranks measured alone."""
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
    return {
        "ranks": [rank.facts for rank in ranks],
        "launch": launch,
        "phases": summarize_phases([rank.phases for rank in ranks], [rank.start for rank in ranks]),
        "peak_rss": Bytes.over([rank.peak_rss_bytes for rank in ranks]),
        "efficiency": efficiencies(useful_s, max(runtimes_s)),
    }


def describe_model(model: Any) -> Network:
    """Returns what the record says about a model: what was built, not what was asked for.

    Its kernels are known once it has trained or been evaluated.
    """
    weights: Counter[str] = Counter()
    for layer in model._flatten_layers():
        weights[layer.compute_dtype] += sum(
            prod(weight.shape) for weight in layer._trainable_variables
        )
    data_types = {keras_type: name for name, keras_type in COMPUTE_TYPES.items()}
    (most, _), *_ = weights.most_common()
    used = fast.used()
    return Network(
        num_parameters=model.count_params(),
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
    if params.origin("loader").is_explicit and not reads_tables:
        found.append(
            f"loader = {params['loader']} ({params.origin('loader')}) has no effect here: the"
            " benchmark reads its files by itself"
        )
    if params.origin("kernels").is_explicit and params["kernels"] == "fast" and not fast.are_fast():
        found.append(
            f"kernels = fast ({params.origin('kernels')}) has no effect: fast kernels exist"
            " for TensorFlow on CPUs and for JAX on GPUs"
        )
    if params.origin("device_data_mb").is_explicit and keras.backend.backend() != "jax":
        found.append(
            f"device_data_mb = {params['device_data_mb']} ({params.origin('device_data_mb')}) has"
            " no effect: only JAX's steps take their batches from the device"
        )
    return found


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


def describe_rank(comm: Communicator, *, threads: int, device: str, num_cores: int) -> Rank:
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
