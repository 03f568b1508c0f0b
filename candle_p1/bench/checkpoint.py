"""Compares ways to save the state of a training: how long it waits, until when the data are safe.

Every job trains, saves several times and goes on training beside what is still being written.
Before each timed save, one process writes and syncs as many bytes, which is the rate of the disk
at that time: disks of virtual machines change theirs within minutes.

Intervals between checkpoints are those of J. W. Young, "A first order approximation to the optimum
checkpoint interval", Communications of the ACM 17(9), 1974, and J. T. Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems
22(3), 2006, for failures at random with a constant mean time between them.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, ClassVar

import numpy as np
import psutil

from candle_p1.bench import harness
from candle_p1.bench.harness import MB, MEMORY, Job, Measured, Result, megabytes, number, option
from candle_p1.bench.node_state import MemorySampler, peak_of_sum_bytes
from candle_p1.bench.task import BenchmarkTask, Outcome
from candle_p1.bench.training import MAX_EPOCHS, Course, prepare_training, step_callback
from candle_p1.checkpoints.checkpoint import CheckpointRoot
from candle_p1.checkpoints.writer import CheckpointWriter
from candle_p1.distributed.comm import Communicator, on_first_rank
from candle_p1.errors import CandleError, SetupError
from candle_p1.records.types import Position
from candle_p1.reports.statistics import estimate_ratio, summarize
from candle_p1.text import count

HOUR_S = 3600.0
WARM_UP_STEPS = 3
ALONE_STEPS = 6  # that are timed before each save
SAVES_PER_JOB = 2  # that are timed, after a first one
SAMPLED_S = 2.0  # how long memory is sampled before the first save
BLOCK_BYTES = 1 << 26  # of a write of the plain file
ROOM = 3  # copies of the state: of two saves and the plain file


def young_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Returns Young's interval for a checkpoint of C and a failure every M, in s: sqrt(2 C M)."""
    return math.sqrt(2) * math.sqrt(cost_s) * math.sqrt(mtbf_s)


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Returns Daly's interval of higher order, in s (equation 37).

    sqrt(2 C M) (1 + sqrt(C / 2 M) / 3 + (C / 2 M) / 9) - C for C < 2 M, else M.
    """
    share = cost_s / 2 / mtbf_s
    if share >= 1:
        return mtbf_s
    return young_interval_s(cost_s, mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


def expected_ratio(interval_s: float, cost_s: float, mtbf_s: float, restart_s: float) -> float:
    """Returns the expected time of a long run relative to one without failures and checkpoints.

    M / T exp(R / M) (exp((T + C) / M) - 1) for the interval T and restarts of R (Daly, equation
    20); infinity if too large for a float.
    """
    try:
        growth = math.expm1((interval_s + cost_s) / mtbf_s)
        return mtbf_s / interval_s * math.exp(restart_s / mtbf_s) * growth
    except OverflowError:
        return math.inf


def _backup(model: Any, directory: Path) -> Callable[[int], Any]:
    import keras

    callback = keras.callbacks.BackupAndRestore(directory, delete_checkpoint=False)
    callback.set_model(model)
    save: Callable[[int], Any] = callback.on_epoch_end
    return save


OURS, WAITING, BACKUP = "candle_p1", "candle_p1, waiting", "BackupAndRestore"
KERAS: dict[str, Callable[[Any, Path], Callable[[int], Any]]] = {
    BACKUP: _backup,
    "model.save": lambda model, directory: lambda _: model.save(directory / "model.keras"),
}
"""Keras's ways to save: what makes a function of the save's number. They overwrite the last one."""


@dataclass(frozen=True, kw_only=True)
class CheckpointTask(BenchmarkTask):
    """Saves the state of a training several times, in one of the variants."""

    variant: str = OURS
    directory: str = "."
    samples_memory: bool = False

    def measure(self, comm: Communicator) -> Outcome:
        import keras

        from candle_p1.models.fast.batches import for_fit
        from candle_p1.training.state import replicated_arrays, restore_replicated

        training = prepare_training(self, comm)
        model = training.model
        prepare_s = time.time() - psutil.Process().create_time()
        arrays = replicated_arrays(model)
        state_bytes = sum(array.nbytes for array in arrays.values())
        target, writer, restore_s = Path(self.directory, "saved"), None, None
        on_first_rank(comm, make_room, target, ROOM * state_bytes)
        if self.variant in KERAS:
            save = KERAS[self.variant](model, target)
        else:
            # Only the newest checkpoint is kept.
            writer = CheckpointWriter(
                comm, target, keep=lambda numbers: set(), required=True, say=_raise
            )
            if not self.samples_memory:  # it would count as training's own
                writer.prepare(arrays)

            def save(number: int) -> None:
                position, is_waited_for = Position(number, 0), self.variant == WAITING
                writer.save(position, replicated_arrays(model), {}, {}, wait=is_waited_for)

        found: Outcome = {"saves": [], "training_memory": [], "memory": []}
        course = partial(self._course, comm, save, writer, state_bytes, found)
        callbacks = [step_callback(course, keras.callbacks.Callback)]
        batches = for_fit(training.batches())
        model.fit(batches, epochs=MAX_EPOCHS, shuffle=False, verbose=0, callbacks=callbacks)
        if writer:
            for times, written in zip(found["saves"], writer.close().saves, strict=True):
                times["safe_s"] = written.written_s
            start = time.perf_counter()
            checkpoint = CheckpointRoot(target).newest_good(_raise)
            assert checkpoint is not None
            restore_replicated(model, checkpoint.read, checkpoint.arrays)
            restore_s = time.perf_counter() - start
        return {
            **training.facts,
            **found,
            "state_bytes": state_bytes,
            "num_arrays": len(arrays),
            "file_bytes": sum(p.stat().st_size for p in target.rglob("*") if p.is_file()),
            "prepare_s": prepare_s,
            "restore_s": restore_s,
        }

    def _course(
        self,
        comm: Communicator,
        save: Callable[[int], Any],
        writer: CheckpointWriter | None,
        state_bytes: int,
        found: Outcome,
        callback: Any,
    ) -> Course:
        """Trains and saves; adds the times of each save, and memory, to what is found.

        Training waits for ``wait_s``, and the data are on the disk after ``safe_s``; one process
        has written as many bytes in ``plain_s`` just before, 0 on other ranks than 0. Steps take
        ``alone_s`` before a save, and ``beside_s`` while it is being written: compare their means,
        not medians, because those at the end of an epoch take longer.
        """
        for _ in range(WARM_UP_STEPS):
            yield
        sampler = MemorySampler() if self.samples_memory else None
        begin_s, first_save_s = time.monotonic(), 0.0
        while sampler and comm.broadcast(time.monotonic() - begin_s < SAMPLED_S):
            yield
        for index in range(1 + SAVES_PER_JOB):
            alone_s, beside_s, plain_s = [0.0] * ALONE_STEPS, [], 0.0
            for i in range(ALONE_STEPS):
                alone_s[i], _ = yield
            if comm.rank == 0 and sampler is None:
                plain_s = plain_write_s(Path(self.directory, "plain"), state_bytes)
            comm.barrier()
            first_save_s = first_save_s or time.monotonic()
            start = time.perf_counter()
            if writer or comm.rank == 0:
                save(index)
            comm.barrier()
            wait_s = time.perf_counter() - start
            while writer and comm.broadcast(writer.writing):
                seconds, _ = yield
                beside_s.append(seconds)
            if comm.rank == 0 and not writer:  # Keras syncs nothing
                sync_tree(Path(self.directory, "saved"))
            times = {"wait_s": wait_s, "safe_s": time.perf_counter() - start, "plain_s": plain_s}
            found["saves"].append(times | {"alone_s": alone_s, "beside_s": beside_s})
        for time_s, num_bytes in sampler.stop() if sampler else ():
            name = "training_memory" if time_s < first_save_s else "memory"
            found[name].append((time_s, num_bytes))


def _raise(message: str) -> None:
    raise CandleError(message)


def make_room(directory: Path, num_bytes: int) -> None:
    """Makes a directory; raises SetupError if its file system has fewer free bytes."""
    free = psutil.disk_usage(str(directory.parent)).free
    if free < num_bytes:
        raise SetupError(
            f"{directory.parent}: there are {free / 1e9:.1f} GB free, but saving needs"
            f" {num_bytes / 1e9:.1f} GB: choose another --directory"
        )
    directory.mkdir()


def sync_tree(directory: Path) -> None:
    """Waits until the files of a directory, and the directory itself, are on the disk."""
    for path in [*directory.rglob("*"), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def plain_write_s(path: Path, num_bytes: int) -> float:
    """Returns how long this process writes and syncs random bytes, whose file is removed again."""
    block = np.random.default_rng(0).bytes(min(BLOCK_BYTES, num_bytes))
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for begin in range(0, num_bytes, len(block)):
            file.write(block[: num_bytes - begin])
        os.fsync(file.fileno())
    sync_tree(path.parent)
    elapsed_s = time.perf_counter() - start
    path.unlink()
    return elapsed_s


@dataclass(kw_only=True)
class Checkpoint(harness.BenchmarkComparison):
    """Measure what a checkpoint of BENCHMARK's training costs, beside Keras's ways to save it.

    Compares a run's checkpoints, the same with training waiting for the disk, and Keras's
    BackupAndRestore and model.save. Shows how long training waits, when the data are safe on the
    disk, how fast they are written compared with a plain synced write of the same size, how much
    memory is used, and how much steps slow down meanwhile; then the intervals that Young and Daly
    recommend.
    """

    examples: ClassVar[Sequence[str]] = (
        "candle-p1 bench checkpoint p1b1 --size full --mtbf 24",
        "candle-p1 bench checkpoint nt3 --np 2 --directory . --json checkpoint.json",
    )

    num_rounds: int = harness.rounds_option(
        3, "Jobs of each variant, of two timed saves each", of=" saves"
    )
    mtbf_hours: float = option(
        24.0,
        "Mean time between failures of your job on all its nodes, from which intervals follow.",
        "--mtbf",
        metavar="HOURS",
        within=(1e-6, 1e6),
    )
    directory: str = option(
        ".",
        "Directory whose disk is measured; saves go into temporary directories in it.",
        is_directory=True,
    )

    def jobs(self) -> list[Job]:
        timed = [
            self.job(variant, CheckpointTask, variant=variant, directory=self.directory)
            for variant in (OURS, WAITING, *KERAS)
        ]
        return [*harness.sampled(timed), *harness.rounds(timed, self.num_rounds)]

    def run(self, job: Job) -> list[Outcome]:
        prefix, parent = ".candle-p1-bench-", self.directory
        with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as directory:
            return super().run(job.changed(directory=directory))

    def report(self, measured: Measured) -> dict[str, Any]:
        results, ours = super().report(measured)["results"], measured.of(OURS)
        first, plain_s = ours[0][0], [s for result in results for s in result["plain_write_s"]]
        waits = {result["variant"]: result["repeats_s"] for result in results}
        ratio = estimate_ratio(waits[OURS], waits[BACKUP])
        step_s = median(max(map(_step_s, ranks)) for ranks in ours)
        restart = {
            name: median(max(rank[name] or 0.0 for rank in ranks) for ranks in ours)
            for name in ("prepare_s", "restore_s")
        }
        restart["total_s"] = sum(restart.values())
        names = ("threads", "device", "batch_size", "state_bytes", "num_arrays", "steps_per_epoch")
        return {
            **{name: first[name] for name in names},
            "directory": str(Path(self.directory).absolute()),
            "num_ranks": self.num_ranks,
            "num_rounds": self.num_rounds,
            "step_s": step_s,
            "results": results,
            "plain_write": {
                **summarize(plain_s),
                "bytes_per_s": first["state_bytes"] / median(plain_s),
            },
            "wait_ratio": {
                name: getattr(ratio, name) for name in ("value", "low", "high", "confidence")
            },
            "restart": restart,
            "advice": self._advice(results[0], restart["total_s"], step_s, first),
        }

    def _advice(
        self, ours: Result, restart_s: float, step_s: float, first: Outcome
    ) -> dict[str, Any]:
        # Noise of the steps beside may make the delay shorter than the wait, which is a part of it.
        cost_s = max(ours["delay"]["median_s"], ours["median_s"])
        mtbf_s, intervals = self.mtbf_hours * HOUR_S, []
        for name, formula in (("Young", young_interval_s), ("Daly", daly_interval_s)):
            interval_s = formula(cost_s, mtbf_s)
            steps, extra = (
                interval_s / step_s,
                expected_ratio(interval_s, cost_s, mtbf_s, restart_s) - 1,
            )
            intervals.append(
                {
                    "formula": name,
                    "interval_s": interval_s,
                    "steps": steps,
                    "epochs": steps / first["steps_per_epoch"],
                    "expected_extra": extra if math.isfinite(extra) else None,
                }
            )
        costs = {"mtbf_s": mtbf_s, "cost_s": cost_s, "restart_s": restart_s}
        return {**costs, "intervals": intervals}

    def result(self, variant: str, measured: Measured) -> Result:
        jobs, sampled = measured.of(variant), measured.of(variant, MEMORY)[0]
        state_bytes = jobs[0][0]["state_bytes"]
        saves = [list(zip(*map(_saves, ranks), strict=True)) for ranks in jobs]
        later = [save for job in saves for save in job[1:]]
        wait_s, safe_s, delay_s = (
            [max(rank[name] for rank in save) for save in later]
            for name in ("wait_s", "safe_s", "delay_s")
        )
        plain_s = [save[0]["plain_s"] for save in later]
        relative = [plain / safe for plain, safe in zip(plain_s, safe_s, strict=True)]
        slowdown = [rank["slowdown"] for save in later for rank in save if rank["beside_s"]]
        during, before = (
            peak_of_sum_bytes([rank[name] for rank in sampled])
            for name in ("memory", "training_memory")
        )
        growth = None if during is None or before is None else max(0, during - before)
        return {
            "variant": variant,
            **summarize(wait_s),
            "first_s": [max(rank["wait_s"] for rank in job[0]) for job in saves],
            "safe": summarize(safe_s),
            "bytes_per_s": state_bytes / median(safe_s),
            "file_bytes": jobs[0][0]["file_bytes"],
            "plain_write_s": plain_s,
            "relative_rate": median(relative),
            **harness.spread_of(relative, "relative_rate"),
            "delay": summarize(delay_s),
            "num_steps_beside": sum(len(save[0]["beside_s"]) for save in later),
            "step_slowdown": median(slowdown) if slowdown else None,
            "peak_bytes": growth,
            "peak_copies": None if growth is None else growth / state_bytes,
        }

    def render(self, report: harness.Report) -> harness.Parts:
        results, plain, ratio = report["results"], report["plain_write"], report["wait_ratio"]
        yield (
            f"{report['benchmark']}: {megabytes(report['state_bytes'])} MB of state in"
            f" {count(report['num_arrays'], 'array')}, {count(report['num_ranks'], 'rank')} x"
            f" {count(report['threads'], 'thread')} on {report['device']},"
            f" {count(report['num_rounds'], 'round')} of {count(SAVES_PER_JOB, 'save')};"
            f" a step takes {harness.ms(report['step_s'])} ms"
        )
        waits: harness.Columns = {
            "variant": "variant",
            "training\nwaits (s)": "median_s",
            "{spread}\n(s)": harness.interval,
            "data are safe\nafter (s)": lambda r: r["safe"]["median_s"],
            "rate\n(MB/s)": ("bytes_per_s", MB),
            "relative to the\nplain write": "relative_rate",
            "{spread}": lambda r: harness.interval(r, "relative_rate"),
        }
        yield harness.table(results, waits)
        yield (
            f"plain synced write before each save: {number(plain['median_s'])} s"
            f" ({harness.spread(plain)} {harness.interval(plain)}),"
            f" {number(plain['bytes_per_s'] / MB)} MB/s in {report['directory']}"
        )
        yield (
            f"{OURS}: training waits {number(ratio['value'])} times as long as for {BACKUP}"
            f" ({ratio['confidence']:.0%} interval {number(ratio['low'])} to"
            f" {number(ratio['high'])}); the first save took {number(max(results[0]['first_s']))} s"
        )
        beside: harness.Columns = {
            "variant": "variant",
            "memory beyond\ntraining's (MB)": ("peak_bytes", MB),
            "in copies of\nthe state": lambda r: r["peak_bytes"] and f"{r['peak_copies']:.2f}",
            "steps while it\nis written": "num_steps_beside",
            "which take\n(times as long)": lambda r: r["step_slowdown"] or "",
            "training is\ndelayed (s)": lambda r: r["delay"]["median_s"],
        }
        yield harness.table(results, beside)
        advice, restart = report["advice"], report["restart"]
        yield (
            f"a checkpoint delays training by {number(advice['cost_s'])} s; a restart takes"
            f" {number(advice['restart_s'])} s: {number(restart['prepare_s'])} s to start, load and"
            f" build, {number(restart['restore_s'])} s to read the checkpoint"
        )
        yield f"for one failure in {number(advice['mtbf_s'] / HOUR_S)} hours on average:"
        advised: harness.Columns = {
            "advised interval": "formula",
            "(s)": "interval_s",
            "(steps)": "steps",
            "(epochs)": "epochs",
            "expected time\nadded by failures": lambda each: (
                "unlimited" if each["expected_extra"] is None else f"{each['expected_extra']:.2%}"
            ),
        }
        yield harness.table(advice["intervals"], advised)
        seconds = max(1, round(advice["intervals"][-1]["interval_s"]))
        yield f"in a run: --ckpt_every_s {seconds}"
        yield from harness.remarks(report, "save")


VERB = Checkpoint


def _step_s(rank: Outcome) -> float:
    """Returns the mean time of a step beside which nothing is written, in s."""
    return fmean(seconds for save in rank["saves"] for seconds in save["alone_s"])


def _saves(rank: Outcome) -> list[Outcome]:
    """Returns the saves of a rank, with the delay by each: its wait and what steps lost."""
    step_s, saves = _step_s(rank), []
    for save in rank["saves"]:
        beside_s = save["beside_s"]
        delay_s = save["wait_s"] + sum(beside_s) - len(beside_s) * step_s
        slowdown = fmean(beside_s) / step_s if beside_s else None
        saves.append({**save, "delay_s": delay_s, "slowdown": slowdown})
    return saves
