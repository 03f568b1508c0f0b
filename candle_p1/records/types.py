"""The types of a run's record: what `run.json` holds, from which its JSON Schema is generated.

Keys name their units: ``_s`` seconds, ``_bytes`` bytes, ``_j`` joules, ``_w`` watts, ``_per_s`` per
second. A quantity that was not measured is absent or says so; it is never 0. The file is long
because it holds the whole format, of which almost everything is a list of fields.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator
from typing_extensions import Self

from candle_p1.records.rank_stats import Bytes, Counts, Joules, Seconds, Section, Watts

SCHEMA_VERSION = 3

Status = Literal["running", "ok", "failed", "interrupted"]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Duration = Annotated[float, Field(ge=0)]
EnergyKind = Literal["measured", "estimated", "simulated", "absent"]
"""Estimated: derived from few samples or across gaps. Simulated: replayed from a recording."""
KINDS: tuple[EnergyKind, ...] = get_args(EnergyKind)
"""From best to worst."""
PowerDomain = Literal["node", "module", "cpu", "memory", "gpu"]
PowerReading = Literal["energy", "power"]
TimeKind = Literal["measured", "estimated"]
"""Estimated: from the times of day at which it began and at which its end was noticed."""


def worst(kinds: Iterable[EnergyKind]) -> EnergyKind:
    """Returns the kind of the sum of quantities of these kinds."""
    return max(kinds, key=KINDS.index)


class ParameterValue(Section):
    """The effective value of a parameter."""

    value: Any
    origin: str
    """The source that set it: "default", a file and line, a flag, the driver, …"""


class Failure(Section):
    """Why a run did not finish."""

    reason: str
    rank: int | None
    """The rank that failed first; None if all ranks raised the same error."""
    host: str | None = None
    pid: int | None = None
    phase: str | None = None
    steps: Count | None = None
    """The training steps that each rank had begun, in this segment of the run."""
    traceback: str | None = None
    """The traceback of an error that the user did not cause."""


class Rank(Section):
    """A rank and where it ran."""

    rank: Count
    host: str
    node: Count
    local_rank: Count
    """Its number within the node, from 0."""
    num_cores: Positive
    threads: Positive
    device: str
    """"cpu", or the GPU's name."""


class LaunchTimes(Section):
    """What the process of each rank did before the run began: Python, imports, parameters, MPI."""

    process: Seconds
    """The time from the start of the process to the start of the run."""
    mpi: Seconds
    """The part of it in which MPI started; 0 on a rank without MPI."""


class FileReading(Section):
    """When the ranks read a file, also while they did other work."""

    begin: Seconds
    """When each rank's first read began, in seconds from the start of the run. Nodes have the same
    zero to within the time that a barrier takes."""
    end: Seconds
    """When each rank's last read ended, likewise."""
    busy: Seconds
    """The time in which each rank read; reads of several threads at a time count once."""
    read: Bytes
    union_s: Duration
    """The time in which at least one rank read."""
    mean_ranks: Duration
    """How many ranks read at a time, on average over that time."""
    interval_s: Duration
    """The length of the intervals of the following lists, which begin with the first read and end
    with the last."""
    num_ranks: list[Duration]
    """How many ranks read at a time, on average over each interval."""
    bytes_per_s: list[Duration]
    """The rate of all ranks together in each interval."""


class DataFile(Section):
    """A data file, or a directory of data files and the sum of their sizes."""

    path: str
    num_files: Count | None = None
    """The number of files, if it is a directory."""
    file_bytes: Count
    sha256: str | None = None
    """The SHA-256 of its bytes; of a directory, that of what ``sha256sum *`` prints in it."""
    num_rows: Count | None = None
    num_columns: Count | None = None
    values_sha256: str | None = None
    """The SHA-256 of the float32 matrix as read, in row order, before any scaling, followed by the
    columns of text, if any."""
    load: Seconds | None = None
    reading: FileReading | None = None
    """When the ranks read it; absent if a library read it."""


class NameMatch(Section):
    """How well the names match by which two files were joined."""

    what: str
    left: str
    right: str
    num_left: Count
    num_right: Count
    num_matched: Count


class ModelInputs(Section):
    """The names of a model's inputs and outputs; see inputs.json."""

    num_features: Positive
    features_sha256: str | None = None
    """The SHA-256 of the names of the features, one on each line; absent if they have none."""
    classes: list[str] | None = None
    """The names of the classes, in the order of the outputs."""
    path: str | None = None
    """Where inputs.json is; absent if the run has not kept its weights."""
    sha256: str | None = None
    """Its SHA-256."""


class TrainingData(Section):
    """The data that the model was trained on."""

    synthetic: bool
    loader: str
    load_threads: Positive | None = None
    """The reading threads of each rank, if the loader is parallel or cached."""
    num_copies: Positive | None = None
    """How many copies of the tables the ranks had in memory: one on each node, if they could share
    it and the loader is parallel or cached, else one for each rank."""
    files: dict[str, DataFile]
    """The files, by role: train, test, …"""
    joins: list[NameMatch] | None = None
    """Which files were joined by name."""
    scaling: str | None = None
    scaling_fit: Literal["all", "train"] | None = None
    """Whether the scaling was fitted to all samples or to the training samples."""
    inputs: ModelInputs | None = None
    num_train: Count | None = None
    num_validation: Count | None = None
    num_test: Count | None = None
    validates_on_test: bool | None = None
    """Whether the validation samples are test samples."""


class Plan(Section):
    """Epochs, batch size and learning rate as scaled to the ranks; see candle_p1.scaling."""

    num_ranks: Positive
    epochs_scaling: str
    """How the ranks share the epochs: strong, strong_ceil, weak or none; resolved."""
    batch_scaling: str
    """How the batch size of a rank grows with the ranks: none, linear, sqrt or cbrt."""
    lr_scaling: str
    """How the learning rate grows with the ranks: none, linear or sqrt."""
    data_parallel: str
    """Whether each rank trains on all samples (epoch) or on its shard (batch_step)."""
    epochs: Positive
    """The requested epochs."""
    epochs_per_rank: Positive
    """The epochs that each rank trains."""
    base_batch_size: Positive
    """The requested batch size."""
    batch_size: Positive
    """The samples per step of one rank."""
    global_batch_size: Positive
    """The samples per step of all ranks."""
    base_learning_rate: float
    """The requested learning rate, or the optimizer's default."""
    learning_rate: float
    """The learning rate after the warm-up."""
    warmup_epochs: Count
    """The epochs in which the learning rate rises to its scaled value."""
    warmup_learning_rate: float
    """The learning rate at the start of the warm-up."""
    samples_per_epoch: Count
    """The samples that a rank trains on in an epoch."""
    steps_per_epoch: Count
    """The steps of a rank in an epoch."""


class Network(Section):
    """The network, as it was built and compiled."""

    num_parameters: Count
    optimizer: str
    """The class of its optimizer in Keras, in lower case."""
    loss: str | None = None
    data_type: str | None = None
    """The type in which its weighted layers compute; where they differ, that of most weights."""
    jit_compile: bool | None = None
    kernels: Literal["fast", "plain"] | None = None
    """"fast" if a layer or the optimizer computes by its fast implementation."""
    fast_kernels: list[str] = []
    """The classes that do so."""
    file_sha256: str | None = None
    """The SHA-256 of model.keras; absent if it was not saved."""


class Averaging(Section):
    """What averaged the gradients."""

    backend: str
    """The engine: "serial", "horovod" or "jax"."""
    averaging_checked: bool | None = None
    """Whether the self-test of the averaging ran."""
    stall_shutdown_s: Count | None = None
    """The time after which a stalled collective ends the job; 0: never."""
    settings: dict[str, str] | None = None
    """The engine's settings, most by environment variable."""


class PhaseUsage(Section):
    """The resources of the machine that a phase used."""

    cpu: Seconds
    """CPU time of all threads together."""
    voluntary_switches: Counts
    """Context switches because a thread waited."""
    involuntary_switches: Counts
    """Context switches because other threads needed the core."""
    minor_faults: Counts
    major_faults: Counts
    peak_rss: Bytes
    read: Bytes | None = None
    """Bytes read by system calls, from storage or from the kernel's cache."""
    pss: Bytes | None = None
    """The resident memory at the end of the phase, with a fair share of shared pages."""


class PhaseTimes(Seconds):
    """The time that each rank spent in a phase."""

    begin: Seconds | None = None
    """Seconds from the start of the run to the moment at which each rank first entered it."""
    communication: Seconds | None = None
    """The part of the phase's time that each rank spent in collectives."""
    usage: PhaseUsage | None = None
    """The resources that it used; absent for regions, which may be entered often."""
    regions: dict[str, PhaseTimes] | None = None
    """The phases within this one, by name."""


class Efficiency(Section):
    """The POP efficiencies; see candle_p1.instrument.epochs."""

    load_balance: float
    """mean(useful) / max(useful); useful is a rank's time outside collectives."""
    communication_efficiency: float
    """max(useful) / runtime."""
    parallel_efficiency: float
    """Their product."""


class Absent(Section):
    """A quantity that could not be measured, and why."""

    kind: Literal["absent"]
    reason: str


class StepTimes(Section):
    """The times of an epoch's steps, from the beginning of one to that of the next.

    Those of an epoch that was continued from a checkpoint within it are of the steps after that.
    """

    num: Count
    """The largest number of steps of any rank; it counts those before a checkpoint, too."""
    first: Seconds | None = None
    """The first step of the run, in which the framework compiles; the other fields exclude it."""
    median: Seconds | None = None
    p99: Seconds | None = None
    """The 99th percentile over the steps of each rank."""


class CompiledPrograms(Section):
    """The programs that JAX compiled or loaded on rank 0."""

    directory: str | None
    """Where they are kept; null: nowhere."""
    start: Literal["cold", "warm"]
    """Warm: most of what is kept had been compiled before."""
    num_loaded: Count
    num_kept: Count
    """Those that were compiled and kept by this run."""
    seconds: Duration
    """The time of compiling and loading, also of small programs, which are never kept."""


class EpochRecord(Section):
    """An epoch."""

    epoch: Positive
    """Its number, from 1."""
    segment: Positive | None = None
    """The segment of a continued run that ended it, from 1. Its times include what earlier ones
    had trained of it."""
    metrics: dict[str, float | None]
    """Loss and metrics over all ranks; null if one is not a number."""
    train: Seconds
    validation: Seconds | None = None
    begin: Seconds | None = None
    """Seconds from the start of that segment to the beginning of the epoch."""
    steps: StepTimes | None = None
    exposed_communication: Seconds | None = None
    """The time from when the last gradient is ready until the last average has arrived, summed over
    all steps."""
    allreduce: Seconds | None = None
    """The time during which any gradient allreduce was in progress, from the first gradient that is
    ready to the last average, without the gaps between."""
    hidden_share: float | None = None
    """The share of `allreduce` that back-propagation hides."""
    efficiency: Efficiency | None = None
    """The efficiency of its training part."""


class DeviceData(Section):
    """The samples from which JAX's steps take their batches by index."""

    copied_bytes: Count
    """What each rank has copied to its device."""
    in_place_bytes: Count
    """What its device, a CPU, reads from the host's memory."""
    streamed_because: str | None = None
    """Why the host sends each batch instead."""
    largest_block: Positive
    """The largest number of steps in one call of a compiled program."""


class Training(Section):
    """What the training part of a run did."""

    epochs: list[EpochRecord]
    device_data: DeviceData | None = None
    """With JAX only."""
    samples_per_s: float | None = None
    stopped: str | None = None
    """Why training ended before its last epoch."""
    model_epoch: Positive | None = None
    """The epoch whose model is evaluated and saved, from 1, with early_stop: that with the lowest
    validation loss. Otherwise it is the last one."""
    profiled: bool | None = None
    """Calls or steps were profiled, so the times must not be compared."""
    traced: bool | None = None
    """Horovod's timeline was written, so the times must not be compared."""


class Messages(Section):
    """Collective operations that have something in common."""

    library: str
    """The library that performed them: "mpi", or a reducer: "horovod", "shared memory" or "jax"."""
    num_calls: Count
    """The number of calls of all ranks together."""
    num_bytes: Count
    """The data that all ranks contributed in all calls together."""
    time: Seconds
    """The time from call to result, summed over all calls; overlapping ones count in full."""


class Collective(Messages):
    """All operations with the same name."""

    name: str


class MessageSize(Messages):
    """All operations whose messages are in one range of sizes."""

    from_bytes: Positive
    """The lower end of the range, inclusive."""
    below_bytes: Positive
    """The upper end of the range, exclusive."""
    bytes_per_s: float
    """The mean rate of one rank, including the time it waited for others."""


ClockWaitsFor = Literal["tensor", "element"]


class Communication(Section):
    """The communication between the ranks."""

    clock_waits_for: ClockWaitsFor | None = None
    """What a clock waits for that times the gradients' allreduces: the tensor; or one element of
    it, on GPUs, which adds the time in which that is copied to the host. None if no gradients were
    averaged, or they were not logged."""
    collectives: list[Collective] | None = None
    """By library and operation; empty if none were logged."""
    message_sizes: list[MessageSize] | None = None


class QualityFigure(Section):
    """A metric of the trained model on the test set."""

    value: float | None
    naive: float | None = None
    """The value for the best constant predictor."""


class EnergyTotal(Section):
    """An energy, summed over the counted devices."""

    kind: EnergyKind
    reason: str | None = None
    energy_j: float | None = None
    mean_w: float | None = None
    """The sum of the mean powers."""
    few_samples: bool = False
    """The time is too short for a sensor: fewer than three samples, or fewer than three updates of
    its value."""

    @model_validator(mode="after")
    def _is_known_or_absent(self) -> Self:
        _check_energy(self.kind, self.reason, self.energy_j, self.mean_w)
        return self


class DeviceEnergies(Section):
    """The energies of devices of the same kind over an interval of time."""

    kind: EnergyKind
    reasons: list[str] = []
    """Why some are absent, each reason once."""
    num_samples: Count
    """The smallest number of samples of any device."""
    few_samples: bool = False
    """As in EnergyTotal, for any of them."""
    energy: Joules | None = None
    """Their energies, without those that are absent."""
    power: Watts | None = None
    """Their mean powers, likewise."""


class DeviceGroup(DeviceEnergies):
    """Devices of the same kind on all nodes; the readings of each are in the nodes' CSV files."""

    label: str
    domain: PowerDomain
    source: str
    reading: PowerReading
    """"energy" for an energy counter, "power" for power that is integrated."""
    resolution_s: float | None
    """The sensor's update interval, or the time over which it averages."""
    counted: bool
    """Whether they are included in the totals. A device that the sensor of a node or of a module
    includes, or that another node of the same machine measures, is not."""
    num_devices: Positive
    nodes: tuple[Count, Count]
    """The first and the last of the nodes that have them."""
    phases: dict[str, DeviceEnergies]


class AbsentSource(Section):
    """A source of power readings that is not available, why, and on which nodes."""

    source: str
    reason: str
    nodes: list[int]


class JobEnergy(Section):
    """The energy of the job; of a run that ended early, see `RunRecord.known_until_s`."""

    kind: EnergyKind
    reason: str | None = None
    total_j: float | None = None
    """The energy of the counted devices of all nodes, from the beginning of the first phase to the
    end of the last, as far as that was sampled."""
    total_s: float | None = None
    """The time that total_j covers, on the node where it is longest."""
    mean_w: float | None = None
    """The sum of the mean powers of the counted devices."""
    few_samples: bool = False
    covers: list[PowerDomain] = []
    phases: dict[str, EnergyTotal] = {}
    devices: list[DeviceGroup] = []
    absent: list[AbsentSource] = []
    power_hz: float | None = None
    notes: list[str] = []
    """What to consider when reading the samples; only earlier records have it."""
    traces: list[str] = []
    """The files of the samples, beside the record."""

    @model_validator(mode="after")
    def _is_known_or_absent(self) -> Self:
        _check_energy(self.kind, self.reason, self.total_j, self.mean_w)
        return self


class Position(Section):
    """How far each rank has trained."""

    epoch: Count
    """The epochs that are complete."""
    step: Count
    """The steps that are complete in the next one; 0 at the end of an epoch."""

    def __init__(self, *position: int, **facts: Any) -> None:
        super().__init__(**dict(zip(("epoch", "step"), position, strict=False)), **facts)

    def __str__(self) -> str:
        return f"epoch {self.epoch}, step {self.step}"


class SavedCheckpoints(Section):
    """The checkpoints that a run has saved; of a continued run, those of its last segment."""

    directory: str
    num_saved: Count
    """How many are complete, including those that were later deleted."""
    saved_bytes: Count
    wait: Seconds | None = None
    """The time that training waited for them on each rank."""
    num_not_taken: Count = 0
    """How many were due while an earlier one was still being written."""
    errors: list[str] = []
    """Why some could not be written, each reason once."""
    newest: str | None = None


class Segment(Section):
    """A segment of a run that was continued: from its start until it ended or was killed."""

    status: Status
    """How it ended, or "running"."""
    started: str
    """When it started, in ISO 8601, UTC."""
    ended: str | None = None
    """When it ended, likewise; if nobody noticed, when it last wrote a file."""
    num_ranks: Positive
    num_nodes: Positive | None = None
    begin: Position
    """Where its training began."""
    checkpoint: str | None = None
    """The checkpoint that it began from."""
    end: Position | None = None
    """Where the next segment resumed, or where training ended."""
    steps: Count | None = None
    """The training steps that each rank began; None if that is not known."""
    lost_steps: Count | None = None
    """Those of them that were repeated; None if that is not known."""
    total_s: Duration | None = None
    """Its time, from its start to its end."""
    time_kind: TimeKind | None = None
    """Whether total_s is measured or estimated."""
    energy: EnergyTotal | None = None
    """Its energy; None while it runs."""
    failure: Failure | None = None

    @model_validator(mode="after")
    def _has_ended_or_runs(self) -> Self:
        facts = (self.ended, self.total_s, self.time_kind, self.energy)
        known = [fact is not None for fact in facts]
        if any(known) if self.status == "running" else not all(known):
            raise ValueError("a segment has an end, a time and an energy if it is not running")
        if self.lost_steps is not None and self.lost_steps > (self.steps or 0):
            raise ValueError("a segment has lost more steps than it began")
        return self


class RunTotals(Section):
    """All segments of a continued run together."""

    num_segments: Positive
    total_s: Duration
    """The sum of their times, without the time between them."""
    time_kind: TimeKind
    """The worst kind of these times."""
    lost_steps: Count | None = None
    """The steps of each rank that were repeated; None if that is not known of a segment."""
    energy: EnergyTotal
    """The sum of their energies; absent if one of them is."""


class TimelineFile(Section):
    """Horovod's timeline of the run."""

    file: str
    anchor_epoch_us: int
    """A time of day, in µs since 1970."""
    anchor_s: float
    """The same moment, in seconds from the start of the run."""


class SourceCommit(Section):
    """The commit that the package ran from, and whether files in it had been changed."""

    commit: str
    modified: bool


class MpiLibrary(Section):
    """The MPI library of a run with several ranks."""

    library: str
    thread_level: Literal["single", "funneled", "serialized", "multiple"]
    """Its thread level: multiple is MPI_THREAD_MULTIPLE."""


class Environment(Section):
    """Versions, machine and settings, as rank 0 found them."""

    python: str
    packages: dict[str, str]
    system: str
    host: str
    cpu: str
    num_cores: Positive
    """The number of cores that rank 0 may run on."""
    node_cores: Positive | None = None
    """The number of cores of its node; None if that is not known."""
    memory_bytes: Count
    """The memory that it may use."""
    settings: dict[str, str]
    """Environment variables that control training, communication or threads."""
    mpi: MpiLibrary | None = None
    """The MPI library; None if the ranks did not use MPI."""
    source: SourceCommit | None = None
    """The source commit; None if the package did not run from a checkout."""


class RunRecord(Section):
    """One run.

    Of a run that was continued from a checkpoint, the sections describe its last segment, but
    for segments, totals and training.epochs.
    """

    schema_version: Literal[3]
    status: Status
    """How the run ended, or "running" if it has not."""
    benchmark: str
    started: str
    """When the run started, in ISO 8601, UTC."""
    ended: str | None = None
    """When the run ended, in ISO 8601, UTC."""
    command: list[str] | None = None
    """The command executed on every rank."""
    num_ranks: Positive
    num_nodes: Positive | None = None
    launcher: str | None = None
    """What started the ranks: mpirun, srun, jsrun, aprun, …; "none" if nothing did."""
    parameters: dict[str, ParameterValue]
    """The effective parameters, each with where its value came from."""
    failure: Failure | None = None
    known_until_s: Duration | None = None
    """Until when a run that ended early is known, in seconds from the start of its last
    segment. Its phases and epochs are then those that rank 0 had completed, with the times of
    rank 0 alone unless a checkpoint has gathered those of all ranks."""
    ranks: list[Rank] | None = None
    launch: LaunchTimes | None = None
    """What their processes did before the run started; absent if the system does not say when a
    process started."""
    data: TrainingData | None = None
    plan: Plan | None = None
    model: Network | None = None
    distributed: Averaging | None = None
    programs: CompiledPrograms | None = None
    """With JAX only."""
    phases: dict[str, PhaseTimes] | None = None
    """The time of each phase, by name, in the order in which they began."""
    peak_rss: Bytes | None = None
    """The largest resident memory of each rank."""
    total_s: Duration | None = None
    """The time of the whole run on rank 0."""
    training: Training | None = None
    communication: Communication | None = None
    efficiency: Efficiency | Absent | None = None
    quality: dict[str, QualityFigure] | None = None
    """The metrics of the trained model on the test set, by name."""
    energy: JobEnergy | None = None
    timeline: TimelineFile | None = None
    checkpoints: SavedCheckpoints | None = None
    segments: Annotated[list[Segment], Field(min_length=1)] | None = None
    """The segments of a continued run, in order, with the last."""
    totals: RunTotals | None = None
    """All of these together, once the last has ended."""
    environment: Environment | None = None
    warnings: list[str] | None = None
    """What to consider when reading the record."""

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        missing = [name for name in _NEEDED[self.status] if getattr(self, name) is None]
        if missing:
            raise ValueError(f"a record with status {self.status!r} needs {', '.join(missing)}")
        if self.status == "ok" and (self.failure or self.known_until_s is not None):
            raise ValueError("a record with status 'ok' has no failure, and is known to its end")
        if self.ranks is not None and len(self.ranks) != self.num_ranks:
            raise ValueError(
                f"ranks has {len(self.ranks)} entries, but num_ranks is {self.num_ranks}"
            )
        earlier = {segment.status for segment in (self.segments or [])[:-1]}
        if earlier & {"running", "ok"}:
            raise ValueError("a segment that is running or ok is the last")
        if self.segments and self.segments[-1].status != self.status:
            raise ValueError("the status of the last segment is that of the run")
        if (bool(self.segments) and self.status != "running") != (self.totals is not None):
            raise ValueError("a run has totals if it has segments and is not running")
        if self.totals and self.totals.num_segments != len(self.segments or ()):
            raise ValueError("totals.num_segments is not the number of segments")
        return self


_NEEDED: dict[Status, tuple[str, ...]] = {
    "running": (),
    "ok": (
        "ended", "ranks", "data", "plan", "model", "distributed", "phases", "total_s", "training",
        "efficiency", "communication", "quality", "energy", "environment",
    ),
    "failed": ("ended", "failure"),
    "interrupted": ("ended", "failure"),
}  # fmt: skip


def _check_energy(
    kind: EnergyKind, reason: str | None, energy_j: float | None, mean_w: float | None
) -> None:
    is_absent = kind == "absent"
    if is_absent != (energy_j is None) or is_absent != (mean_w is None):
        raise ValueError("an energy either is absent or has joules and watts")
    if is_absent and reason is None:
        raise ValueError("an absent energy needs a reason")
