"""Records as a table: the facts of a run, by the names of their columns.

A run is a row of the table that `load_frame` returns; `Run.facts` is that row. All numbers in
reports, comparisons and exports come from it. Values of individual ranks, which take long to read,
are not in it, but in `Run.per_rank`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from candle_p1.errors import RecordError
from candle_p1.parameters.catalog import role_of
from candle_p1.parameters.parameter import Role
from candle_p1.records.record import RECORD_NAME, PerRank, read_per_rank, read_record
from candle_p1.records.segments import is_continued
from candle_p1.records.types import Efficiency, EpochRecord, PhaseTimes, RunRecord
from candle_p1.scaling import share_epochs
from candle_p1.text import printable

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

GIB = 2**30
DATA, ENGINE, HOROVOD = "data", "engine", "HOROVOD_"
"""Settings: the data, what averaged the gradients, and the prefix of Horovod's own."""

PLANNED = ("epochs_scaling", "batch_scaling", "lr_scaling", "data_parallel")
"""Settings for which the plan has the resolved values."""

POWER_FILE = re.compile(r"power-\d{1,9}\.csv")
LIMITS = ("train_steps", "val_steps", "test_steps")
"""Parameters that end an epoch, its validation or the test early, where they are not 0."""

ENGINES_OF_BACKENDS = {"tensorflow": "horovod", "jax": "jax"}
NOT_ABOUT_COMMUNICATION = ("HOROVOD_STALL", "HOROVOD_TIMELINE", "HOROVOD_LOG")
STRONG, WEAK, BATCH = "strong", "weak", "batch"

PLACES = {
    "benchmark": "benchmark",
    "status": "status",
    "failure": "failure.reason",
    "started": "started",
    "num_ranks": "num_ranks",
    "num_nodes": "num_nodes",
    "synthetic": "data.synthetic",
    "loader": "data.loader",
    "stopped": "training.stopped",
    "samples_per_s": "training.samples_per_s",
    "broadcast_wait_s": "phases.broadcast.regions.wait.max_s",
    "load_balance": "efficiency.load_balance",
    "communication_efficiency": "efficiency.communication_efficiency",
    "parallel_efficiency": "efficiency.parallel_efficiency",
    "jit_compile": "model.jit_compile",
    "power_w": "energy.mean_w",
    "power_hz": "energy.power_hz",
}
"""The places of the values of columns in a record."""

PARTS = (
    "start-up", "data loading", "waiting for the slowest loader", "training", "communication",
    "training with communication", "the rest",
)  # fmt: skip
STARTUP, LOADING, WAITING, TRAINING, COMMUNICATING, UNDIVIDED, OTHER = PARTS
"""The parts of a run's time, mean over ranks. Communication is the time in training in which a rank
does nothing else, and the transfer of the weights; where it was not measured, training and
communication are one part, UNDIVIDED. The rest is preprocessing, building the model, evaluation and
digests."""


class MissingDataError(RecordError):
    """The records lack what a figure or a finding needs; the message says what."""


class PhaseSpan(NamedTuple):
    """A phase, a part of a phase or an epoch, on each rank.

    `within` is the phase that it is a part of, if any. `begin_s`, in seconds from the start of the
    run, and `seconds` have shape (ranks,), and are NaN where they are unknown.
    """

    name: str
    within: str
    begin_s: NDArray[np.float64]
    seconds: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Run:
    """A run: its record, read from a file, and the row that it is in the table of all runs."""

    path: Path
    record: RunRecord

    def __getitem__(self, column: str) -> Any:
        """Returns a fact; None where it is not known."""
        return self.facts.get(column)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The row of the run, by the names of columns."""
        return {"run": self, "record": printable(str(self.path))} | _facts(self.record)

    @cached_property
    def per_rank(self) -> PerRank | None:
        """The raw values of all ranks; None where their file is not beside the record.

        Raises:
            RecordError: The file is damaged, or belongs to another run.
        """
        return read_per_rank(self.path, self.record)

    def phase_spans(self) -> Iterator[PhaseSpan]:
        """Yields the phases in order, each followed by its regions; nothing without raw values."""
        if self.per_rank:
            yield from self._spans("phases", self.record.phases or {}, "", self.per_rank)

    def _spans(
        self, place: str, phases: Mapping[str, PhaseTimes], within: str, per_rank: PerRank
    ) -> Iterator[PhaseSpan]:
        for name, phase in phases.items():
            here = f"{place}.{name}"
            seconds, begin_s = per_rank.get(here), per_rank.get(f"{here}.begin")
            if seconds is not None:
                unknown_s = np.full(len(seconds), np.nan)
                yield PhaseSpan(name, within, unknown_s if begin_s is None else begin_s, seconds)
            yield from self._spans(f"{here}.regions", phase.regions or {}, name, per_rank)

    @property
    def history(self) -> dict[str, list[float]]:
        """The loss and the metrics of every epoch, by name; NaN where one is not a number."""
        of_epochs = [epoch.metrics for epoch in _at(self.record, "training.epochs") or []]
        names = dict.fromkeys(name for each in of_epochs for name in each)
        return {
            name: [np.nan if (v := each.get(name)) is None else v for each in of_epochs]
            for name in names
        }

    @property
    def power_files(self) -> list[Path]:
        """The files of power readings beside the record, one for each node that has any."""
        names = _at(self.record, "energy.traces") or []
        return [self.path.parent / name for name in names if POWER_FILE.fullmatch(name)]

    @property
    def timeline_file(self) -> Path | None:
        """Horovod's timeline, plain or gzipped: beside the record, or else where it was written."""
        if self.record.timeline is None:
            return None
        written = Path(self.record.timeline.file)
        places = (self.path.with_name(written.name), written) if written.name else ()
        both = [place.with_name(place.name + end) for place in places for end in ("", ".gz")]
        with suppress(OSError):  # of an impossible path
            return next(filter(Path.is_file, both), None)
        return None


@dataclass(frozen=True)
class Runs:
    """The runs below some directories, by start, and why records cannot be read, by path."""

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
            f"{names}: no {RECORD_NAME} there or below: name the directory that contains the runs"
        )
    return Runs(tuple(sorted(runs, key=lambda run: run.record.started)), problems)


def load_frame(runs: Iterable[Run]) -> pd.DataFrame:
    """Returns the table of some runs, whose columns hold Python's own values, None if unknown."""
    import pandas as pd

    frame = pd.DataFrame([run.facts for run in runs], dtype=object)
    return frame.where(frame.notna(), None)


def _facts(record: RunRecord) -> dict[str, Any]:
    """Returns the columns of a run; those of phases are times on the slowest rank."""
    parameters = {name: each.value for name, each in record.parameters.items()}
    phases, plan, merits = record.phases or {}, dict(record.plan or {}), record.quality or {}
    epochs: list[EpochRecord] = _at(record, "training.epochs") or []
    ranks, nodes, num = record.ranks or [], record.num_nodes, record.num_ranks
    environment, source = record.environment, _at(record, "environment.source")
    reasons = {
        "traced by Horovod's timeline": _at(record, "training.traced"),
        "profiled": _at(record, "training.profiled"),
        "continued from a checkpoint": record.training and is_continued(record),
    }
    perturbed_by = " and ".join(reason for reason, applies in reasons.items() if applies) or None
    versions = {"python": environment.python, **environment.packages} if environment else {}
    if source:
        versions["source"] = source.commit[:12] + " with changes" * source.modified
    facts = {column: _at(record, place) for column, place in PLACES.items()}
    facts |= {
        "perturbed_by": perturbed_by,
        "is_timed": record.status == "ok" and perturbed_by is None,
        "threads": max((rank.threads for rank in ranks), default=None),
        "ranks_per_node": (num / nodes if num % nodes else num // nodes) if nodes else None,
        "hosts": " ".join(sorted({rank.host for rank in ranks})) or None,
        **_hardware(record),
        "num_segments": len(record.segments or [record]),
        "seed": _seed(parameters),
        "folds": _of_type(int, parameters.get("folds")) or 0,
        "deterministic": _of_type(bool, parameters.get("deterministic")),
        "epochs_per_rank": len(epochs) if facts["stopped"] else plan.get("epochs_per_rank"),
        "merits": tuple(merits),
        "limits": tuple(
            (name, steps)
            for name in LIMITS
            if isinstance(steps := parameters.get(name), int) and steps > 0
        ),
        **_times(record, epochs),
        **_energy(record),
    }
    for group, values in {
        "parameter": parameters,
        "plan": plan,
        "version": versions,
        "training": epochs[-1].metrics if epochs else {},
        "test": {name: each.value for name, each in merits.items()},
        "naive": {name: each.naive for name, each in merits.items()},
    }.items():
        facts |= {f"{group}_{name}": value for name, value in values.items()}
    facts |= {f"phase_{name}_s": phase.max_s for name, phase in phases.items()}
    return facts | _settings(record, parameters, plan)


def _hardware(record: RunRecord) -> dict[str, Any]:
    """Returns what numbers were measured on; those of different machines are never combined.

    The cores are those of a node, or else those that rank 0 was allowed to run on; the memory is
    that which rank 0 was allowed to use.
    """
    environment = record.environment
    if not environment or not record.ranks:
        return dict.fromkeys(("machine", "cpu", "num_cores", "memory_gib", "devices"))
    num_cores = environment.node_cores or environment.num_cores
    memory_gib = round(environment.memory_bytes / GIB)
    devices = sorted({rank.device for rank in record.ranks})
    parts = [environment.cpu, f"{num_cores} cores", f"{memory_gib} GiB"]
    return {
        "machine": ", ".join([*parts, *(name for name in devices if name != "cpu")]),
        "cpu": environment.cpu,
        "num_cores": num_cores,
        "memory_gib": memory_gib,
        "devices": " ".join(devices),
    }


def _at(section: Any, place: str) -> Any:
    """Returns the value at a place of a record, such as "training.epochs"; None without one."""
    for name in place.split("."):
        is_mapping = isinstance(section, Mapping)
        section = section.get(name) if is_mapping else getattr(section, name, None)
    return section


def _of_type(kind: type, value: Any) -> Any:
    return value if isinstance(value, kind) else None


def _seed(parameters: Mapping[str, Any]) -> int | str | None:
    """Returns what tells repeats apart: the seed and, in cross-validation, the fold held out."""
    seed = _of_type(int, parameters.get("rng_seed"))
    return f"{seed}, fold {parameters.get('fold')}" if parameters.get("folds") else seed


def _times(record: RunRecord, epochs: Iterable[EpochRecord]) -> dict[str, Any]:
    """Returns total, epochs, broadcast, communication, and parts of the time.

    The broadcast overhead is the paper's: from the first rank that is ready to broadcast to the end
    of the broadcast; where communication was not logged, it includes the framework's preparation.
    """
    epochs_s = [s for epoch in epochs if (s := _epoch_s(epoch)) is not None]
    train: PhaseTimes | None = _at(record, "phases.train")
    share = None  # of training in which a rank only communicated, or waited for slower ranks
    if train and train.mean_s and record.num_ranks == 1:
        share = 0.0
    elif train and train.mean_s and train.communication:
        is_known = isinstance(record.efficiency, Efficiency)
        share = train.communication.mean_s / train.mean_s if is_known else None
    total_s = record.totals.total_s if record.totals else record.total_s
    parts_s = _parts_s(record, share, total_s or 0.0)
    sum_s = sum(parts_s.values())
    return {
        "total_s": total_s,
        "epoch_s": median(epochs_s) if epochs_s else None,
        "first_step_s": next((_at(epoch, "steps.first.max_s") for epoch in epochs), None),
        "broadcast_overhead_s": _communicated_s(record, "phases.broadcast"),
        "broadcast_transfer_s": _communicated_s(record, "phases.broadcast.regions.transfer"),
        "communication_share": share,
        "communication_percent": None if share is None else 100 * share,
        "parts": parts_s,
        **{f"percent_{part}": 100 * (s / sum_s) for part, s in parts_s.items() if sum_s},
    }


def _communicated_s(record: RunRecord, place: str) -> float | None:
    """Returns the longest time in collectives or, if it was not logged, in the phase."""
    phase: PhaseTimes | None = _at(record, place)
    if phase is None or record.num_ranks == 1:
        return None
    return (phase.communication or phase).max_s


def _epoch_s(epoch: EpochRecord) -> float | None:
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


def _parts_s(record: RunRecord, share: float | None, total_s: float) -> dict[str, float]:
    """Returns the known PARTS, in s; they add up to the total."""
    places = ("startup", "load", "train", "broadcast.regions.wait", "broadcast.regions.transfer")
    startup_s, load_s, train_s, wait_s, transfer_s = (
        _at(record, f"phases.{place}.mean_s") or 0.0 for place in places
    )
    parts = {STARTUP: startup_s, LOADING: load_s, WAITING: wait_s}
    if share is None:
        parts[UNDIVIDED] = train_s + transfer_s
    else:
        parts[TRAINING] = train_s - share * train_s
        parts[COMMUNICATING] = share * train_s + transfer_s
    return parts | {OTHER: max(0.0, total_s - sum(parts.values()))}


def _settings(
    record: RunRecord, parameters: Mapping[str, Any], plan: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the settings that define a point, besides ranks and machine, and what they imply.

    They are the parameters for learning and speed, DATA, the engine that was used, and Horovod's
    own about averaging. Omitted are the seed, places, logging, names of data files (DATA stands for
    these) and what CANDLE Supervisor adds. Where caches are staged does not matter, only whether
    they are. A run that had to write its cache has a loader of its own. Lists become tuples.
    """
    settings = {
        name: _frozen(value)
        for name, value in parameters.items()
        if role_of(name) in (Role.LEARNING, Role.SPEED) and name != ENGINE
    }
    epochs, data = settings.get("epochs"), _data(record, parameters)
    if settings.get("epochs_scaling", "") is None and isinstance(epochs, int) and epochs > 0:
        level = settings.get("data_parallel", "epoch")
        settings["epochs_scaling"], _ = share_epochs(epochs, 1, None, level)
    if "stage_dir" in parameters:
        settings["staged"] = parameters["stage_dir"] is not None
    if _at(record, "phases.load.regions.write"):
        settings["loader"] = "cached (first time)"
    settings |= {name: plan[name] for name in PLANNED if name in plan}
    if data:
        settings[DATA] = data
        if not _at(record, "data.synthetic"):
            for name in ("size", "data_seed"):  # meaningless where files are named
                settings.pop(name, None)
    mode = STRONG if settings.get("epochs_scaling") in ("strong", "strong_ceil") else WEAK
    if settings.get("data_parallel", "epoch") != "epoch":
        mode = STRONG  # ranks share the samples of an epoch
    if settings.get("batch_scaling", "none") != "none":
        mode = BATCH
    engine = _engine(record, parameters)
    settings |= {ENGINE: engine} if engine else {}
    settings |= {
        name: value
        for name, value in (_at(record, "distributed.settings") or {}).items()
        if name.startswith(HOROVOD) and not name.startswith(NOT_ABOUT_COMMUNICATION)
    }
    threshold = settings.get("HOROVOD_FUSION_THRESHOLD")
    fusion = "none" if threshold == "0" else threshold and f"up to {threshold} bytes"
    return {"settings": settings, "data": data, "mode": mode, "engine": engine, "fusion": fusion}


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


def _energy(record: RunRecord) -> dict[str, Any]:
    energy, totals = record.energy, record.totals.energy if record.totals else None
    energy_j = totals.energy_j if totals else _at(energy, "total_j")
    mean_w, nodes = _at(energy, "mean_w"), record.num_nodes
    phases = energy.phases if energy else {}
    return {f"energy_{name}_j": each.energy_j for name, each in phases.items()} | {
        "energy_kind": totals.kind if totals else energy.kind if energy else "absent",
        "energy_j": energy_j,
        "power_per_gpu_w": _per_gpu(record, "power.mean_w"),
        "energy_per_gpu_j": _per_gpu(record, "energy.mean_j"),
        "power_per_node_w": mean_w / nodes if mean_w is not None and nodes else None,
        "energy_per_node_j": energy_j / nodes if energy_j is not None and nodes else None,
        "energy_covers": tuple(energy.covers) if energy else (),
    }


def _per_gpu(record: RunRecord, mean: str) -> float | None:
    """Returns a mean over GPUs; None where not all of them were read."""
    devices = record.energy.devices if record.energy else []
    if any(group.domain == "module" for group in devices):
        return None  # a superchip's sensors do not separate its GPU
    gpus = [group for group in devices if group.domain == "gpu"]
    # Where a node's own sensor is counted, the GPUs in it are not.
    gpus = [group for group in gpus if group.counted] or gpus
    means = [None if each.kind == "absent" else _at(each, mean) for each in gpus]
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


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, _frozen(each)) for key, each in value.items())
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
