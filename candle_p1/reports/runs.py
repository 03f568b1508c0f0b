"""The runs that a report is made of: every record below some directories, and what each shows."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from candle_p1.errors import RecordError
from candle_p1.parameters.catalog import role_of
from candle_p1.parameters.parameter import Role
from candle_p1.records.parts import is_continued
from candle_p1.records.per_rank import PerRank, read_per_rank
from candle_p1.records.record import RECORD_NAME, read_record
from candle_p1.records.types import Efficiency
from candle_p1.scaling import share_epochs
from candle_p1.text import count, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from candle_p1.records.types import (
        DeviceGroup,
        EpochFacts,
        FileFacts,
        PhaseTimes,
        QualityFigure,
        RunRecord,
    )

GIB = 2**30
DATA = "data"
"""The setting that identifies the data: the size of synthetic data, or the values of files."""

FIRST_TIME = "cached (first time)"
"""Replaces the loader `cached` where it read the file and wrote the cache, or a part of it."""

PLANNED = ("epochs_scaling", "batch_scaling", "lr_scaling", "data_parallel")
"""Settings for which the plan has the resolved values."""

POWER_FILE = re.compile(r"power-\d{1,9}\.csv")
HOROVOD = "HOROVOD_"
FUSION = "HOROVOD_FUSION_THRESHOLD"
LIMITS = ("train_steps", "val_steps", "test_steps")
"""Parameters that end an epoch, its validation or the test early, where they are not 0."""

ENGINE = "engine"
"""The setting for what averaged the gradients, whatever the parameter asked for."""
ENGINES_OF_BACKENDS = {"tensorflow": "horovod", "jax": "jax"}
"""The engine that trains with each backend of Keras, and so that of a rank that has no others."""

NOT_ABOUT_COMMUNICATION = ("HOROVOD_STALL", "HOROVOD_TIMELINE", "HOROVOD_LOG")


class Hardware(NamedTuple):
    """What numbers were measured on; those of different hardware are never combined.

    Attributes:
        cpu: The name of the processor.
        num_cores: The cores of a node, as the system counts them; where they are not recorded, the
            cores that rank 0 was allowed to run on.
        memory_gib: The memory that rank 0 was allowed to use, rounded to GiB.
        devices: The names of the devices that ranks computed on, each once.
    """

    cpu: str
    num_cores: int
    memory_gib: int
    devices: tuple[str, ...]

    def __str__(self) -> str:
        gpus = [name for name in self.devices if name != "cpu"]
        return ", ".join([self.cpu, f"{self.num_cores} cores", f"{self.memory_gib} GiB", *gpus])


class Stretch(NamedTuple):
    """A phase, a part of a phase or an epoch, on each rank.

    Attributes:
        name: Its name.
        within: The phase that it is a part of; "" where it is none.
        begin_s: When each rank began it, in seconds from the start of the run, float64, shape
            (ranks,); NaN where that is unknown.
        seconds: The time that each rank spent in it, likewise.
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
    def place(self) -> str:
        """The path of the record, as text that can be written and printed."""
        return printable(str(self.path))

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
    def failure(self) -> str | None:
        """Why the run failed; None where it did not."""
        return self.record.failure.reason if self.record.failure else None

    @cached_property
    def parameters(self) -> Mapping[str, Any]:
        """The values of all parameters, by name."""
        return {name: each.value for name, each in self.record.parameters.items()}

    @property
    def seed(self) -> int | None:
        """The seed of weights and orders; repeats of a point differ in it."""
        seed = self.parameters.get("rng_seed")
        return seed if isinstance(seed, int) else None

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """What defines a point, besides ranks and machine: parameters, and DATA.

        Omitted are the seed, places, logging, names of data files (DATA stands for these) and what
        CANDLE Supervisor adds. Where caches are staged does not matter, only whether they are. A
        run that had to write its cache has another loader (FIRST_TIME), and the engine is the one
        that was used. Lists become tuples.
        """
        settings: dict[str, Any] = {
            name: _frozen(value)
            for name, value in self.parameters.items()
            if role_of(name) in (Role.LEARNING, Role.SPEED)
        }
        epochs = settings.get("epochs")
        if settings.get("epochs_scaling", "") is None and isinstance(epochs, int) and epochs > 0:
            level = settings.get("data_parallel", "epoch")
            settings["epochs_scaling"], _ = share_epochs(epochs, 1, None, level)
        if "stage_dir" in self.parameters:
            settings["staged"] = self.parameters["stage_dir"] is not None
        if self._part("load", "write"):
            settings["loader"] = FIRST_TIME
        settings.pop(ENGINE, None)
        if self.engine:
            settings[ENGINE] = self.engine
        settings |= {name: self.plan[name] for name in PLANNED if name in self.plan}
        if self.data:
            settings[DATA] = self.data
            if not self.synthetic:
                for name in ("size", "data_seed"):  # meaningless where files are named
                    settings.pop(name, None)
        return settings

    @cached_property
    def limits(self) -> tuple[tuple[str, int], ...]:
        """The limits of its steps; such a run trains or tests a part of its samples only."""
        found = ((name, self.parameters.get(name)) for name in LIMITS)
        return tuple((name, steps) for name, steps in found if isinstance(steps, int) and steps > 0)

    @cached_property
    def horovod_settings(self) -> Mapping[str, str]:
        """Those of Horovod's settings that affect how gradients are averaged, as far as known."""
        distributed = self.record.distributed
        return {
            name: value
            for name, value in ((distributed.settings if distributed else None) or {}).items()
            if name.startswith(HOROVOD) and not name.startswith(NOT_ABOUT_COMMUNICATION)
        }

    @cached_property
    def engine(self) -> str | None:
        """What averaged the gradients; None where it is not known.

        A single rank averages nothing, but trains with the backend of an engine. A run that ended
        early has the engine that was asked for, unless that was left to the installation.
        """
        distributed, environment = self.record.distributed, self.record.environment
        if distributed and distributed.backend in ENGINES_OF_BACKENDS.values():
            return distributed.backend
        if environment:
            return ENGINES_OF_BACKENDS.get(environment.settings.get("KERAS_BACKEND", ""))
        asked = self.parameters.get(ENGINE)
        return asked if asked in ENGINES_OF_BACKENDS.values() else None

    @property
    def repeats_exactly(self) -> bool | None:
        """Whether repeated runs are bit-identical; None where the run did not record it."""
        deterministic = self.parameters.get("deterministic")
        return deterministic if isinstance(deterministic, bool) else None

    @property
    def jit_compile(self) -> bool | None:
        """Whether XLA compiled the training step; None where the run did not record it."""
        return self.record.model.jit_compile if self.record.model else None

    @property
    def fusion(self) -> str | None:
        """How Horovod fuses tensors, in words; None where it does not run or is unknown."""
        threshold = self.horovod_settings.get(FUSION)
        if threshold is None:
            return None
        return "none" if threshold == "0" else f"up to {threshold} bytes ({FUSION})"

    @cached_property
    def threads(self) -> int | None:
        """The CPU threads of the rank that has most; None for an unfinished run."""
        return max((rank.threads for rank in self.record.ranks or ()), default=None)

    @cached_property
    def machine(self) -> Hardware | None:
        """The machine that it ran on; None for an unfinished run."""
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
        """The versions of Python and of packages, and the commit of the source."""
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
        """Whether the data are synthetic; None where the run did not record it."""
        return self.record.data.synthetic if self.record.data else None

    @cached_property
    def data(self) -> str | None:
        """A description of the data; None where the run did not record them.

        Files are distinguished by the digests of their values, or without these by their sizes.
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
        """The loader; "" where the run did not record it."""
        return self.record.data.loader if self.record.data else ""

    @property
    def files(self) -> Mapping[str, FileFacts]:
        """The data files that the run recorded, by role."""
        return self.record.data.files if self.record.data else {}

    @cached_property
    def disturbed(self) -> str | None:
        """Why its times must not be compared; None where they may be."""
        training = self.record.training
        if training is None:
            return None
        told = {
            "traced by Horovod's timeline": training.traced,
            "profiled": training.profiled,
            "continued from a checkpoint": is_continued(self.record),
        }
        return " and ".join(reason for reason, applies in told.items() if applies) or None

    @property
    def num_parts(self) -> int:
        """How many parts it has: more than one if it was continued."""
        return len(self.record.parts or [self.record])

    @property
    def remark(self) -> str:
        """What to know of it in a list of runs."""
        told = [f"continued, {count(self.num_parts, 'part')}"] if self.num_parts > 1 else []
        if self.disturbed and not is_continued(self.record):
            told.append(self.disturbed)
        return "; ".join([*told, *filter(None, [self.failure])])

    @property
    def is_timed(self) -> bool:
        """Whether its times are valid: it finished, in one part, and nothing slowed it down."""
        return self.status == "ok" and self.disturbed is None

    @property
    def total_s(self) -> float | None:
        """Seconds of the whole run, with all of its parts; None where it did not finish."""
        return self.record.whole.total_s if self.record.whole else self.record.total_s

    @property
    def _phases(self) -> Mapping[str, PhaseTimes]:
        return self.record.phases or {}

    @cached_property
    def phase_s(self) -> Mapping[str, float]:
        """Seconds of each phase, on its slowest rank."""
        return {name: phase.max_s for name, phase in self._phases.items()}

    @property
    def broadcast_overhead_s(self) -> float | None:
        """Seconds from the first rank that is ready to broadcast to the end of the broadcast.

        This is what the paper calls broadcast overhead and reads off Horovod's timeline. Where it
        was not logged, it includes the framework's preparation of the broadcast.
        """
        return self._communicated_s(self._phases.get("broadcast"))

    @property
    def broadcast_wait_s(self) -> float | None:
        """Seconds that the first rank to be ready waited for the slowest loader."""
        return self.broadcast_wait.max_s if self.broadcast_wait else None

    @property
    def broadcast_wait(self) -> PhaseTimes | None:
        """The time that each rank waited for the slowest loader, before it broadcast."""
        return self._part("broadcast", "wait")

    @property
    def broadcast_transfer_s(self) -> float | None:
        """Seconds of the transfer of the weights, on the rank on which it takes longest."""
        return self._communicated_s(self._part("broadcast", "transfer"))

    def _communicated_s(self, phase: PhaseTimes | None) -> float | None:
        """Returns the longest time in collectives or, if it was not logged, in the phase."""
        if phase is None or self.num_ranks == 1:
            return None
        return (phase.communication or phase).max_s

    def mean_s(self, phase: str, part: str | None = None) -> float:
        """Returns the seconds of a phase or a part of it, mean over ranks; 0 without it."""
        times = self._part(phase, part) if part else self._phases.get(phase)
        return times.mean_s if times else 0.0

    def _part(self, phase: str, part: str) -> PhaseTimes | None:
        times = self._phases.get(phase)
        return (times.parts or {}).get(part) if times else None

    @cached_property
    def per_rank(self) -> PerRank | None:
        """The raw values of all ranks; None where their file is not beside the record.

        Raises:
            RecordError: The file is damaged, or belongs to another run.
        """
        return read_per_rank(self.path, self.record)

    def stretches(self) -> Iterator[Stretch]:
        """Yields the phases in order, each followed by its parts; nothing without raw values."""
        yield from self._stretches("phases", self._phases)

    @property
    def whole_phases(self) -> list[Stretch]:
        """The phases in order, without their parts; empty without raw values."""
        return [each for each in self.stretches() if not each.within]

    def _stretches(
        self, place: str, phases: Mapping[str, PhaseTimes], within: str = ""
    ) -> Iterator[Stretch]:
        for name, phase in phases.items():
            here = f"{place}.{name}"
            yield from self._stretch(name, within, here, here)
            yield from self._stretches(f"{here}.parts", phase.parts or {}, name)

    def epoch_stretches(self) -> Iterator[Stretch]:
        """Yields the training of each epoch; nothing without raw values."""
        for i, epoch in enumerate(self._epochs):
            place = f"training.epochs.{i}"
            yield from self._stretch(f"epoch {epoch.epoch}", "train", place, f"{place}.train")

    def _stretch(self, name: str, within: str, begins: str, times: str) -> Iterator[Stretch]:
        seconds = self.per_rank.get(times) if self.per_rank else None
        if self.per_rank and seconds is not None:
            begin_s = self.per_rank.get(f"{begins}.begin")
            unknown_s = np.full(len(seconds), np.nan)
            yield Stretch(name, within, unknown_s if begin_s is None else begin_s, seconds)

    @property
    def plan(self) -> Mapping[str, Any]:
        """The scaled epochs, batch size and learning rate; empty where the run had none yet."""
        return dict(self.record.plan or {})

    @property
    def _epochs(self) -> list[EpochFacts]:
        return self.record.training.epochs if self.record.training else []

    @property
    def history(self) -> dict[str, list[float]]:
        """The loss and the metrics of every epoch, by name; NaN where one is not a number."""
        names = dict.fromkeys(name for epoch in self._epochs for name in epoch.metrics)
        values = [epoch.metrics for epoch in self._epochs]
        return {
            name: [np.nan if (v := each.get(name)) is None else v for each in values]
            for name in names
        }

    @property
    def stopped(self) -> str | None:
        """Why training ended before its last epoch; None where it did not."""
        return self.record.training.stopped if self.record.training else None

    @property
    def epochs_per_rank(self) -> int | None:
        """The epochs that each rank trained: fewer than planned where training was stopped."""
        return len(self._epochs) if self.stopped else self.plan.get("epochs_per_rank")

    @cached_property
    def first_step_s(self) -> float | None:
        """Seconds of the first step, in which the framework compiles, on the slowest rank."""
        steps = self._epochs[0].steps if self._epochs else None
        return steps.first.max_s if steps and steps.first else None

    @cached_property
    def epoch_s(self) -> float | None:
        """Seconds of training one epoch on the slowest rank: the median over the epochs.

        Without validation. The first step of the run is a warm-up: its epoch counts as if all of
        its steps had taken the average time of the others.
        """
        known = [seconds for epoch in self._epochs if (seconds := _epoch_s(epoch)) is not None]
        return median(known) if known else None

    @property
    def figures_of_merit(self) -> Mapping[str, QualityFigure]:
        """What was recorded of the trained model on the test set, by name."""
        return self.record.quality or {}

    @cached_property
    def quality(self) -> Mapping[str, float]:
        """The figures of merit that are numbers."""
        figures = self.figures_of_merit.items()
        return {name: each.value for name, each in figures if each.value is not None}

    @cached_property
    def naive(self) -> Mapping[str, float]:
        """The same for the best constant predictor, where there is one."""
        figures = self.figures_of_merit.items()
        return {name: each.naive for name, each in figures if each.naive is not None}

    def has_diverged(self, name: str) -> bool:
        """Returns whether a figure of merit was recorded, but is not a number."""
        return name in self.figures_of_merit and name not in self.quality

    @cached_property
    def last_epoch(self) -> Mapping[str, float]:
        """The figures of merit of the training samples in the last epoch, as in the paper."""
        metrics = self._epochs[-1].metrics if self._epochs else {}
        return {name: value for name, value in metrics.items() if value is not None}

    @property
    def energy_kind(self) -> str:
        """One of measured, estimated, simulated and absent."""
        energy = self.record.whole.energy if self.record.whole else self.record.energy
        return energy.kind if energy else "absent"

    @property
    def energy_covers(self) -> tuple[str, ...]:
        """The parts of the machine that the energy covers."""
        return tuple(self.record.energy.covers) if self.record.energy else ()

    @property
    def energy_j(self) -> float | None:
        """The energy of the whole run, with all of its parts; None where it was not measured."""
        if self.record.whole:
            return self.record.whole.energy.energy_j
        return self.record.energy.total_j if self.record.energy else None

    @property
    def gpu_j(self) -> float | None:
        """The energy of the whole run per GPU, mean over its GPUs; None where not all were read."""
        return self._per_gpu(lambda group: group.energy.mean_j if group.energy else None)

    @property
    def gpu_w(self) -> float | None:
        """The mean power of a GPU over the whole run, likewise."""
        return self._per_gpu(lambda group: group.power.mean_w if group.power else None)

    def _per_gpu(self, mean_of: Callable[[DeviceGroup], float | None]) -> float | None:
        devices = self.record.energy.devices if self.record.energy else []
        if any(group.domain == "module" for group in devices):
            return None  # a superchip's sensors do not separate its GPU
        gpus = [group for group in devices if group.domain == "gpu"]
        # Where a node's own sensor is counted, the GPUs in it are not.
        gpus = [group for group in gpus if group.counted] or gpus
        means = [None if group.kind == "absent" else mean_of(group) for group in gpus]
        known = [mean for mean in means if mean is not None]
        if not known or len(known) < len(means):
            return None
        return float(np.average(known, weights=[group.num_devices for group in gpus]))

    @property
    def node_j(self) -> float | None:
        """The energy of the whole run per node, mean over its nodes; None where not measured."""
        return self._per_node(self.energy_j)

    @property
    def node_w(self) -> float | None:
        """The mean power of a node over the whole run: of its devices together."""
        return self._per_node(self.record.energy.mean_w if self.record.energy else None)

    def _per_node(self, total: float | None) -> float | None:
        return total / self.num_nodes if total is not None and self.num_nodes else None

    @property
    def power_hz(self) -> float | None:
        """Readings of power per second; None where power was not measured."""
        return self.record.energy.power_hz if self.record.energy else None

    def phase_j(self, phase: str) -> float | None:
        """Returns the energy of a phase; None where it was not measured."""
        of_phase = self.record.energy.phases.get(phase) if self.record.energy else None
        return of_phase.energy_j if of_phase else None

    @property
    def power_files(self) -> list[Path]:
        """The files of power readings beside the record, one for each node that has any."""
        names = self.record.energy.traces if self.record.energy else []
        return [self.path.parent / name for name in names if POWER_FILE.fullmatch(name)]

    @property
    def timeline_file(self) -> Path | None:
        """Horovod's timeline, plain or gzipped: beside the record, or else where it was written.

        None where there is none.
        """
        if self.record.timeline is None:
            return None
        written = Path(self.record.timeline.file)
        places = (self.path.with_name(written.name), written) if written.name else ()
        both = [place.with_name(place.name + end) for place in places for end in ("", ".gz")]
        return next(filter(_is_file, both), None)

    @cached_property
    def communication_share(self) -> float | None:
        """The share of training in which a rank, on average, only communicated.

        This includes waiting for slower ranks, and excludes communication that back-propagation
        hides. With one rank it is 0; None where it was not logged.
        """
        train = self._phases.get("train")
        if not train or not train.mean_s:
            return None
        if self.num_ranks == 1:
            return 0.0
        if not train.communication or not isinstance(self.record.efficiency, Efficiency):
            return None
        return train.communication.mean_s / train.mean_s


@dataclass(frozen=True)
class Runs:
    """The runs below some directories.

    Attributes:
        runs: By start.
        problems: Why a record cannot be read, by its path.
    """

    runs: tuple[RecordedRun, ...]
    problems: Mapping[Path, str]


def read_runs(directories: Iterable[Path]) -> Runs:
    """Reads every run.json below the directories, each file once; a directory may be a record.

    Raises:
        RecordError: A directory does not exist, or none of them holds a record.
    """
    directories = list(directories)
    runs: list[RecordedRun] = []
    problems: dict[Path, str] = {}
    for path in sorted({path for directory in directories for path in _records(directory)}):
        try:
            runs.append(RecordedRun(path, read_record(path)))
        except RecordError as error:
            problems[path] = str(error).removeprefix(str(path)).lstrip(":, ")
    if not runs and not problems:
        names = ", ".join(map(str, directories))
        raise RecordError(
            f"{names}: no {RECORD_NAME} there or below: name the directory that holds the runs"
        )
    return Runs(tuple(sorted(runs, key=lambda run: run.started)), problems)


def _records(directory: Path) -> list[Path]:
    try:
        if directory.is_file():
            return [directory.resolve()]
        if not directory.is_dir():
            raise RecordError(f"{directory}: there is no such directory")
    except OSError as error:
        raise RecordError(f"{directory}: {error.strerror}") from error
    found = [
        Path(parent, RECORD_NAME)
        for parent, _, files in os.walk(directory, followlinks=False)
        if RECORD_NAME in files
    ]
    return [path.resolve() if path.is_file() else path for path in found]  # links may form a loop


def _is_file(path: Path) -> bool:
    """Returns whether a path, which may be an impossible one, is that of a file."""
    try:
        return path.is_file()
    except OSError:
        return False


def _frozen(value: Any) -> Any:
    """Returns the value of a setting with tuples in place of lists and objects."""
    if isinstance(value, dict):
        return tuple((key, _frozen(each)) for key, each in value.items())
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _epoch_s(epoch: EpochFacts) -> float | None:
    """Returns the time of an epoch without the first step of the run; see RecordedRun.epoch_s."""
    seconds, steps = epoch.train.max_s, epoch.steps
    if steps is None or steps.first is None:
        return seconds
    if steps.num < 2:
        return None
    return (seconds - steps.first.max_s) * steps.num / (steps.num - 1)
