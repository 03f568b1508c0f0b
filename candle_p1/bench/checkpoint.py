"""Compares ways to save the state of a training: how long it waits, until when the data are safe.

Every measurement is a job of its own, which trains, saves several times and goes on training beside
what is still being written. The jobs run in rounds of all variants, every second round in reverse
order. Before each save that is timed, one process writes and syncs as many bytes, which is the rate
of the disk at that time: disks of virtual machines change theirs within minutes. Memory is sampled
in a job that is not timed.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from candle_p1.bench.interval import daly_interval_s, expected_ratio, young_interval_s
from candle_p1.bench.job import Job, Measurement, OnStart, run
from candle_p1.bench.memory import peak_of_sum_bytes
from candle_p1.reports.statistics import estimate_ratio, median_interval, summarize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from candle_p1.bench.memory import MemorySamples
    from candle_p1.data.reader import FileSet

OURS = "this package"
OURS_WAITING = "this package, waiting"
BACKUP = "BackupAndRestore"
MODEL_SAVE = "model.save"
VARIANTS = (OURS, OURS_WAITING, BACKUP, MODEL_SAVE)
SAVES_PER_JOB = 2
"""Saves of a job that are timed, after a first one."""
HOUR_S = 3600.0


@dataclass(frozen=True)
class CheckpointJob(Job):
    """What a job saves, and how.

    Attributes:
        variant: One of VARIANTS.
        directory: Where it is saved; for the measurement, the directory in which each job gets a
            temporary one.
        purpose: "time", or "memory" for a job whose memory is sampled.
    """

    worker: ClassVar[str] = "candle_p1.bench.checkpoint_worker"

    variant: str = OURS
    directory: str = "."
    purpose: Literal["time", "memory"] = "time"

    @property
    def name(self) -> str:
        """The variant."""
        return self.variant


@dataclass(frozen=True)
class TimedSave:
    """One save, as a rank has timed it.

    Attributes:
        wait_s: How long training waited for it.
        safe_s: From its begin until all data were on the disk, synced.
        plain_s: The time in which one process has written and synced as many bytes just before;
            0 on other ranks than 0, and if it was not measured.
        alone_s: The time of steps before it.
        beside_s: The time of steps during which it was still being written. Steps at the end of an
            epoch take longer, so compare means, not medians.
    """

    wait_s: float
    safe_s: float
    plain_s: float
    alone_s: list[float]
    beside_s: list[float]


@dataclass(frozen=True)
class CheckpointOutcome:
    """What a rank has measured.

    Attributes:
        saves: The saves in their order; the first one is not representative, because it creates
            files.
        state_bytes: The size of the weights and of the optimizer's state.
        num_arrays: Their number.
        file_bytes: The size of the files of the last checkpoint.
        prepare_s: From the start of the process until training could begin.
        restore_s: The time to read and verify the last checkpoint, and to give the model its
            values; None if the variant does not measure it.
        steps_per_epoch: The number of steps of an epoch.
        batch_size: The number of samples in a step of this rank.
        threads: The number of threads of an operation.
        device: "cpu", or the GPU's name.
        training_memory: Samples of the memory of this process before the first save.
        memory: Samples from the first save on.
    """

    saves: list[TimedSave]
    state_bytes: int
    num_arrays: int
    file_bytes: int
    prepare_s: float
    restore_s: float | None
    steps_per_epoch: int
    batch_size: int
    threads: int
    device: str
    training_memory: MemorySamples = field(default_factory=list)
    memory: MemorySamples = field(default_factory=list)

    @property
    def step_s(self) -> float:
        """The mean time of a step beside which nothing is written, in s."""
        return statistics.fmean(seconds for save in self.saves for seconds in save.alone_s)

    @property
    def delays_s(self) -> list[float]:
        """By how much each save delayed training: its wait, and what the steps beside it lost."""
        return [
            save.wait_s + sum(save.beside_s) - len(save.beside_s) * self.step_s
            for save in self.saves
        ]


@dataclass(frozen=True)
class CheckpointComparison(Measurement):
    """What is compared, and under which conditions.

    Attributes:
        num_rounds: Jobs of each variant that are timed.
        mtbf_s: The mean time between failures for which intervals are advised, in s.
    """

    job: CheckpointJob
    num_rounds: int = 3
    mtbf_s: float = 24 * HOUR_S

    def results(self, files: FileSet, on_start: OnStart) -> dict[str, Any]:
        """Runs all jobs; see Measurement."""
        timed: dict[str, list[list[CheckpointOutcome]]] = {name: [] for name in VARIANTS}
        sampled: dict[str, list[CheckpointOutcome]] = {}
        total = len(VARIANTS) * (1 + self.num_rounds)
        done = 0

        def outcomes(variant: str, purpose: Literal["time", "memory"]) -> list[CheckpointOutcome]:
            nonlocal done
            on_start(done, total, f"{variant}, {purpose}")
            done += 1
            with tempfile.TemporaryDirectory(
                prefix=".candle-p1-bench-", dir=self.job.directory
            ) as directory:
                job = replace(self.job, variant=variant, purpose=purpose, directory=directory)
                return run(job, self.num_ranks)

        for variant in VARIANTS:
            sampled[variant] = outcomes(variant, "memory")
        for number in range(self.num_rounds):
            for variant in VARIANTS if number % 2 == 0 else VARIANTS[::-1]:
                timed[variant].append(outcomes(variant, "time"))
        results = [_result(name, timed[name], sampled[name]) for name in VARIANTS]
        ours, keras = results[0], results[VARIANTS.index(BACKUP)]
        ratio = estimate_ratio(ours["repeats_s"], keras["repeats_s"])
        first = timed[OURS][0][0]
        plain = [seconds for jobs in timed.values() for seconds in _plain_writes_s(jobs)]
        step_s = _median(max(rank.step_s for rank in ranks) for ranks in timed[OURS])
        return {
            "directory": str(Path(self.job.directory).absolute()),
            "num_ranks": self.num_ranks,
            "threads": first.threads,
            "device": first.device,
            "batch_size": first.batch_size,
            "num_rounds": self.num_rounds,
            "state_bytes": first.state_bytes,
            "num_arrays": first.num_arrays,
            "step_s": step_s,
            "steps_per_epoch": first.steps_per_epoch,
            "results": results,
            "plain_write": summarize(plain)
            | {"bytes_per_s": first.state_bytes / statistics.median(plain)},
            "wait_ratio": {
                "value": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
                "confidence": ratio.confidence,
            },
            "restart": _restart(timed[OURS]),
            "advice": _advice(ours, _restart(timed[OURS])["total_s"], self.mtbf_s, step_s, first),
        }


def _plain_writes_s(jobs: list[list[CheckpointOutcome]]) -> list[float]:
    """Returns the time of the plain write before each save, without the first of each job."""
    return [save.plain_s for ranks in jobs for save in ranks[0].saves[1:]]


def _result(
    variant: str, jobs: list[list[CheckpointOutcome]], sampled: list[CheckpointOutcome]
) -> dict[str, Any]:
    """Returns what was measured of a variant; a save takes as long as on its slowest rank."""
    first = jobs[0][0]

    def slowest(of: Callable[[CheckpointOutcome], Sequence[float]]) -> list[list[float]]:
        """Returns a value of each save, by job."""
        return [list(map(max, zip(*map(of, ranks), strict=True))) for ranks in jobs]

    def counted(values: Iterable[list[float]]) -> list[float]:
        return [value for of_job in values for value in of_job[1:]]

    waits_s = slowest(lambda rank: [save.wait_s for save in rank.saves])
    safe_s = counted(slowest(lambda rank: [save.safe_s for save in rank.saves]))
    plain_s = _plain_writes_s(jobs)
    relative = [plain / safe for plain, safe in zip(plain_s, safe_s, strict=True)]
    interval = median_interval(relative)
    slowdown = [
        statistics.fmean(save.beside_s) / rank.step_s
        for ranks in jobs
        for rank in ranks
        for save in rank.saves[1:]
        if save.beside_s
    ]
    growth = _growth_bytes(sampled)
    return {
        "variant": variant,
        **summarize(counted(waits_s)),
        "first_s": [of_job[0] for of_job in waits_s],
        "safe": summarize(safe_s),
        "bytes_per_s": first.state_bytes / statistics.median(safe_s),
        "file_bytes": first.file_bytes,
        "plain_write_s": plain_s,
        "relative_rate": statistics.median(relative),
        "ci95_relative_rate": list(interval) if interval else None,
        "range_relative_rate": [min(relative), max(relative)],
        "delay": summarize(counted(slowest(lambda rank: rank.delays_s))),
        "num_steps_beside": sum(
            len(save.beside_s) for ranks in jobs for save in ranks[0].saves[1:]
        ),
        "step_slowdown": statistics.median(slowdown) if slowdown else None,
        "peak_bytes": growth,
        "peak_copies": None if growth is None else growth / first.state_bytes,
    }


def _growth_bytes(ranks: Sequence[CheckpointOutcome]) -> int | None:
    """Returns by how much saving raises the node's peak of memory; None if it was not sampled."""
    if not all(rank.memory and rank.training_memory for rank in ranks):
        return None
    before = peak_of_sum_bytes([rank.training_memory for rank in ranks])
    return max(0, peak_of_sum_bytes([rank.memory for rank in ranks]) - before)


def _restart(jobs: list[list[CheckpointOutcome]]) -> dict[str, float]:
    """Returns the time from the start of the processes until training can go on, in s."""
    prepare_s = _median(max(rank.prepare_s for rank in ranks) for ranks in jobs)
    restore_s = _median(max(rank.restore_s or 0.0 for rank in ranks) for ranks in jobs)
    return {"prepare_s": prepare_s, "restore_s": restore_s, "total_s": prepare_s + restore_s}


def _advice(
    ours: dict[str, Any],
    restart_s: float,
    mtbf_s: float,
    step_s: float,
    outcome: CheckpointOutcome,
) -> dict[str, Any]:
    """Returns the advised intervals for the measured cost of a checkpoint."""
    # Noise of the steps beside may make the delay shorter than the wait, which is a part of it.
    cost_s = max(ours["delay"]["median_s"], ours["median_s"])
    found = {
        "Young": young_interval_s(cost_s, mtbf_s),
        "Daly": daly_interval_s(cost_s, mtbf_s),
    }
    return {
        "mtbf_s": mtbf_s,
        "cost_s": cost_s,
        "restart_s": restart_s,
        "intervals": [
            {
                "formula": name,
                "interval_s": interval_s,
                "steps": interval_s / step_s,
                "epochs": interval_s / step_s / outcome.steps_per_epoch,
                "expected_extra": _finite(
                    expected_ratio(interval_s, cost_s, mtbf_s, restart_s) - 1
                ),
            }
            for name, interval_s in found.items()
        ],
    }


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _finite(value: float) -> float | None:
    """Returns a number that JSON can hold; None for infinity."""
    return value if math.isfinite(value) else None
