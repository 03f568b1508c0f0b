"""What each rank measured, and what the record says about it."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from candle_p1.instrument import efficiency
from candle_p1.instrument.phases import summarize_phases
from candle_p1.models import fast
from candle_p1.models.optimizers import COMPUTE_TYPES
from candle_p1.records.spread import Bytes, Seconds
from candle_p1.records.types import CheckpointFacts, Efficiency, LaunchFacts, ModelFacts, RankFacts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from candle_p1.checkpoints.statistics import CheckpointStatistics
    from candle_p1.distributed.comm import Communicator
    from candle_p1.instrument.collectives import CommunicationLog
    from candle_p1.instrument.phases import Phase, PhasePath
    from candle_p1.parameters.parameter_set import ParameterSet


class Measured(NamedTuple):
    """What a rank measured, for the record."""

    facts: RankFacts
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
) -> CheckpointFacts:
    """Returns what the record says about checkpoints.

    Args:
        saved: What rank 0 knows of them.
        waits_s: How long each rank waited for them.
    """
    written = saved.written
    return CheckpointFacts(
        directory=str(saved.directory),
        num_saved=len(written),
        saved_bytes=sum(save.num_bytes for save in written),
        wait=Seconds.over(waits_s),
        write_s=sum(save.written_s or 0.0 for save in written),
        num_not_taken=saved.num_not_taken,
        num_failed=len(saved.errors),
        errors=list(dict.fromkeys(saved.errors)),
        newest=written[-1].name if written else None,
        num_writers=written[-1].num_writers if written else None,
    )


def describe_ranks(of_ranks: Sequence[Measured]) -> dict[str, Any]:
    """Returns the sections of the record that follow from what all ranks measured alone."""
    return {
        "ranks": [rank.facts for rank in of_ranks],
        "launch": describe_launch(of_ranks),
        "phases": summarize_phases(
            [rank.phases for rank in of_ranks], [rank.start for rank in of_ranks]
        ),
        "peak_rss": Bytes.over([rank.peak_rss_bytes for rank in of_ranks]),
        "efficiency": overall_efficiency(of_ranks),
    }


def describe_launch(of_ranks: Sequence[Measured]) -> LaunchFacts | None:
    """Returns what the ranks' processes did before the run; None if that is not known of all."""
    process_s = [rank.process_s for rank in of_ranks]
    if None in process_s:
        return None
    return LaunchFacts(
        process=Seconds.over(process_s), mpi=Seconds.over([rank.mpi_s for rank in of_ranks])
    )


def overall_efficiency(of_ranks: Sequence[Measured]) -> Efficiency:
    """Returns how well the ranks worked together over the whole run."""
    waited_s = [
        sum(phase.communication_s for path, phase in rank.phases.items() if len(path) == 1)
        for rank in of_ranks
    ]
    took_s = [rank.end - rank.start for rank in of_ranks]
    useful_s = [took - waited for took, waited in zip(took_s, waited_s, strict=True)]
    return efficiency.efficiencies(useful_s, max(took_s), definition=efficiency.DEFINITION)


def describe_model(model: Any) -> ModelFacts:
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
    return ModelFacts(
        num_parameters=model.count_params(),
        optimizer=fast.keras_name(model.optimizer).lower(),
        loss=_loss_name(model.loss),
        data_type=data_types.get(most, most),
        jit_compile=bool(model.jit_compile),
        kernels="fast" if used else "plain",
        fast_kernels=used,
    )


def unmet_requests(params: ParameterSet, facts: ModelFacts, *, reads_tables: bool) -> list[str]:
    """Returns, in sentences, what parameters ask for and the model or the data do not have.

    Args:
        params: The parameters of the run.
        facts: What the model is.
        reads_tables: Whether the loader has read any file.
    """
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
            " for TensorFlow on CPUs only"
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


def describe_rank(comm: Communicator, *, threads: int, device: str, num_cores: int) -> RankFacts:
    """Returns what the record says about this rank."""
    return RankFacts(
        rank=comm.rank,
        host=socket.gethostname(),
        node=comm.node,
        local_rank=comm.local_rank,
        num_cores=num_cores,
        threads=threads,
        device=device,
    )
