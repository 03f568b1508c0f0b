"""The types of a run's record: what `run.json` holds, from which its JSON Schema is generated.

Keys name their units: ``_s`` seconds, ``_bytes`` bytes, ``_j`` joules, ``_w`` watts, ``_per_s`` per
second. A quantity that was not measured is absent or says so; it is never 0. The file is long
because it holds the whole format, of which almost everything is a list of fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from candle_p1.records.spread import Bytes, Counts, Joules, Seconds, Section, Watts

SCHEMA_VERSION = 2

Status = Literal["running", "ok", "failed", "interrupted"]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Duration = Annotated[float, Field(ge=0)]
EnergyKind = Literal["measured", "estimated", "simulated", "absent"]
"""Estimated: derived from few samples or across gaps. Simulated: replayed from a recording."""
PowerDomain = Literal["node", "module", "cpu", "memory", "gpu"]
TimeKind = Literal["measured", "estimated"]
"""Estimated: from the times of day at which it began and at which its end was noticed."""


class ParameterValue(Section):
    """The effective value of a parameter.

    Attributes:
        value: Any JSON value.
        origin: The source that set it: "default", a file and line, a flag, the driver, …
    """

    value: Any
    origin: str


class Failure(Section):
    """Why a run did not finish.

    Attributes:
        reason: The error message.
        rank: The rank that failed first; None if all ranks raised the same error.
        host: Its host.
        pid: Its process ID.
        phase: The phase it was in.
        steps: The training steps that each rank had begun, in this part of the run.
        traceback: The traceback of an error that the user did not cause.
    """

    reason: str
    rank: int | None
    host: str | None = None
    pid: int | None = None
    phase: str | None = None
    steps: Count | None = None
    traceback: str | None = None


class RankFacts(Section):
    """A rank and where it ran.

    Attributes:
        rank: Its number, from 0.
        host: Its host's name.
        node: Its node, from 0.
        local_rank: Its number within the node, from 0.
        num_cores: The number of cores it may run on.
        threads: The number of threads it computes with.
        device: "cpu", or the GPU's name.
    """

    rank: Count
    host: str
    node: Count
    local_rank: Count
    num_cores: Positive
    threads: Positive
    device: str


class LaunchFacts(Section):
    """What the process of each rank did before the run began: Python, imports, parameters, MPI.

    Attributes:
        process: The time from the start of the process to the start of the run.
        mpi: The part of it in which MPI started; 0 on a rank that does without.
    """

    process: Seconds
    mpi: Seconds


class ReadingFacts(Section):
    """When the ranks read a file, also while they did other work.

    Attributes:
        begin: When each rank's first read began, in seconds from the start of the run. Nodes have
            the same zero to within the time that a barrier takes.
        end: When each rank's last read ended, likewise.
        busy: The time in which each rank read; reads of several threads at a time count once.
        read: What each rank read.
        union_s: The time in which at least one rank read.
        mean_ranks: How many ranks read at a time, on average over that time.
        interval_s: The length of the intervals of the following lists, which begin with the first
            read and end with the last.
        num_ranks: How many ranks read at a time, on average over each interval.
        bytes_per_s: The rate of all ranks together in each interval.
    """

    begin: Seconds
    end: Seconds
    busy: Seconds
    read: Bytes
    union_s: Duration
    mean_ranks: Duration
    interval_s: Duration
    num_ranks: list[Duration]
    bytes_per_s: list[Duration]


class FileFacts(Section):
    """A data file, or a directory of data files.

    Attributes:
        path: The path from which it was read.
        num_files: The number of files, if it is a directory.
        file_bytes: Its size, or that of all its files.
        sha256: The SHA-256 of its bytes; of a directory, that of what ``sha256sum *`` prints in it.
        num_rows: The number of rows of its table.
        num_columns: The number of columns of its table.
        values_sha256: The SHA-256 of the float32 matrix as read, in row order, before any scaling,
            followed by the columns of text, if any.
        load: How long each rank took to read it.
        reading: When the ranks read it; absent if a library read it.
    """

    path: str
    num_files: Count | None = None
    file_bytes: Count
    sha256: str | None = None
    num_rows: Count | None = None
    num_columns: Count | None = None
    values_sha256: str | None = None
    load: Seconds | None = None
    reading: ReadingFacts | None = None


class JoinFacts(Section):
    """How well the names in two files match that were joined by name.

    Attributes:
        what: What is named.
        left: The role of one file.
        right: The role of the other.
        num_left: The number of names in the left file.
        num_right: The number of names in the right file.
        num_matched: The number of names in both.
    """

    what: str
    left: str
    right: str
    num_left: Count
    num_right: Count
    num_matched: Count


class DataFacts(Section):
    """The data that the model was trained on.

    Attributes:
        synthetic: Whether the files were generated.
        loader: The loading method.
        load_threads: The reading threads of each rank, if the loader is parallel or cached.
        num_copies: How many copies of the tables the ranks had in memory: one on each node, if they
            could share it and the loader is parallel or cached, else one for each rank.
        files: The files, by role: train, test, …
        joins: Which files were joined by name.
        scaling: How the features were scaled.
        scaling_fit: Whether the scaling was fitted to all samples or to those trained on.
        num_train: The number of training samples.
        num_validation: The number of validation samples.
        num_test: The number of test samples.
    """

    synthetic: bool
    loader: str
    load_threads: Positive | None = None
    num_copies: Positive | None = None
    files: dict[str, FileFacts]
    joins: list[JoinFacts] | None = None
    scaling: str | None = None
    scaling_fit: Literal["all", "train"] | None = None
    num_train: Count | None = None
    num_validation: Count | None = None
    num_test: Count | None = None


class PlanFacts(Section):
    """Epochs, batch size and learning rate as scaled to the ranks; see candle_p1.scaling."""

    num_ranks: Positive
    epochs_scaling: str
    batch_scaling: str
    lr_scaling: str
    data_parallel: str
    epochs: Positive
    epochs_per_rank: Positive
    base_batch_size: Positive
    batch_size: Positive
    global_batch_size: Positive
    base_learning_rate: float
    learning_rate: float
    warmup_epochs: Count
    warmup_learning_rate: float
    samples_per_epoch: Count
    steps_per_epoch: Count


class ModelFacts(Section):
    """The network, as it was built and compiled.

    Attributes:
        num_parameters: The number of its weights.
        optimizer: The class of its optimizer in Keras, in lower case.
        loss: Its loss.
        data_type: The type in which its weighted layers compute; where they differ, that of most
            weights.
        jit_compile: Whether XLA compiles its steps.
        kernels: "fast" if a layer or the optimizer computes by its fast implementation.
        fast_kernels: The classes that do so.
    """

    num_parameters: Count
    optimizer: str
    loss: str | None = None
    data_type: str | None = None
    jit_compile: bool | None = None
    kernels: Literal["fast", "plain"] | None = None
    fast_kernels: list[str] = []


class DistributedFacts(Section):
    """What averaged the gradients.

    Attributes:
        backend: The engine: "serial", "horovod" or "jax".
        averaging_checked: Whether the self-test of the averaging ran.
        stall_shutdown_s: The time after which a stalled collective ends the job; 0: never.
        settings: The engine's settings, most by environment variable.
    """

    backend: str
    averaging_checked: bool | None = None
    stall_shutdown_s: Count | None = None
    settings: dict[str, str] | None = None


class UsageFacts(Section):
    """The resources of the machine that a phase used.

    Attributes:
        cpu: CPU time of all threads together.
        voluntary_switches: Context switches because a thread waited.
        involuntary_switches: Context switches because other threads needed the core.
        minor_faults: Page faults that needed no I/O.
        major_faults: Page faults that needed I/O.
        read: Bytes read by system calls, from storage or from the kernel's cache.
        peak_rss: The largest resident memory.
        pss: The resident memory at the end of the phase, with a fair share of shared pages.
    """

    cpu: Seconds
    voluntary_switches: Counts
    involuntary_switches: Counts
    minor_faults: Counts
    major_faults: Counts
    peak_rss: Bytes
    read: Bytes | None = None
    pss: Bytes | None = None


class PhaseTimes(Seconds):
    """The time that each rank spent in a phase.

    Attributes:
        begin: Seconds from the start of the run to the moment at which each rank first entered it.
        communication: The part of the phase's time that each rank spent in collectives.
        usage: The resources that it used; absent for parts that are entered often.
        parts: The phases within this one, by name.
    """

    begin: Seconds | None = None
    communication: Seconds | None = None
    usage: UsageFacts | None = None
    parts: dict[str, PhaseTimes] | None = None


class Efficiency(Section):
    """The POP efficiencies; see candle_p1.instrument.efficiency.

    Attributes:
        definition: The definition, in words.
        load_balance: mean(useful) / max(useful).
        communication_efficiency: max(useful) / runtime.
        parallel_efficiency: Their product.
        runtime_s: The total time.
        useful: Each rank's time outside collectives.
    """

    definition: str | None = None
    load_balance: float
    communication_efficiency: float
    parallel_efficiency: float
    runtime_s: float
    useful: Seconds


class Absent(Section):
    """A quantity that could not be measured, and why."""

    kind: Literal["absent"]
    reason: str


class StepTimes(Section):
    """The times of an epoch's steps, from the beginning of one to that of the next.

    Those of an epoch that was continued from a checkpoint within it are of the steps after that.

    Attributes:
        num: The largest number of steps of any rank; it counts those before a checkpoint, too.
        first: The first step of the run, in which the framework compiles; the other fields exclude
            it.
        median: The median over the steps of each rank.
        p99: The 99th percentile over the steps of each rank.
    """

    num: Count
    first: Seconds | None = None
    median: Seconds | None = None
    p99: Seconds | None = None


class EpochFacts(Section):
    """An epoch.

    Attributes:
        epoch: Its number, from 1.
        part: The part of a continued run that ended it, from 1. Its times include what an earlier
            part had trained of it.
        metrics: Loss and metrics over all ranks; null if one is not a number.
        train: The time of its training part.
        validation: The time of its validation.
        begin: Seconds from the start of that part to the beginning of the epoch.
        steps: The times of its steps.
        exposed_communication: The time from when the last gradient is ready until the last average
            has arrived, summed over all steps.
        allreduce: The time during which any gradient allreduce was in progress, from the first
            gradient that is ready to the last average, without the gaps between.
        hidden_share: The share of `allreduce` that back-propagation hides.
        efficiency: The efficiency of its training part.
    """

    epoch: Positive
    part: Positive | None = None
    metrics: dict[str, float | None]
    train: Seconds
    validation: Seconds | None = None
    begin: Seconds | None = None
    steps: StepTimes | None = None
    exposed_communication: Seconds | None = None
    allreduce: Seconds | None = None
    hidden_share: float | None = None
    efficiency: Efficiency | None = None


class TrainingFacts(Section):
    """What the training part of a run did.

    Attributes:
        epochs: The epochs, in order.
        samples_per_s: The throughput of all ranks together.
        stopped: Why training ended before its last epoch.
        profiled: Calls or steps were profiled, so the times must not be compared.
        traced: Horovod's timeline was written, so the times must not be compared.
    """

    epochs: list[EpochFacts]
    samples_per_s: float | None = None
    stopped: str | None = None
    profiled: bool | None = None
    traced: bool | None = None


class Messages(Section):
    """Collective operations that have something in common.

    Attributes:
        library: The library that performed them: "mpi", or the name of an engine.
        num_calls: The number of calls of all ranks together.
        num_bytes: The data that all ranks contributed in all calls together.
        time: The time from call to result, summed over all calls; overlapping ones count in full.
    """

    library: str
    num_calls: Count
    num_bytes: Count
    time: Seconds


class Collective(Messages):
    """All operations with the same name."""

    name: str


class MessageSize(Messages):
    """All operations whose messages are in one range of sizes.

    Attributes:
        from_bytes: The lower end of the range, inclusive.
        below_bytes: The upper end of the range, exclusive.
        bytes_per_s: The mean rate of one rank, including the time it waited for others.
    """

    from_bytes: Positive
    below_bytes: Positive
    bytes_per_s: float


ClockWaitsFor = Literal["tensor", "element"]


class CommunicationFacts(Section):
    """The communication between the ranks.

    Attributes:
        logged: Whether collectives were logged.
        clock_waits_for: What a clock waits for that times the gradients' allreduces: the tensor; or
            one element of it, on GPUs, which adds the time in which that is copied to the host.
            None if no gradients were averaged, or they were not logged.
        collectives: The collectives, by library and operation.
        message_sizes: The collectives, by library and message size.
    """

    logged: bool
    clock_waits_for: ClockWaitsFor | None = None
    collectives: list[Collective] | None = None
    message_sizes: list[MessageSize] | None = None


class QualityFigure(Section):
    """A metric of the trained model on the test set.

    Attributes:
        value: Its value; None if it is not a number.
        naive: The value for the best constant predictor.
    """

    value: float | None
    naive: float | None = None


class EnergyTotal(Section):
    """An energy, summed over the counted devices.

    Attributes:
        kind: How it is known.
        reason: Why it is absent.
        energy_j: The sum.
        mean_w: The sum of the mean powers.
        few_samples: The time is too short for a sensor: fewer than three samples, or fewer than
            three updates of its value.
    """

    kind: EnergyKind
    reason: str | None = None
    energy_j: float | None = None
    mean_w: float | None = None
    few_samples: bool = False

    @model_validator(mode="after")
    def _is_known_or_absent(self) -> Self:
        _check_energy(self.kind, self.reason, self.energy_j, self.mean_w)
        return self


class DeviceEnergies(Section):
    """The energies of devices of the same kind over an interval of time.

    Attributes:
        kind: The worst of their kinds.
        reasons: Why some are absent, each reason once.
        num_samples: The smallest number of samples of any device.
        few_samples: As in EnergyTotal, for any of them.
        energy: Their energies, without those that are absent.
        power: Their mean powers, likewise.
    """

    kind: EnergyKind
    reasons: list[str] = []
    num_samples: Count
    few_samples: bool = False
    energy: Joules | None = None
    power: Watts | None = None


class DeviceGroup(DeviceEnergies):
    """Devices of the same kind on all nodes; the readings of each are in the nodes' CSV files.

    Attributes:
        label: Their name in reports.
        domain: The part of the node that they measure.
        source: The source that reads them.
        reading: "energy" for an energy counter, "power" for power that is integrated.
        resolution_s: The sensor's update interval, or the time over which it averages.
        counted: Whether they are included in the totals. A device that the sensor of a node or of
            a module includes, or that another node of the same machine measures, is not.
        num_devices: How many there are.
        nodes: The first and the last of the nodes that have them.
        phases: Their energies in each phase.
    """

    label: str
    domain: PowerDomain
    source: str
    reading: Literal["energy", "power"]
    resolution_s: float | None
    counted: bool
    num_devices: Positive
    nodes: tuple[Count, Count]
    phases: dict[str, DeviceEnergies]


class AbsentSource(Section):
    """A source of power readings that is not available, why, and on which nodes."""

    source: str
    reason: str
    nodes: list[int]


class EnergyFacts(Section):
    """The energy of the job; of a run that ended early, see `RunRecord.known_until_s`.

    Attributes:
        kind: How it is known.
        reason: Why it is absent.
        total_j: The energy of the counted devices of all nodes, from the beginning of the first
            phase to the end of the last, as far as that was sampled.
        total_s: The time that total_j covers, on the node where it is longest.
        mean_w: The sum of the mean powers of the counted devices.
        few_samples: As in EnergyTotal.
        covers: The domains of the counted devices.
        phases: The energy of the counted devices in each phase.
        devices: The devices that were read, grouped by kind.
        absent: The sources that are not available.
        power_hz: The requested number of samples per second.
        sampler_overhead: The share of one core that sampling used, on the node where it is largest.
        notes: What to know when reading the samples.
        traces: The files of the samples, beside the record.
    """

    kind: EnergyKind
    reason: str | None = None
    total_j: float | None = None
    total_s: float | None = None
    mean_w: float | None = None
    few_samples: bool = False
    covers: list[PowerDomain] = []
    phases: dict[str, EnergyTotal] = {}
    devices: list[DeviceGroup] = []
    absent: list[AbsentSource] = []
    power_hz: float | None = None
    sampler_overhead: float | None = None
    notes: list[str] = []
    traces: list[str] = []

    @model_validator(mode="after")
    def _is_known_or_absent(self) -> Self:
        _check_energy(self.kind, self.reason, self.total_j, self.mean_w)
        return self


class PositionFacts(Section):
    """How far training has come on each rank.

    Attributes:
        epoch: The epochs that are complete.
        step: The steps that are complete in the next one.
    """

    epoch: Count
    step: Count


class CheckpointFacts(Section):
    """The checkpoints that a run has saved; of a continued run, those of its last part.

    Attributes:
        directory: Where they are.
        num_saved: How many are complete, including those that were later deleted.
        saved_bytes: The sum of their sizes.
        wait: The time that training waited for them on each rank.
        write_s: The time from the beginning of a save until its data were safe, summed over all.
        num_not_taken: How many were due while an earlier one was still being written.
        num_failed: How many could not be written.
        errors: Why, each reason once.
        newest: The name of the newest one.
        num_writers: How many ranks wrote it.
    """

    directory: str
    num_saved: Count
    saved_bytes: Count
    wait: Seconds | None = None
    write_s: Duration | None = None
    num_not_taken: Count = 0
    num_failed: Count = 0
    errors: list[str] = []
    newest: str | None = None
    num_writers: Positive | None = None


class PartFacts(Section):
    """A part of a run that was continued: from its start to its end, or to its death.

    Attributes:
        status: How it ended, or "running".
        started: When it started, in ISO 8601, UTC.
        ended: When it ended, likewise; if nobody noticed, when it last wrote a file.
        num_ranks: The number of ranks.
        num_nodes: The number of nodes.
        begin: Where its training began.
        checkpoint: The checkpoint that it began from.
        end: Where the next part went on, or where training ended.
        steps: The training steps that each rank began; None if that is not known.
        lost_steps: Those of them that were repeated; None if that is not known.
        total_s: Its time, from its start to its end.
        time_kind: How total_s is known.
        train_s: The time of training on the slowest rank; None if it was killed.
        energy: Its energy; None while it runs.
        failure: Why it did not finish.
    """

    status: Status
    started: str
    ended: str | None = None
    num_ranks: Positive
    num_nodes: Positive | None = None
    begin: PositionFacts
    checkpoint: str | None = None
    end: PositionFacts | None = None
    steps: Count | None = None
    lost_steps: Count | None = None
    total_s: Duration | None = None
    time_kind: TimeKind | None = None
    train_s: Duration | None = None
    energy: EnergyTotal | None = None
    failure: Failure | None = None

    @model_validator(mode="after")
    def _has_ended_or_runs(self) -> Self:
        facts = (self.ended, self.total_s, self.time_kind, self.energy)
        known = [fact is not None for fact in facts]
        if any(known) if self.status == "running" else not all(known):
            raise ValueError("a part has an end, a time and an energy if it is not running")
        if self.lost_steps is not None and self.lost_steps > (self.steps or 0):
            raise ValueError("a part has lost more steps than it began")
        return self


class WholeFacts(Section):
    """All parts of a continued run together.

    Attributes:
        num_parts: How many there are.
        total_s: The sum of their times, without the time between them.
        time_kind: The worst of how these are known.
        lost_steps: The steps of each rank that were repeated; None if that is not known of a part.
        energy: The sum of their energies; absent if one of them is.
    """

    num_parts: Positive
    total_s: Duration
    time_kind: TimeKind
    lost_steps: Count | None = None
    energy: EnergyTotal


class TimelineFacts(Section):
    """Horovod's timeline of the run.

    Attributes:
        file: Where it is.
        anchor_epoch_us: A time of day, in µs since 1970.
        anchor_s: The same moment, in seconds from the start of the run.
    """

    file: str
    anchor_epoch_us: int
    anchor_s: float


class SourceCommit(Section):
    """The commit that the package ran from, and whether files in it had been changed."""

    commit: str
    modified: bool


class MpiFacts(Section):
    """The MPI library of a run with several ranks.

    Attributes:
        library: Its name and version.
        thread_level: Its thread level: multiple is MPI_THREAD_MULTIPLE.
    """

    library: str
    thread_level: Literal["single", "funneled", "serialized", "multiple"]


class EnvironmentFacts(Section):
    """Versions, machine and settings, as rank 0 found them.

    Attributes:
        python: The version of Python.
        packages: The versions of packages, by name.
        system: The operating system.
        host: The name of the host.
        cpu: The name of the processor.
        num_cores: The number of cores that rank 0 may run on.
        node_cores: The number of cores of its node; None if that is not known.
        memory_bytes: The memory that it may use.
        settings: Environment variables that control training, communication or threads.
        mpi: The MPI library; None if the ranks did not use MPI.
        source: The source commit; None if the package did not run from a checkout.
    """

    python: str
    packages: dict[str, str]
    system: str
    host: str
    cpu: str
    num_cores: Positive
    node_cores: Positive | None = None
    memory_bytes: Count
    settings: dict[str, str]
    mpi: MpiFacts | None = None
    source: SourceCommit | None = None


class RunRecord(Section):
    """One run.

    Of a run that was continued from a checkpoint, the sections describe its last part, with the
    exception of parts, whole and training.epochs.

    Attributes:
        schema_version: The version of this format.
        status: How the run ended, or "running" if it has not.
        benchmark: The benchmark's name.
        started: When the run started, in ISO 8601, UTC.
        ended: When the run ended, in ISO 8601, UTC.
        command: The command executed on every rank.
        num_ranks: The number of ranks.
        num_nodes: The number of nodes.
        launcher: What started the ranks: mpirun, srun, jsrun, aprun, …; "none" if nothing did.
        parameters: The effective parameters, each with where its value came from.
        failure: Why it did not finish.
        known_until_s: Of a run that ended early, until when it is known, in seconds from the start
            of its last part. Its phases and epochs are then those that rank 0 had completed, with
            the times of rank 0 alone unless a checkpoint has gathered those of all ranks.
        ranks: All ranks, in order.
        launch: What their processes did before the run started; absent if the system does not say
            when a process started.
        data: The data that the model was trained on.
        plan: The scaled epochs, batch size and learning rate.
        model: The network.
        distributed: What averaged the gradients.
        phases: The time of each phase, by name, in the order in which they began.
        peak_rss: The largest resident memory of each rank.
        total_s: The time of the whole run on rank 0.
        training: The epochs and the throughput of training.
        communication: The communication between the ranks.
        efficiency: How well the ranks worked together over the whole run.
        quality: The metrics of the trained model on the test set, by name.
        energy: The energy of the job.
        timeline: Horovod's timeline.
        checkpoints: The checkpoints that were saved.
        parts: The parts of a continued run, in order, with the last.
        whole: All of these together, once the last has ended.
        environment: Versions, machine, settings.
        warnings: What to keep in mind when reading the record.
    """

    schema_version: Literal[2]
    status: Status
    benchmark: str
    started: str
    ended: str | None = None
    command: list[str] | None = None
    num_ranks: Positive
    num_nodes: Positive | None = None
    launcher: str | None = None
    parameters: dict[str, ParameterValue]
    failure: Failure | None = None
    known_until_s: Duration | None = None
    ranks: list[RankFacts] | None = None
    launch: LaunchFacts | None = None
    data: DataFacts | None = None
    plan: PlanFacts | None = None
    model: ModelFacts | None = None
    distributed: DistributedFacts | None = None
    phases: dict[str, PhaseTimes] | None = None
    peak_rss: Bytes | None = None
    total_s: Duration | None = None
    training: TrainingFacts | None = None
    communication: CommunicationFacts | None = None
    efficiency: Efficiency | Absent | None = None
    quality: dict[str, QualityFigure] | None = None
    energy: EnergyFacts | None = None
    timeline: TimelineFacts | None = None
    checkpoints: CheckpointFacts | None = None
    parts: Annotated[list[PartFacts], Field(min_length=1)] | None = None
    whole: WholeFacts | None = None
    environment: EnvironmentFacts | None = None
    warnings: list[str] | None = None

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
        self._check_parts()
        return self

    def _check_parts(self) -> None:
        """Checks that the parts of a continued run fit the run."""
        ended = [part.status for part in (self.parts or [])[:-1]]
        if "running" in ended or "ok" in ended:
            raise ValueError("a part that is running or ok is the last")
        if self.parts and self.parts[-1].status != self.status:
            raise ValueError("the status of the last part is that of the run")
        has_whole = bool(self.parts) and self.status != "running"
        if has_whole != (self.whole is not None):
            raise ValueError("a run has a whole if it has parts and is not running")
        if self.whole and self.whole.num_parts != len(self.parts or ()):
            raise ValueError(f"whole.num_parts is {self.whole.num_parts}, which is not the number")


_NEEDED: dict[Status, tuple[str, ...]] = {
    "running": (),
    "ok": (
        "ended",
        "ranks",
        "data",
        "plan",
        "model",
        "distributed",
        "phases",
        "total_s",
        "training",
        "efficiency",
        "communication",
        "quality",
        "energy",
        "environment",
    ),
    "failed": ("ended", "failure"),
    "interrupted": ("ended", "failure"),
}


def _check_energy(
    kind: EnergyKind, reason: str | None, energy_j: float | None, mean_w: float | None
) -> None:
    is_absent = kind == "absent"
    if is_absent != (energy_j is None) or is_absent != (mean_w is None):
        raise ValueError("an energy either is absent or has joules and watts")
    if is_absent and reason is None:
        raise ValueError("an absent energy needs a reason")
