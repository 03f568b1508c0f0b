"""What a model takes from the record of a run: its shape, the time of each phase, and the power."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from candle_p1.errors import ModelError
from candle_p1.modelling.phases import (
    COMPUTE,
    EVALUATE,
    EXPOSED,
    FIRST_STEP,
    LOAD,
    REST,
    STARTUP,
    TRANSFER,
    VALIDATE,
    WAIT,
)
from candle_p1.modelling.shape import JobShape, ShapeRule
from candle_p1.scaling import BATCH_SCALINGS, EPOCHS_SCALINGS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from candle_p1.records.types import PhaseTimes, RunRecord

COOPERATIVE = ("parallel", "cached")
"""The loaders with which ranks read each file once, together."""

SHARED_SAMPLES = "batch_step"
"""The level of data parallelism at which ranks share the samples of an epoch."""

BYTES_PER_WEIGHT = 4

POWER_GROUPS: Mapping[str, tuple[str, ...]] = {
    "load": (LOAD,),
    "broadcast": (WAIT, TRANSFER),
    "train": (COMPUTE, FIRST_STEP, EXPOSED, VALIDATE),
}
"""The phases of the model that a phase of the record with a power of its own has; for all others,
the mean power of the whole run stands."""


@dataclass(frozen=True)
class Observation:
    """One run, as a model sees it.

    Attributes:
        name: Where it was recorded.
        shape: Its size, and what each of its ranks did.
        phases_s: The seconds of each phase, mean over ranks; they add up to the time of the run.
        total_s: That time.
        watts: The mean power of the whole job in the phases of POWER_GROUPS that have one, and
            under "" over the whole run; empty where power was not measured.
        energy_kind: How that is known: measured, estimated or simulated; "" where it is not.
        reading_share: The share of loading in which ranks waited for their reads; None where the
            loader reads while it parses, so that nobody knows.
    """

    name: str
    shape: JobShape
    phases_s: Mapping[str, float]
    total_s: float
    watts: Mapping[str, float]
    energy_kind: str
    reading_share: float | None


def observe(record: RunRecord, name: str = "") -> Observation | None:
    """Returns what a model takes from a record; None if the run did not finish.

    Args:
        record: The record.
        name: Where it was recorded, for messages.
    """
    if record.status != "ok" or record.phases is None or record.total_s is None:
        return None
    shape = _shape(record)
    if shape is None:
        return None
    phases_s = _phases_s(record, shape)
    watts: dict[str, float] = {}
    energy = record.energy
    if energy is not None and energy.mean_w is not None:
        watts[""] = energy.mean_w
        for group in POWER_GROUPS:
            of_phase = energy.phases.get(group)
            if of_phase and of_phase.mean_w is not None and not of_phase.few_samples:
                watts[group] = of_phase.mean_w
    load = record.phases.get("load")
    reading_share = None
    if load and load.mean_s and shape.shares_loading:
        reading_share = min(1.0, _part(load, "read") / load.mean_s)
    kind = energy.kind if energy is not None and watts else ""
    return Observation(name, shape, phases_s, record.total_s, watts, kind, reading_share)


def shape_rule(records: Sequence[RunRecord], ranks_per_node: int | None = None) -> ShapeRule:
    """Returns how the shape of a series' runs follows from the number of ranks.

    Args:
        records: The records of finished runs that differ in nothing else; at least one.
        ranks_per_node: The ranks that fill a node; by default, as many as the fullest node had, or
            where all runs had one node, as many as have cores there.

    Raises:
        ModelError: The plan of the runs is not one of this version.
    """
    largest = max(records, key=lambda record: record.num_ranks)
    shapes = [shape for record in records if (shape := _shape(record))]
    base, plan = _shape(largest), largest.plan
    assert base is not None
    assert plan is not None
    if plan.epochs_scaling not in EPOCHS_SCALINGS or plan.batch_scaling not in BATCH_SCALINGS:
        raise ModelError("its scaling of epochs or batches is not one that models know")
    if ranks_per_node is None:
        on_node = max(shape.ranks_on_node for shape in shapes)
        alone = all((record.num_nodes or 1) == 1 for record in records)
        ranks_per_node = _room(shapes) if alone else on_node
    shares_samples = plan.data_parallel == SHARED_SAMPLES
    num_samples = largest.data.num_train if largest.data else None
    if num_samples is None:  # not in every record; samples beyond a limit of the steps are unknown
        num_samples = plan.samples_per_epoch * (largest.num_ranks if shares_samples else 1)
    limit = largest.parameters.get("train_steps")
    return ShapeRule(
        base,
        ranks_per_node,
        plan.epochs_scaling,
        plan.batch_scaling,
        plan.epochs,
        plan.base_batch_size,
        num_samples,
        shares_samples,
        int(limit.value or 0) if limit else 0,
        {shape.num_ranks: shape.threads for shape in shapes},
    )


def _shape(record: RunRecord) -> JobShape | None:
    ranks, plan, data, model = record.ranks, record.plan, record.data, record.model
    if not (ranks and plan and data and model):
        return None
    on_node: dict[int, int] = {}
    for rank in ranks:
        on_node[rank.node] = on_node.get(rank.node, 0) + 1
    environment = record.environment
    cores = (environment.node_cores or environment.num_cores) if environment else None
    if any(rank.device != "cpu" for rank in ranks):
        cores = None  # ranks that compute on GPUs of their own do not share cores
    steps, batch_size = plan.steps_per_epoch, plan.batch_size
    trained = len(record.training.epochs) if record.training else plan.epochs_per_rank
    return JobShape(
        record.num_ranks,
        max(on_node.values()),
        cores,
        max(rank.threads for rank in ranks),
        data.load_threads or 1,
        trained or plan.epochs_per_rank,
        steps or ceil(plan.samples_per_epoch / batch_size),
        batch_size,
        sum(file.file_bytes for file in data.files.values()),
        data.loader in COOPERATIVE,
        BYTES_PER_WEIGHT * model.num_parameters,
    )


def _room(shapes: Sequence[JobShape]) -> int:
    """Returns the ranks that fit a node: any number where its cores do not limit them."""
    threads = {shape.threads for shape in shapes}
    cores = shapes[0].cores_per_node
    if not cores:
        return 2**31
    # Ranks that have divided the cores of a node between them do so for other numbers, too.
    return cores // threads.pop() if len(threads) == 1 else cores


def _phases_s(record: RunRecord, shape: JobShape) -> dict[str, float]:
    phases = record.phases or {}
    train_s = _mean(phases, "train")
    epochs = record.training.epochs if record.training else []
    validate_s = sum(epoch.validation.mean_s for epoch in epochs if epoch.validation)
    first_s = _first_step_s(record)
    exposed_s = min(_exposed_s(record, shape), max(0.0, train_s - validate_s - first_s))
    waiting_s = _part(phases.get("broadcast"), "wait")
    found = {
        STARTUP: _mean(phases, "startup"),
        LOAD: _mean(phases, "load"),
        WAIT: waiting_s,
        TRANSFER: max(0.0, _mean(phases, "broadcast") - waiting_s) if shape.num_ranks > 1 else 0.0,
        COMPUTE: max(0.0, train_s - validate_s - first_s - exposed_s),
        FIRST_STEP: first_s,
        EXPOSED: exposed_s,
        VALIDATE: validate_s,
        EVALUATE: _mean(phases, "evaluate"),
    }
    if shape.num_ranks == 1:
        found[WAIT] = 0.0
    return found | {REST: max(0.0, (record.total_s or 0.0) - sum(found.values()))}


def _exposed_s(record: RunRecord, shape: JobShape) -> float:
    """Returns the seconds of training in which a rank only communicated, mean over ranks.

    0 where that was not logged: it is then a part of computing.
    """
    if shape.num_ranks == 1:
        return 0.0
    epochs = record.training.epochs if record.training else []
    exposed = [epoch.exposed_communication for epoch in epochs]
    if exposed and all(each is not None for each in exposed):
        return sum(each.mean_s for each in exposed if each is not None)
    train = (record.phases or {}).get("train")
    return train.communication.mean_s if train and train.communication else 0.0


def _first_step_s(record: RunRecord) -> float:
    """Returns by how much the first step, in which the framework compiles, exceeds the others."""
    epochs = record.training.epochs if record.training else []
    steps = epochs[0].steps if epochs else None
    if steps is None or steps.first is None:
        return 0.0
    usual_s = steps.median.mean_s if steps.median else 0.0
    return max(0.0, steps.first.mean_s - usual_s)


def _mean(phases: Mapping[str, PhaseTimes], name: str) -> float:
    return phases[name].mean_s if name in phases else 0.0


def _part(phase: PhaseTimes | None, name: str) -> float:
    part = (phase.parts or {}).get(name) if phase else None
    return part.mean_s if part else 0.0
