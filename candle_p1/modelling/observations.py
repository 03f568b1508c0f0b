"""What a model takes from the record of a run: its shape, the time of each phase, and the power."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from candle_p1.errors import ModelError
from candle_p1.modelling import laws
from candle_p1.modelling.laws import LOAD, JobShape
from candle_p1.records.types import Plan, RunRecord
from candle_p1.scaling import BATCH_SCALINGS, EPOCHS_SCALINGS, scale_batch_size

SHARED_EPOCHS = ("strong", "strong_ceil")  # scalings of the epochs with which ranks share them
COOPERATIVE = ("parallel", "cached")  # loaders with which ranks read each file once, together
SHARED_SAMPLES = "batch_step"  # the data parallelism at which ranks share an epoch's samples
BYTES_PER_WEIGHT = 4

POWER_GROUPS: Mapping[str, tuple[str, ...]] = {
    "load": (LOAD,),
    "broadcast": (laws.WAIT, laws.TRANSFER),
    "train": (laws.COMPUTE, laws.FIRST_STEP, laws.EXPOSED, laws.VALIDATE),
}
"""The phases of the model that a phase of the record with a power of its own has; for all others,
the mean power of the whole run stands."""


@dataclass(frozen=True)
class Observation:
    """One run, as a model sees it."""

    record: RunRecord
    shape: JobShape  # its size, and what each of its ranks did
    # the seconds of each phase, mean over ranks; they add up to the time of the run
    phases_s: Mapping[str, float]
    total_s: float
    # the mean power of the whole job in the phases of POWER_GROUPS that have one, and under ""
    # over the whole run; empty where power was not measured
    watts: Mapping[str, float]
    energy_kind: str  # how that is known: measured, estimated or simulated; "" where it is not
    # the share of loading in which ranks waited for their reads; None where the loader reads
    # while it parses, so that it is unknown
    reading_share: float | None


@dataclass(frozen=True)
class ShapeRule:
    """How the shape of a series' runs follows from the number of ranks."""

    base: JobShape  # the shape of a run of the series
    plan: Plan
    max_ranks_on_node: int  # the ranks that fill a node
    num_samples: int  # the samples on which all ranks can train
    max_steps: int  # the limit of the steps of an epoch; 0: there is none
    threads: Mapping[int, int]  # the threads of a rank, by the number of ranks that ran

    @classmethod
    def of(cls, records: Sequence[RunRecord], ranks_per_node: int | None = None) -> ShapeRule:
        """Returns the rule of finished runs that differ in nothing else than the number of ranks.

        By default, as many ranks fill a node as the fullest had, or where all runs had one node, as
        have cores there.

        Raises:
            ModelError: The plan of the runs is not one of this version.
        """
        largest = max(records, key=lambda record: record.num_ranks)
        shapes = list(map(_shape, records))
        base, plan = _shape(largest), largest.plan
        assert plan is not None
        if plan.epochs_scaling not in EPOCHS_SCALINGS or plan.batch_scaling not in BATCH_SCALINGS:
            raise ModelError("models do not cover its scaling of epochs or batches")
        if ranks_per_node is None:
            ranks_per_node = max(shape.ranks_on_node for shape in shapes)
            if all((record.num_nodes or 1) == 1 for record in records):
                # Ranks that divide the cores of a node between them do so for other numbers, too.
                threads = {shape.threads for shape in shapes}
                cores = base.cores_per_node or 2**31
                ranks_per_node = cores // threads.pop() if len(threads) == 1 else cores
        num_samples = largest.data.num_train if largest.data else None
        if num_samples is None:  # samples beyond a limit of the steps are unknown
            shards = largest.num_ranks if plan.data_parallel == SHARED_SAMPLES else 1
            num_samples = plan.samples_per_epoch * shards
        limit = largest.parameters.get("train_steps")
        max_steps = int(limit.value or 0) if limit else 0
        threads_of = {shape.num_ranks: shape.threads for shape in shapes}
        return cls(base, plan, ranks_per_node, num_samples, max_steps, threads_of)

    @property
    def is_strong(self) -> bool:
        """Whether the ranks share the work, so that ideal scaling divides the time by them."""
        shares_samples = self.plan.data_parallel == SHARED_SAMPLES
        return self.plan.epochs_scaling in SHARED_EPOCHS or shares_samples

    def can_run(self, num_ranks: int) -> bool:
        """Returns whether every rank has at least one epoch, and all have the same number."""
        if self.plan.epochs_scaling == "strong":
            return self.plan.epochs % num_ranks == 0
        return self.plan.epochs_scaling != "strong_ceil" or num_ranks <= self.plan.epochs

    def at(self, num_ranks: int) -> JobShape:
        """Returns the shape of a run on some ranks.

        Where ranks have to share epochs that cannot be divided by them, each has the share rounded
        up; see `can_run`.
        """
        plan, on_node = self.plan, min(num_ranks, self.max_ranks_on_node)
        epochs = plan.epochs
        if plan.epochs_scaling in SHARED_EPOCHS:
            epochs = ceil(epochs / num_ranks)
        batch_size = scale_batch_size(plan.base_batch_size, num_ranks, plan.batch_scaling)
        steps = self.base.steps_per_epoch
        shares_samples = plan.data_parallel == SHARED_SAMPLES
        if shares_samples or plan.batch_scaling != "none":
            samples = self.num_samples // (num_ranks if shares_samples else 1)
            steps = max(1, ceil(samples / batch_size))
            steps = min(steps, self.max_steps or steps)
        # A rank has as many threads as it ran with, else its share of a node's cores.
        threads = most = max(self.threads.values())
        cores = self.base.cores_per_node
        if num_ranks in self.threads:
            threads = self.threads[num_ranks]
        elif min(self.threads.values()) < most and cores:
            threads = max(1, min(most, cores // on_node))
        return replace(
            self.base,
            num_ranks=num_ranks,
            ranks_on_node=on_node,
            threads=threads,
            epochs=epochs,
            steps_per_epoch=steps,
            batch_size=batch_size,
        )


def observe(record: RunRecord) -> Observation:
    """Returns what a model takes from the record of a run that has finished."""
    shape, total_s = _shape(record), record.total_s or 0.0
    watts: dict[str, float] = {}
    energy = record.energy
    if energy is not None and energy.mean_w is not None:
        watts[""] = energy.mean_w
        for group in POWER_GROUPS:
            of_phase = energy.phases.get(group)
            if of_phase and of_phase.mean_w is not None and not of_phase.few_samples:
                watts[group] = of_phase.mean_w
    kind = energy.kind if energy is not None and watts else ""
    phases_s, reading_share = _phases_s(record), None
    if phases_s[LOAD] and shape.shares_loading:
        reading_share = min(1.0, _mean_s(record, "load", "read") / phases_s[LOAD])
    return Observation(record, shape, phases_s, total_s, watts, kind, reading_share)


def _shape(record: RunRecord) -> JobShape:
    ranks, plan, data, model = record.ranks, record.plan, record.data, record.model
    assert ranks and plan and data and model and record.training  # noqa: PT018 (it has finished)
    environment = record.environment
    cores = (environment.node_cores or environment.num_cores) if environment else None
    if any(rank.device != "cpu" for rank in ranks):
        cores = None  # ranks that compute on GPUs of their own do not share cores
    trained = len(record.training.epochs)
    return JobShape(
        record.num_ranks,
        max(Counter(rank.node for rank in ranks).values()),
        cores,
        max(rank.threads for rank in ranks),
        data.load_threads or 1,
        trained or plan.epochs_per_rank,
        plan.steps_per_epoch or ceil(plan.samples_per_epoch / plan.batch_size),
        plan.batch_size,
        sum(file.file_bytes for file in data.files.values()),
        data.loader in COOPERATIVE,
        BYTES_PER_WEIGHT * model.num_parameters,
    )


def _phases_s(record: RunRecord) -> dict[str, float]:
    train_s = _mean_s(record, "train")
    epochs = record.training.epochs if record.training else []
    validate_s = sum(epoch.validation.mean_s for epoch in epochs if epoch.validation)
    # By how much the first step, in which the framework compiles, exceeds the others.
    steps, first_s = epochs[0].steps if epochs else None, 0.0
    if steps and steps.first:
        first_s = max(0.0, steps.first.mean_s - (steps.median.mean_s if steps.median else 0.0))
    wait_s = transfer_s = exposed_s = 0.0
    if record.num_ranks > 1:
        wait_s = _mean_s(record, "broadcast", "wait")
        transfer_s = max(0.0, _mean_s(record, "broadcast") - wait_s)
        # Where it was not logged that a rank only communicated, this is a part of computing.
        exposed = [e.exposed_communication.mean_s for e in epochs if e.exposed_communication]
        train = (record.phases or {}).get("train")
        if epochs and len(exposed) == len(epochs):
            exposed_s = sum(exposed)
        elif train and train.communication:
            exposed_s = train.communication.mean_s
        exposed_s = min(exposed_s, max(0.0, train_s - validate_s - first_s))
    found = {
        laws.STARTUP: _mean_s(record, "startup"),
        LOAD: _mean_s(record, "load"),
        laws.WAIT: wait_s,
        laws.TRANSFER: transfer_s,
        laws.COMPUTE: max(0.0, train_s - validate_s - first_s - exposed_s),
        laws.FIRST_STEP: first_s,
        laws.EXPOSED: exposed_s,
        laws.VALIDATE: validate_s,
        laws.EVALUATE: _mean_s(record, "evaluate"),
    }
    return found | {laws.REST: max(0.0, (record.total_s or 0.0) - sum(found.values()))}


def _mean_s(record: RunRecord, name: str, region: str = "") -> float:
    """Returns the seconds of a phase, or of a region of it, mean over ranks; 0 where unknown."""
    phase = (record.phases or {}).get(name)
    found = (phase.regions or {}).get(region) if phase and region else phase
    return found.mean_s if found else 0.0
