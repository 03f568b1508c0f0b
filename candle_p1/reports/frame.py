"""Records as a table: what is known of a run, by the name of its column.

A run is a row of the table that `load_frame` returns; `Run.facts` is that row. All numbers of
reports, comparisons and exports come from there. Values of single ranks, which take long to read,
are not in it: they are beside the record, in `Run.per_rank`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
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
from candle_p1.records.types import Efficiency, EpochFacts, PhaseTimes, RunRecord
from candle_p1.scaling import share_epochs
from candle_p1.text import printable

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

GIB = 2**30
DATA, ENGINE, HOROVOD = "data", "engine", "HOROVOD_"
"""Settings: the data, what averaged the gradients, and how the names of Horovod's own begin."""

FIRST_TIME = "cached (first time)"
"""Replaces the loader `cached` where it read the file and wrote the cache, or a part of it."""

PLANNED = ("epochs_scaling", "batch_scaling", "lr_scaling", "data_parallel")
"""Settings for which the plan has the resolved values."""

POWER_FILE = re.compile(r"power-\d{1,9}\.csv")
FUSION = "HOROVOD_FUSION_THRESHOLD"
LIMITS = ("train_steps", "val_steps", "test_steps")
"""Parameters that end an epoch, its validation or the test early, where they are not 0."""

ENGINES_OF_BACKENDS = {"tensorflow": "horovod", "jax": "jax"}
NOT_ABOUT_COMMUNICATION = ("HOROVOD_STALL", "HOROVOD_TIMELINE", "HOROVOD_LOG")
STRONG, WEAK, BATCH = "strong", "weak", "batch"

PARTS = (
    "start-up", "data loading", "waiting for the slowest loader", "training", "communication",
    "training with communication", "the rest",
)  # fmt: skip
STARTUP, LOADING, WAITING, TRAINING, COMMUNICATING, UNDIVIDED, OTHER = PARTS
"""The parts of a run's time, mean over ranks. Communication is the time in training in which a rank
does nothing else, and the transfer of the weights; where it was not measured, training and
communication are one part, UNDIVIDED. The rest is preprocessing, building the model, evaluation and
digests."""


class Hardware(NamedTuple):
    """What numbers were measured on; those of different hardware are never combined.

    Attributes:
        cpu: The name of the processor.
        num_cores: The cores of a node, or else those that rank 0 was allowed to run on.
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


class PhaseSpan(NamedTuple):
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
class Run:
    """A run: its record, and the row that it is in the table of all runs.

    Attributes:
        path: The record's file.
        record: Its content.
    """

    path: Path
    record: RunRecord

    def __getitem__(self, column: str) -> Any:
        """Returns a fact; None where it is not known."""
        return self.facts.get(column)

    @property
    def place(self) -> str:
        """The path of the record, as text that can be written and printed."""
        return printable(str(self.path))

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What is known of it, by the names of columns."""
        return {"run": self, "record": self.place} | _facts(self.record)

    @cached_property
    def per_rank(self) -> PerRank | None:
        """The raw values of all ranks; None where their file is not beside the record.

        Raises:
            RecordError: The file is damaged, or belongs to another run.
        """
        return read_per_rank(self.path, self.record)

    def phase_spans(self) -> Iterator[PhaseSpan]:
        """Yields the phases in order, each followed by its parts; nothing without raw values."""
        yield from self._spans("phases", self.record.phases or {})

    def epoch_spans(self) -> Iterator[PhaseSpan]:
        """Yields the training of each epoch; nothing without raw values."""
        for i, epoch in enumerate(_epochs(self.record)):
            place = f"training.epochs.{i}"
            yield from self._span(f"epoch {epoch.epoch}", "train", place, f"{place}.train")

    def _spans(
        self, place: str, phases: Mapping[str, PhaseTimes], within: str = ""
    ) -> Iterator[PhaseSpan]:
        for name, phase in phases.items():
            here = f"{place}.{name}"
            yield from self._span(name, within, here, here)
            yield from self._spans(f"{here}.parts", phase.parts or {}, name)

    def _span(self, name: str, within: str, begins: str, times: str) -> Iterator[PhaseSpan]:
        seconds = self.per_rank.get(times) if self.per_rank else None
        if self.per_rank and seconds is not None:
            begin_s = self.per_rank.get(f"{begins}.begin")
            unknown_s = np.full(len(seconds), np.nan)
            yield PhaseSpan(name, within, unknown_s if begin_s is None else begin_s, seconds)

    @property
    def history(self) -> dict[str, list[float]]:
        """The loss and the metrics of every epoch, by name; NaN where one is not a number."""
        of_epochs = [epoch.metrics for epoch in _epochs(self.record)]
        names = dict.fromkeys(name for each in of_epochs for name in each)
        return {
            name: [np.nan if (v := each.get(name)) is None else v for each in of_epochs]
            for name in names
        }

    @property
    def power_files(self) -> list[Path]:
        """The files of power readings beside the record, one for each node that has any."""
        names = self.record.energy.traces if self.record.energy else []
        return [self.path.parent / name for name in names if POWER_FILE.fullmatch(name)]

    @property
    def timeline_file(self) -> Path | None:
        """Horovod's timeline, plain or gzipped: beside the record, or else where it was written."""
        if self.record.timeline is None:
            return None
        written = Path(self.record.timeline.file)
        places = (self.path.with_name(written.name), written) if written.name else ()
        both = [place.with_name(place.name + end) for place in places for end in ("", ".gz")]
        return next(filter(_is_file, both), None)


@dataclass(frozen=True)
class Runs:
    """The runs below some directories.

    Attributes:
        runs: By start.
        problems: Why a record cannot be read, by its path.
    """

    runs: tuple[Run, ...]
    problems: Mapping[Path, str]


def read_runs(directories: Iterable[Path]) -> Runs:
    """Reads every run.json below the directories, each file once; a directory may be a record.

    Raises:
        RecordError: A directory does not exist, or none of them holds a record.
    """
    directories = list(directories)
    runs: list[Run] = []
    problems: dict[Path, str] = {}
    for path in sorted({path for directory in directories for path in _records(directory)}):
        try:
            runs.append(Run(path, read_record(path)))
        except RecordError as error:
            problems[path] = str(error).removeprefix(str(path)).lstrip(":, ")
    if not runs and not problems:
        names = ", ".join(map(str, directories))
        raise RecordError(
            f"{names}: no {RECORD_NAME} there or below: name the directory that holds the runs"
        )
    return Runs(tuple(sorted(runs, key=lambda run: run.record.started)), problems)


def load_frame(runs: Iterable[Run]) -> pd.DataFrame:
    """Returns the table of some runs, whose columns hold Python's own values, None if unknown."""
    import pandas as pd

    frame = pd.DataFrame([run.facts for run in runs], dtype=object)
    return frame.where(frame.notna(), None)


def _facts(record: RunRecord) -> dict[str, Any]:
    """Returns the columns of a run, in the order of runs.csv and then those for reports alone.

    Times of phases are those of the slowest rank. The broadcast overhead is the paper's: from the
    first rank that is ready to broadcast to the end of the broadcast; where communication was not
    logged, it includes the framework's preparation.
    """
    parameters = {name: each.value for name, each in record.parameters.items()}
    phases, training = record.phases or {}, record.training
    machine, plan, stopped = _machine(record), dict(record.plan or {}), _get(training, "stopped")
    epochs = _epochs(record)
    epochs_s = [s for epoch in epochs if (s := _epoch_s(epoch)) is not None]
    first = epochs[0].steps.first if epochs and epochs[0].steps else None
    perturbed_by = _perturbed_by(record)
    figures = record.quality or {}
    deterministic = parameters.get("deterministic")
    seed = parameters.get("rng_seed")
    engine, exchange = _engine(record, parameters), _exchange(record)
    data = _data(record, parameters)
    share = _communication_share(record)
    total_s = record.whole.total_s if record.whole else record.total_s
    parts_s = _parts_s(record, share, total_s or 0.0)
    sum_s = sum(parts_s.values())
    facts: dict[str, Any] = {
        "benchmark": record.benchmark,
        "status": record.status,
        "perturbed_by": perturbed_by,
        "failure": record.failure.reason if record.failure else None,
        "started": record.started,
        "num_ranks": record.num_ranks,
        "num_nodes": record.num_nodes,
        "threads": max((rank.threads for rank in record.ranks or ()), default=None),
        "synthetic": _get(record.data, "synthetic"),
        "data": data,
        "hosts": " ".join(sorted({rank.host for rank in record.ranks or ()})) or None,
        "cpu": _get(machine, "cpu"),
        "num_cores": _get(machine, "num_cores"),
        "memory_gib": _get(machine, "memory_gib"),
        "devices": " ".join(machine.devices) if machine else None,
        "total_s": total_s,
        "epoch_s": median(epochs_s) if epochs_s else None,
        "first_step_s": first.max_s if first else None,
        "broadcast_overhead_s": _communicated_s(record, phases.get("broadcast")),
        "broadcast_wait_s": _get(_part(record, "broadcast", "wait"), "max_s"),
        "broadcast_transfer_s": _communicated_s(record, _part(record, "broadcast", "transfer")),
        "samples_per_s": _get(training, "samples_per_s"),
        "communication_share": share,
        "communication_percent": None if share is None else 100 * share,
        **{name: _get(record.efficiency, name) for name in EFFICIENCIES},
        **_energy(record),
        **{f"phase_{name}_s": phase.max_s for name, phase in phases.items()},
        **{f"test_{name}": each.value for name, each in figures.items()},
        **{f"naive_{name}": each.naive for name, each in figures.items()},
        **{f"training_{name}": v for name, v in (epochs[-1].metrics if epochs else {}).items()},
        **{f"plan_{name}": value for name, value in plan.items()},
        **{f"version_{name}": value for name, value in _versions(record).items()},
        **{f"parameter_{name}": value for name, value in parameters.items()},
        "is_timed": record.status == "ok" and perturbed_by is None,
        "loader": record.data.loader if record.data else "",
        "seed": seed if isinstance(seed, int) else None,
        "engine": engine,
        "deterministic": deterministic if isinstance(deterministic, bool) else None,
        "jit_compile": _get(record.model, "jit_compile"),
        "fusion": _fusion(exchange),
        "machine": machine,
        "stopped": stopped,
        "epochs_per_rank": len(epochs) if stopped else plan.get("epochs_per_rank"),
        "ranks_per_node": _exact(record.num_ranks / nodes) if (nodes := record.num_nodes) else None,
        "num_parts": len(record.parts or [record]),
        "merits": tuple(figures),
        "limits": tuple(
            (name, steps)
            for name in LIMITS
            if isinstance(steps := parameters.get(name), int) and steps > 0
        ),
        "parts": parts_s,
        **{f"percent_{part}": 100 * (s / sum_s) for part, s in parts_s.items() if sum_s},
    }
    settings = _settings(record, parameters, data) | ({ENGINE: engine} if engine else {})
    return facts | {"mode": _mode(settings), "settings": settings | exchange}


EFFICIENCIES = ("load_balance", "communication_efficiency", "parallel_efficiency")


def _get(section: Any, name: str) -> Any:
    return getattr(section, name, None)


def _epochs(record: RunRecord) -> list[EpochFacts]:
    return record.training.epochs if record.training else []


def _part(record: RunRecord, phase: str, part: str) -> PhaseTimes | None:
    times = (record.phases or {}).get(phase)
    return (times.parts or {}).get(part) if times else None


def _communicated_s(record: RunRecord, phase: PhaseTimes | None) -> float | None:
    """Returns the longest time in collectives or, if it was not logged, in the phase."""
    if phase is None or record.num_ranks == 1:
        return None
    return (phase.communication or phase).max_s


def _epoch_s(epoch: EpochFacts) -> float | None:
    """Returns the time of an epoch on the slowest rank, without validation.

    The first step of the run is a warm-up: its epoch counts as if all of its steps had taken the
    average time of the others.
    """
    seconds, steps = epoch.train.max_s, epoch.steps
    if steps is None or steps.first is None:
        return seconds
    if steps.num < 2:
        return None
    return (seconds - steps.first.max_s) * steps.num / (steps.num - 1)


def _communication_share(record: RunRecord) -> float | None:
    """Returns the share of training in which a rank, on average, only communicated.

    This includes waiting for slower ranks, and excludes communication that back-propagation hides.
    """
    train = (record.phases or {}).get("train")
    if not train or not train.mean_s:
        return None
    if record.num_ranks == 1:
        return 0.0
    if not train.communication or not isinstance(record.efficiency, Efficiency):
        return None
    return train.communication.mean_s / train.mean_s


def _parts_s(record: RunRecord, share: float | None, total_s: float) -> dict[str, float]:
    """Returns the known PARTS, in s; they add up to the total."""

    def mean_s(phase: str, part: str | None = None) -> float:
        times = _part(record, phase, part) if part else (record.phases or {}).get(phase)
        return times.mean_s if times else 0.0

    train_s, transfer_s = mean_s("train"), mean_s("broadcast", "transfer")
    parts = {STARTUP: mean_s("startup"), LOADING: mean_s("load")}
    parts[WAITING] = mean_s("broadcast", "wait")
    if share is None:
        parts[UNDIVIDED] = train_s + transfer_s
    else:
        parts[TRAINING] = train_s - share * train_s
        parts[COMMUNICATING] = share * train_s + transfer_s
    return parts | {OTHER: max(0.0, total_s - sum(parts.values()))}


def _perturbed_by(record: RunRecord) -> str | None:
    """Returns why the times of a run must not be compared."""
    if record.training is None:
        return None
    reasons = {
        "traced by Horovod's timeline": record.training.traced,
        "profiled": record.training.profiled,
        "continued from a checkpoint": is_continued(record),
    }
    return " and ".join(reason for reason, applies in reasons.items() if applies) or None


def _machine(record: RunRecord) -> Hardware | None:
    environment = record.environment
    if not environment or not record.ranks:
        return None
    return Hardware(
        environment.cpu,
        environment.node_cores or environment.num_cores,
        round(environment.memory_bytes / GIB),
        tuple(sorted({rank.device for rank in record.ranks})),
    )


def _versions(record: RunRecord) -> dict[str, str]:
    environment = record.environment
    if environment is None:
        return {}
    versions = {"python": environment.python}
    if environment.source:
        modified = " with changes" if environment.source.modified else ""
        versions["source"] = environment.source.commit[:12] + modified
    return versions | environment.packages


def _data(record: RunRecord, parameters: Mapping[str, Any]) -> str | None:
    """Returns a description of the data, in which files have the digests of their values."""
    data = record.data
    if data is None:
        return None
    if data.synthetic:
        return f"synthetic, {parameters.get('size', 'of unknown size')}"
    files = [
        f"{role} {(file.values_sha256 or '')[:8] or file.file_bytes}"
        for role, file in sorted(data.files.items())
    ]
    return f"files: {', '.join(files)}"


def _engine(record: RunRecord, parameters: Mapping[str, Any]) -> str | None:
    """Returns what averaged the gradients, whatever the parameter asked for.

    A single rank averages nothing, but trains with the backend of an engine. A run that ended early
    has the engine that was asked for, unless that was left to the installation.
    """
    engines = ENGINES_OF_BACKENDS.values()
    if record.distributed and record.distributed.backend in engines:
        return record.distributed.backend
    if record.environment:
        return ENGINES_OF_BACKENDS.get(record.environment.settings.get("KERAS_BACKEND", ""))
    asked = parameters.get(ENGINE)
    return asked if asked in engines else None


def _exchange(record: RunRecord) -> dict[str, str]:
    """Returns those of Horovod's settings that affect how gradients are averaged."""
    settings = (record.distributed.settings if record.distributed else None) or {}
    return {
        name: value
        for name, value in settings.items()
        if name.startswith(HOROVOD) and not name.startswith(NOT_ABOUT_COMMUNICATION)
    }


def _fusion(exchange: Mapping[str, str]) -> str | None:
    """Returns how Horovod fuses tensors, in words."""
    threshold = exchange.get(FUSION)
    if threshold is None:
        return None
    return "none" if threshold == "0" else f"up to {threshold} bytes ({FUSION})"


def _settings(record: RunRecord, parameters: Mapping[str, Any], data: str | None) -> dict[str, Any]:
    """Returns what defines a point, besides ranks and machine: parameters, and DATA.

    Omitted are the seed, places, logging, names of data files (DATA stands for these) and what
    CANDLE Supervisor adds. Where caches are staged does not matter, only whether they are. A run
    that had to write its cache has another loader (FIRST_TIME). Lists become tuples.
    """
    settings = {
        name: _frozen(value)
        for name, value in parameters.items()
        if role_of(name) in (Role.LEARNING, Role.SPEED) and name != ENGINE
    }
    epochs, plan = settings.get("epochs"), dict(record.plan or {})
    if settings.get("epochs_scaling", "") is None and isinstance(epochs, int) and epochs > 0:
        level = settings.get("data_parallel", "epoch")
        settings["epochs_scaling"], _ = share_epochs(epochs, 1, None, level)
    if "stage_dir" in parameters:
        settings["staged"] = parameters["stage_dir"] is not None
    if _part(record, "load", "write"):
        settings["loader"] = FIRST_TIME
    settings |= {name: plan[name] for name in PLANNED if name in plan}
    if data:
        settings[DATA] = data
        if record.data and not record.data.synthetic:
            for name in ("size", "data_seed"):  # meaningless where files are named
                settings.pop(name, None)
    return settings


def _mode(settings: Mapping[str, Any]) -> str:
    """Returns STRONG, WEAK or BATCH.

    At the batch-step level, ranks share the samples of an epoch, which is also strong scaling.
    """
    if settings.get("batch_scaling", "none") != "none":
        return BATCH
    shared = settings.get("epochs_scaling") in ("strong", "strong_ceil")
    return STRONG if shared or settings.get("data_parallel", "epoch") != "epoch" else WEAK


def _energy(record: RunRecord) -> dict[str, Any]:
    """Returns energy and mean power: over all devices of the job, per GPU and per node."""
    energy, whole = record.energy, record.whole.energy if record.whole else None
    energy_j = whole.energy_j if whole else _get(energy, "total_j")
    mean_w, nodes = _get(energy, "mean_w"), record.num_nodes
    phases = energy.phases if energy else {}
    return {f"energy_{name}_j": each.energy_j for name, each in phases.items()} | {
        "energy_kind": whole.kind if whole else energy.kind if energy else "absent",
        "energy_j": energy_j,
        "power_w": mean_w,
        "power_per_gpu_w": _per_gpu(record, "power", "mean_w"),
        "energy_per_gpu_j": _per_gpu(record, "energy", "mean_j"),
        "power_per_node_w": mean_w / nodes if mean_w is not None and nodes else None,
        "energy_per_node_j": energy_j / nodes if energy_j is not None and nodes else None,
        "energy_covers": tuple(energy.covers) if energy else (),
        "power_hz": _get(energy, "power_hz"),
    }


def _per_gpu(record: RunRecord, what: str, mean: str) -> float | None:
    """Returns a mean over GPUs; None where not all of them were read."""
    devices = record.energy.devices if record.energy else []
    if any(group.domain == "module" for group in devices):
        return None  # a superchip's sensors do not separate its GPU
    gpus = [group for group in devices if group.domain == "gpu"]
    # Where a node's own sensor is counted, the GPUs in it are not.
    gpus = [group for group in gpus if group.counted] or gpus
    means = [None if each.kind == "absent" else _get(_get(each, what), mean) for each in gpus]
    known = [each for each in means if each is not None]
    if not known or len(known) < len(means):
        return None
    return float(np.average(known, weights=[group.num_devices for group in gpus]))


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
    try:
        return path.is_file()
    except OSError:  # an impossible path
        return False


def _exact(value: float) -> float:
    return int(value) if value.is_integer() else value


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, _frozen(each)) for key, each in value.items())
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
