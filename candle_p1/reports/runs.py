"""The runs that a report is made of: every record below some directories, and what each says."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from candle_p1.errors import RecordError
from candle_p1.records.per_rank import PerRank, read_per_rank
from candle_p1.records.record import RECORD_NAME, read_record
from candle_p1.records.types import Efficiency, EnergyFacts
from candle_p1.reports.settings import about_communication, settings_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from candle_p1.records.types import EpochFacts, PhaseTimes, RunRecord

GIB = 2**30


class Hardware(NamedTuple):
    """What numbers were taken on; those of different machines are never put together.

    Attributes:
        cpu: The processor's name.
        num_cores: The cores of a node, as the system counts them; of records that do not have
            it, those that rank 0 was allowed to run on.
        memory_gib: The memory it was allowed to use, to the GiB.
        devices: The names of what ranks computed on, each once.
    """

    cpu: str
    num_cores: int
    memory_gib: int
    devices: tuple[str, ...]

    def __str__(self) -> str:
        gpus = [name for name in self.devices if name != "cpu"]
        return ", ".join([self.cpu, f"{self.num_cores} cores", f"{self.memory_gib} GiB", *gpus])


class LoadedFile(NamedTuple):
    """A data file of a run.

    Attributes:
        role: train, test, ….
        file_bytes: Its size.
        load_s: Seconds of loading it, on the slowest rank; None where it was not timed.
    """

    role: str
    file_bytes: int
    load_s: float | None


class Stretch(NamedTuple):
    """What a phase, a part of a phase or an epoch took on each rank.

    Attributes:
        name: Of the phase, the part or the epoch.
        within: The phase that it is a part of; "" where it is none.
        begin_s: When each rank began it, in seconds from the start of the run, float64, shape
            (ranks,); NaN where that is not known.
        seconds: What each rank spent in it, likewise.
    """

    name: str
    within: str
    begin_s: NDArray[np.float64]
    seconds: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """One run: its record, and what reports ask of it.

    Attributes:
        path: The record's file.
        record: Its content.
    """

    path: Path
    record: RunRecord

    @property
    def benchmark(self) -> str:
        """The benchmark's name."""
        return self.record.benchmark

    @property
    def status(self) -> str:
        """One of running, ok, failed and interrupted."""
        return self.record.status

    @property
    def started(self) -> str:
        """When it started, as ISO 8601 in UTC."""
        return self.record.started

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self.record.num_ranks

    @property
    def num_nodes(self) -> int | None:
        """The number of nodes, where it is known."""
        return self.record.num_nodes

    @property
    def launcher(self) -> str | None:
        """What started the ranks."""
        return self.record.launcher

    @property
    def failure(self) -> str | None:
        """Why the run failed; None where it did not."""
        return self.record.failure.reason if self.record.failure else None

    @property
    def warnings(self) -> Sequence[str]:
        """The warnings of the run."""
        return self.record.warnings or []

    @cached_property
    def parameters(self) -> Mapping[str, Any]:
        """The values of all parameters, by name."""
        return {name: each.value for name, each in self.record.parameters.items()}

    @property
    def seed(self) -> int | None:
        """The seed of weights and orders; runs of one point that differ in it are repeats."""
        return self.parameters.get("rng_seed")

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """What defines a point, beside ranks and machine; see settings.settings_of."""
        load = self._phases.get("load")
        return settings_of(
            self.parameters,
            self.plan,
            self.data,
            is_synthetic=self.synthetic,
            wrote_cache=load is not None and "write" in (load.parts or {}),
        )

    @cached_property
    def horovod_settings(self) -> Mapping[str, str]:
        """Horovod's settings, by variable; empty where they are not known, as with one rank."""
        distributed = self.record.distributed
        return about_communication((distributed.settings if distributed else None) or {})

    @property
    def environment_settings(self) -> Mapping[str, str]:
        """The environment variables on record."""
        return self.record.environment.settings if self.record.environment else {}

    @cached_property
    def threads(self) -> int | None:
        """CPU threads of a rank, the largest of all; None of a run that did not finish."""
        return max((rank.threads for rank in self.record.ranks or ()), default=None)

    @cached_property
    def machine(self) -> Hardware | None:
        """What it ran on; None of a run that did not finish."""
        environment = self.record.environment
        if not environment or not self.record.ranks:
            return None
        return Hardware(
            environment.cpu,
            environment.node_cores or environment.num_cores,
            round(environment.memory_bytes / GIB),
            tuple(sorted({rank.device for rank in self.record.ranks})),
        )

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """The names of the nodes, each once."""
        return tuple(sorted({rank.host for rank in self.record.ranks or ()}))

    @cached_property
    def versions(self) -> Mapping[str, str]:
        """Versions of Python and of the packages, and the source's commit."""
        environment = self.record.environment
        if environment is None:
            return {}
        versions = {"python": environment.python}
        if environment.source:
            modified = " with changes" if environment.source.modified else ""
            versions["source"] = environment.source.commit[:12] + modified
        return versions | environment.packages

    @property
    def synthetic(self) -> bool | None:
        """Whether the data were synthetic; None where the run did not get as far as to say."""
        return self.record.data.synthetic if self.record.data else None

    @cached_property
    def data(self) -> str | None:
        """The data in words; None where the run did not get far enough to record them.

        Files are told apart by the digests of their values, or without these by their sizes.
        """
        data = self.record.data
        if data is None:
            return None
        if data.synthetic:
            return f"synthetic, {self.parameters.get('size', 'of unknown size')}"
        files = [
            f"{role} {(file.values_sha256 or '')[:8] or file.file_bytes}"
            for role, file in sorted(data.files.items())
        ]
        return f"files: {', '.join(files)}"

    @property
    def loader(self) -> str:
        """The loader; "" where the run did not get far enough to record it."""
        return self.record.data.loader if self.record.data else ""

    @property
    def files(self) -> list[LoadedFile]:
        """The data files, as far as the run recorded them."""
        return [
            LoadedFile(role, file.file_bytes, file.load.max_s if file.load else None)
            for role, file in (self.record.data.files if self.record.data else {}).items()
        ]

    @cached_property
    def disturbed(self) -> str | None:
        """Why its times are not to be compared; None where they are."""
        training = self.record.training
        reasons = []
        if training and training.traced:
            reasons.append("traced by Horovod's timeline")
        if training and training.profiled:
            reasons.append("profiled")
        return " and ".join(reasons) or None

    @property
    def is_timed(self) -> bool:
        """Whether its times count: it finished, and nothing slowed it down."""
        return self.status == "ok" and self.disturbed is None

    @cached_property
    def phase_s(self) -> Mapping[str, float]:
        """Seconds of each phase, of its slowest rank."""
        return {name: phase.max_s for name, phase in self._phases.items()}

    def mean_s(self, phase: str, part: str | None = None) -> float:
        """Returns seconds of a phase, or of a part of it, mean over ranks; 0 where it has none."""
        times = self._phases.get(phase)
        if part is not None:
            times = (times.parts or {}).get(part) if times else None
        return times.mean_s if times else 0.0

    @property
    def _phases(self) -> Mapping[str, PhaseTimes]:
        return self.record.phases or {}

    @cached_property
    def per_rank(self) -> PerRank | None:
        """The raw values of all ranks; None where their file does not lie beside the record."""
        return read_per_rank(self.path)

    def stretches(self) -> Iterator[Stretch]:
        """Yields the phases in their order, each followed by its parts; none without raw values."""
        yield from self._stretches(self._phases, "phases", "")

    def _stretches(
        self, phases: Mapping[str, PhaseTimes], place: str, within: str
    ) -> Iterator[Stretch]:
        for name, phase in phases.items():
            here = f"{place}.{name}"
            yield from self._stretch(name, within, here, here)
            yield from self._stretches(phase.parts or {}, f"{here}.parts", name)

    def epoch_stretches(self) -> Iterator[Stretch]:
        """Yields the training of each epoch; none without raw values."""
        for i, epoch in enumerate(self._epochs):
            place = f"training.epochs.{i}"
            yield from self._stretch(f"epoch {epoch.epoch}", "train", place, f"{place}.train")

    def _stretch(self, name: str, within: str, begins: str, times: str) -> Iterator[Stretch]:
        seconds = self.per_rank.get(times) if self.per_rank else None
        begin_s = self.per_rank.get(f"{begins}.begin") if self.per_rank else None
        if seconds is not None:
            if begin_s is None:
                begin_s = np.full(len(seconds), np.nan)
            yield Stretch(name, within, begin_s, seconds)

    @property
    def timeline_anchor(self) -> tuple[float, int] | None:
        """A time of a traced run, in seconds from its start and in µs since 1970."""
        timeline = self.record.timeline
        return (timeline.anchor_s, timeline.anchor_epoch_us) if timeline else None

    @property
    def total_s(self) -> float | None:
        """Seconds of the whole run; None where it did not finish."""
        return self.record.total_s

    @property
    def load_s(self) -> float | None:
        """Seconds of loading the data, of the slowest rank."""
        return self.phase_s.get("load")

    @property
    def train_s(self) -> float | None:
        """Seconds of training with its validation, of the slowest rank: the paper's TensorFlow."""
        return self.phase_s.get("train")

    @cached_property
    def broadcast_wait_s(self) -> float | None:
        """Seconds in which the rank that was ready first waited for the slowest one's loading."""
        broadcast = self._phases.get("broadcast")
        wait = (broadcast.parts or {}).get("wait") if broadcast else None
        return wait.max_s if wait else None

    @property
    def plan(self) -> Mapping[str, Any]:
        """The scaled epochs, batch size and learning rate; empty where it did not get there."""
        return dict(self.record.plan or {})

    @property
    def epochs_per_rank(self) -> int | None:
        """The epochs that each rank trained: fewer than planned where training was stopped."""
        return len(self._epochs) if self.stopped else self.plan.get("epochs_per_rank")

    @property
    def batch_size(self) -> int | None:
        """The samples of one step of one rank."""
        return self.plan.get("batch_size")

    @property
    def stopped(self) -> str | None:
        """Why training ended before its last epoch; None where it did not."""
        return self.record.training.stopped if self.record.training else None

    @cached_property
    def first_step_s(self) -> float | None:
        """The first step, in which the framework compiles, of the slowest rank."""
        steps = self._epochs[0].steps if self._epochs else None
        return steps.first.max_s if steps and steps.first else None

    @cached_property
    def epoch_s(self) -> float | None:
        """Seconds of training one epoch on the slowest rank: the median over the epochs.

        Without validation. The first step of the run is a warm-up: its epoch counts as if all of
        its steps had taken what the others took on average.
        """
        times = [_epoch_s(epoch) for epoch in self._epochs]
        known = [seconds for seconds in times if seconds is not None]
        return median(known) if known else None

    @property
    def _epochs(self) -> list[EpochFacts]:
        return self.record.training.epochs if self.record.training else []

    @property
    def samples_per_s(self) -> float | None:
        """The rate of training over all ranks."""
        return self.record.training.samples_per_s if self.record.training else None

    @property
    def quality_names(self) -> Iterable[str]:
        """The names of the figures of the trained model, also of those that are no numbers."""
        return (self.record.quality or {}).keys()

    @cached_property
    def quality(self) -> Mapping[str, float]:
        """The figures of the trained model on the test set that are numbers, by name."""
        return {
            name: figure.value
            for name, figure in (self.record.quality or {}).items()
            if figure.value is not None
        }

    def has_diverged(self, name: str) -> bool:
        """Returns whether a figure of the trained model is on record, but not as a number."""
        return name in self.quality_names and name not in self.quality

    @cached_property
    def naive(self) -> Mapping[str, float]:
        """The same of the best constant predictor, where there is one."""
        return {
            name: figure.naive
            for name, figure in (self.record.quality or {}).items()
            if figure.naive is not None
        }

    @cached_property
    def last_epoch(self) -> Mapping[str, float]:
        """The figures of the training samples in the last epoch, by name, as the paper shows."""
        metrics = self._epochs[-1].metrics if self._epochs else {}
        return {name: value for name, value in metrics.items() if value is not None}

    @property
    def _energy(self) -> EnergyFacts:
        return self.record.energy or EnergyFacts(kind="absent", reason="the run did not finish")

    @property
    def energy_kind(self) -> str:
        """One of measured, estimated, simulated and absent."""
        return self._energy.kind

    @property
    def energy_covers(self) -> tuple[str, ...]:
        """The parts of the machine that the energy is of."""
        return tuple(self._energy.covers)

    @property
    def energy_j(self) -> float | None:
        """The energy of the whole run; None where it was not measured."""
        return self._energy.total_j

    @property
    def power_w(self) -> float | None:
        """The mean power over the whole run; None where it was not measured."""
        return self._energy.mean_w

    def phase_j(self, phase: str) -> float | None:
        """Returns the energy of a phase; None where it was not measured."""
        of_phase = self._energy.phases.get(phase)
        return of_phase.energy_j if of_phase else None

    @property
    def power_files(self) -> list[Path]:
        """The files of power readings, one of each node that has any."""
        return [self.path.parent / name for name in self._energy.traces]

    @property
    def efficiency(self) -> Efficiency | None:
        """POP's efficiencies of the whole run; None where they could not be told."""
        known = self.record.efficiency
        return known if isinstance(known, Efficiency) else None

    @cached_property
    def communication_share(self) -> float | None:
        """The share of training in which a rank, on average, did nothing but communicate.

        Waiting for slower ranks counts; what back-propagation hides of an allreduce does not. With
        one rank it is 0. None where it was not logged.
        """
        train = self._phases.get("train")
        if not train or not train.mean_s:
            return None
        if self.num_ranks == 1:
            return 0.0
        if not train.communication or not self.efficiency:
            return None
        return train.communication.mean_s / train.mean_s


class Problem(NamedTuple):
    """A record that cannot be used, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Runs:
    """What was found.

    Attributes:
        runs: By start.
        problems: Of records that cannot be read.
    """

    runs: tuple[RecordedRun, ...]
    problems: tuple[Problem, ...]


def read_runs(directories: Iterable[Path]) -> Runs:
    """Reads every run.json below the directories, each file once; a directory may be a record.

    Raises:
        RecordError: A directory does not exist, or none of them holds a record.
    """
    directories = list(directories)
    runs, problems = [], []
    for path in sorted({path for directory in directories for path in _records(directory)}):
        try:
            runs.append(RecordedRun(path, read_record(path)))
        except RecordError as error:
            problems.append(Problem(path, str(error).removeprefix(str(path)).lstrip(":, ")))
    if not runs and not problems:
        names = ", ".join(map(str, directories))
        raise RecordError(
            f"{names}: no {RECORD_NAME} there or below: name the directory that holds the runs"
        )
    return Runs(tuple(sorted(runs, key=lambda run: run.started)), tuple(problems))


def _records(directory: Path) -> list[Path]:
    if directory.is_file():
        return [directory.resolve()]
    if not directory.is_dir():
        raise RecordError(f"{directory}: there is no such directory")
    return [
        Path(parent, RECORD_NAME).resolve()
        for parent, _, files in os.walk(directory, followlinks=False)
        if RECORD_NAME in files
    ]


def _epoch_s(epoch: EpochFacts) -> float | None:
    """Returns the time of an epoch without the run's first step; see RecordedRun.epoch_s."""
    seconds, steps = epoch.train.max_s, epoch.steps
    if steps is None or steps.first is None:
        return seconds
    if steps.num < 2:
        return None
    return (seconds - steps.first.max_s) * steps.num / (steps.num - 1)
