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
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rich.table import Table

from candle_p1.bench import harness
from candle_p1.bench.checkpoint_task import BACKUP, OURS, SAVES_PER_JOB, VARIANTS, CheckpointTask
from candle_p1.bench.harness import MB, MEMORY, Job, Measured, Result, megabytes, option
from candle_p1.bench.harness import format_significant as number
from candle_p1.bench.node_state import peak_of_sum_bytes
from candle_p1.bench.task import Outcome
from candle_p1.reports.statistics import estimate_ratio, summarize
from candle_p1.text import count

if TYPE_CHECKING:
    import pandas as pd

HOUR_S = 3600.0


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
            for variant in VARIANTS
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
        step_s = statistics.median(max(map(_step_s, ranks)) for ranks in ours)
        restart = {
            name: statistics.median(max(rank[name] or 0.0 for rank in ranks) for ranks in ours)
            for name in ("prepare_s", "restore_s")
        }
        restart["total_s"] = sum(restart.values())
        names = ("threads", "device", "batch_size", "state_bytes", "num_arrays", "steps_per_epoch")
        rate = first["state_bytes"] / statistics.median(plain_s)
        return {
            **{name: first[name] for name in names},
            "directory": str(Path(self.directory).absolute()),
            "num_ranks": self.num_ranks,
            "num_rounds": self.num_rounds,
            "step_s": step_s,
            "results": results,
            "plain_write": {**summarize(plain_s), "bytes_per_s": rate},
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
            steps, epoch_steps = interval_s / step_s, first["steps_per_epoch"]
            extra = expected_ratio(interval_s, cost_s, mtbf_s, restart_s) - 1
            intervals.append(
                {
                    "formula": name,
                    "interval_s": interval_s,
                    "steps": steps,
                    "epochs": steps / epoch_steps,
                    "expected_extra": extra if math.isfinite(extra) else None,
                }
            )
        costs = {"mtbf_s": mtbf_s, "cost_s": cost_s, "restart_s": restart_s}
        return {**costs, "intervals": intervals}

    def result(self, variant: str, measured: Measured) -> Result:
        jobs, sampled = measured.of(variant), measured.of(variant, MEMORY)[0]
        saves, state_bytes = _saves(jobs), jobs[0][0]["state_bytes"]
        later, firsts = saves[saves["save"] > 0], saves[saves["save"] == 0]
        slowest = later.groupby(["job", "save"])[["wait_s", "safe_s", "delay_s"]].max()
        on_first = later[later["rank"] == 0]
        relative = (on_first["plain_s"].to_numpy() / slowest["safe_s"].to_numpy()).tolist()
        slowdown = later["slowdown"].dropna()
        during, before = (
            peak_of_sum_bytes([rank[name] for rank in sampled])
            for name in ("memory", "training_memory")
        )
        growth = None if during is None or before is None else max(0, during - before)
        return {
            "variant": variant,
            **summarize(slowest["wait_s"].tolist()),
            "first_s": firsts.groupby("job")["wait_s"].max().tolist(),
            "safe": summarize(slowest["safe_s"].tolist()),
            "bytes_per_s": state_bytes / float(slowest["safe_s"].median()),
            "file_bytes": jobs[0][0]["file_bytes"],
            "plain_write_s": on_first["plain_s"].tolist(),
            "relative_rate": statistics.median(relative),
            **harness.spread_of(relative, "relative_rate"),
            "delay": summarize(slowest["delay_s"].tolist()),
            "num_steps_beside": int(on_first["num_beside"].sum()),
            "step_slowdown": float(slowdown.median()) if len(slowdown) else None,
            "peak_bytes": growth,
            "peak_copies": None if growth is None else growth / state_bytes,
        }

    def render(self, report: Mapping[str, Any]) -> Iterator[str | Table]:
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
    return statistics.fmean(seconds for save in rank["saves"] for seconds in save["alone_s"])


def _saves(jobs: Sequence[Sequence[Outcome]]) -> pd.DataFrame:
    """Returns a row for each save of each rank, whose delay is its wait and what steps lost."""
    import pandas as pd

    rows = []
    for job, ranks in enumerate(jobs):
        for rank, outcome in enumerate(ranks):
            step_s = _step_s(outcome)
            for index, save in enumerate(outcome["saves"]):
                beside_s, num_beside = sum(save["beside_s"]), len(save["beside_s"])
                facts = {
                    "delay_s": save["wait_s"] + beside_s - num_beside * step_s,
                    "slowdown": beside_s / num_beside / step_s if num_beside else None,
                    "num_beside": num_beside,
                }
                rows.append({**save, **facts, "job": job, "rank": rank, "save": index})
    return pd.DataFrame(rows)
