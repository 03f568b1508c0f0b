"""How large a run's record is at many ranks, and how long writing, reading and reporting it take.

The runs are synthetic: every rank's times are random, and go through the same code as those of a
run. Nothing is trained.
"""

from __future__ import annotations

import sys
import tempfile
import timeit
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.benchmark import find_benchmark
from candle_p1.instrument.collectives import CommunicationLog, summarize_communication
from candle_p1.instrument.efficiency import efficiencies
from candle_p1.instrument.epochs import Epoch, summarize_epoch
from candle_p1.instrument.phases import Phase, summarize_phases
from candle_p1.instrument.power.account import DeviceEnergy, NodeEnergy, combine
from candle_p1.instrument.usage import Usage
from candle_p1.records import environment
from candle_p1.records.per_rank import PER_RANK_NAME, read_per_rank
from candle_p1.records.power_trace import Channel, Energy
from candle_p1.records.record import (
    RECORD_NAME,
    make_record,
    read_record,
    utc_now,
    write_record,
)
from candle_p1.records.spread import Bytes, Seconds
from candle_p1.records.types import SCHEMA_VERSION
from candle_p1.reports.report import make_report
from candle_p1.reports.runs import read_runs
from candle_p1.reports.statistics import summarize
from candle_p1.reports.writing import write_report
from candle_p1.scaling import ScalingPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from candle_p1.records.types import RunRecord

BENCHMARK = "nt3"
RANKS_PER_NODE = 6
STEPS_PER_EPOCH = 56
NUM_REPEATS = 5
PHASES_S = {
    ("startup",): 20.0,
    ("load",): 60.0,
    ("load", "read"): 20.0,
    ("load", "parse"): 30.0,
    ("digest",): 1.0,
    ("preprocess",): 2.0,
    ("build",): 3.0,
    ("broadcast",): 8.0,
    ("broadcast", "wait"): 6.0,
    ("broadcast", "transfer"): 2.0,
    ("train",): 90.0,
    ("evaluate",): 3.0,
    ("report",): 1.0,
}
"""The phases of a run and roughly what each takes, in s."""
USUAL_S = sum(seconds for path, seconds in PHASES_S.items() if len(path) == 1)
LOADERS = ("original", "parallel")
FILES = (RECORD_NAME, PER_RANK_NAME)
MIB = 2**20


@dataclass(frozen=True)
class RecordMeasurement:
    """What is measured.

    Attributes:
        num_ranks: Ranks of every synthetic run.
        num_epochs: Epochs of each.
        num_records: Records that one report is made of.
    """

    num_ranks: int = 3072
    num_epochs: int = 8
    num_records: int = 20

    def measure(self) -> dict[str, Any]:
        """Returns what ``--json`` writes; all files are in a temporary directory."""
        records = [
            synthetic_record(self.num_ranks, self.num_epochs, seed, LOADERS[seed % len(LOADERS)])
            for seed in range(self.num_records)
        ]
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            for i, record in enumerate(records):
                (directory / f"run{i}").mkdir()
                write_record(directory / f"run{i}" / RECORD_NAME, record)
            path = directory / "run0" / RECORD_NAME
            timed: dict[str, Callable[[], object]] = {
                "write": lambda: write_record(path, records[0]),
                "read": lambda: read_record(path),
                "read raw values": lambda: read_per_rank(path, records[0]),
                "report": lambda: write_report(
                    make_report(read_runs([directory])), directory / "report"
                ),
            }
            results = []
            for what, work in timed.items():
                repeat = 1 if what == "report" else NUM_REPEATS
                seconds = timeit.repeat(work, "gc.enable()", number=1, repeat=repeat)
                results.append({"variant": what, **summarize(seconds)})
            files = {name: (path.with_name(name)).stat().st_size for name in FILES}
        return {
            "synthetic": True,
            "command": sys.argv,
            "started": utc_now(),
            "num_ranks": self.num_ranks,
            "num_epochs": self.num_epochs,
            "num_records": self.num_records,
            "file_bytes": files,
            "results": results,
            "machine": environment.capture(),
        }


def lines(results: Mapping[str, Any]) -> Iterator[str]:
    """Yields the results of a measurement as text.

    Args:
        results: What `RecordMeasurement.measure` returned.
    """
    yield (
        f"synthetic records of {results['num_ranks']:,} ranks and {results['num_epochs']} epochs,"
        f" with {RANKS_PER_NODE} GPUs on each node"
    )
    for name, file_bytes in results["file_bytes"].items():
        yield f"{name}: {file_bytes / MIB:.2f} MiB"
    what = {
        "write": "writing both files, synced to disk",
        "read": "reading and validating the record",
        "read raw values": "reading the raw values of all ranks",
        "report": f"a report on {results['num_records']} of them",
    }
    for result in results["results"]:
        yield f"{what[result['variant']]}: {result['median_s']:.2f} s"


def synthetic_record(num_ranks: int, num_epochs: int, seed: int, loader: str) -> RunRecord:
    """Returns the record of a run that never took place, with random times of every rank.

    Args:
        num_ranks: Its ranks, six on a node, each with a GPU.
        num_epochs: Its epochs on each rank.
        seed: The seed of the random times, and of the run.
        loader: Its loader.
    """
    rng = np.random.default_rng(seed)
    num_nodes = -(-num_ranks // RANKS_PER_NODE)
    plan = ScalingPlan.make(
        num_ranks=num_ranks,
        epochs=num_epochs,
        batch_size=20,
        learning_rate=0.001,
        num_samples=20 * STEPS_PER_EPOCH,
        epochs_scaling="weak",
        batch_scaling="none",
        lr_scaling="linear",
    )
    benchmark = find_benchmark(BENCHMARK)
    flags = {"epochs": num_epochs, "loader": loader, "rng_seed": seed, "epochs_scaling": "weak"}
    argv = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    parameters = benchmark.declaration.parse(argv, benchmark.model_file)
    phases = [synthetic_phases(rng) for _ in range(num_ranks)]
    total_s = max(
        sum(each.seconds for path, each in rank.items() if len(path) == 1) for rank in phases
    )
    return make_record(
        {
            "schema_version": SCHEMA_VERSION,
            "status": "ok",
            "benchmark": BENCHMARK,
            "started": utc_now(),
            "ended": utc_now(),
            "num_ranks": num_ranks,
            "num_nodes": num_nodes,
            "launcher": "jsrun",
            "parameters": {
                name: {"value": value, "origin": str(parameters.origin(name))}
                for name, value in parameters.items()
            },
            "ranks": [_rank(rank) for rank in range(num_ranks)],
            "data": {
                "synthetic": True,
                "loader": loader,
                "files": {
                    "train": {
                        "path": "nt_train2.csv",
                        "file_bytes": 597 * MIB,
                        "load": Seconds.over(rng.uniform(40, 60, num_ranks).tolist()),
                    }
                },
            },
            "plan": plan.to_dict(),
            "model": {"num_parameters": 154_922_000, "optimizer": "sgd"},
            "distributed": {"backend": "horovod", "settings": {}},
            "phases": summarize_phases(phases),
            "peak_rss": Bytes.over(rng.integers(2**31, 2**33, num_ranks).tolist()),
            "total_s": total_s,
            "training": {
                "epochs": [_epoch(i, num_ranks, rng) for i in range(num_epochs)],
                "samples_per_s": 1000.0,
            },
            "communication": summarize_communication(
                [synthetic_communication(rng) for _ in range(num_ranks)], logged=True
            ),
            "efficiency": efficiencies(
                (rng.uniform(0.7, 0.8, num_ranks) * total_s).tolist(), total_s
            ),
            "quality": {"accuracy": {"value": 0.98, "naive": 0.5}},
            "energy": combine([_energy(node, total_s, rng) for node in range(num_nodes)]),
            "environment": environment.capture(),
            "warnings": [],
        }
    )


def _rank(rank: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "host": f"h{rank // RANKS_PER_NODE:04d}",
        "node": rank // RANKS_PER_NODE,
        "local_rank": rank % RANKS_PER_NODE,
        "num_cores": 7,
        "threads": 7,
        "device": "Tesla V100-SXM2-16GB",
    }


def synthetic_phases(
    rng: np.random.Generator, begin_s: float = 0.0, total_s: float = USUAL_S
) -> dict[tuple[str, ...], Phase]:
    """Returns the phases of a rank, with random times.

    Args:
        rng: Draws them.
        begin_s: When the first one began.
        total_s: About how long all of them took.
    """
    phases = {}
    for path, usual_s in PHASES_S.items():
        seconds = usual_s * rng.uniform(0.9, 1.1) * total_s / USUAL_S
        usage = Usage(*rng.integers(0, 10**6, 6).tolist()) if len(path) == 1 else None
        phases[path] = Phase(begin_s, seconds, 0.1 * seconds, usage, 2**31, 2**31)
        begin_s += seconds if len(path) == 1 else 0.0
    return phases


def _epoch(i: int, num_ranks: int, rng: np.random.Generator) -> Any:
    steps_s = rng.uniform(0.18, 0.2, (num_ranks, STEPS_PER_EPOCH))
    first = 0 if i == 0 else None
    validations_s = rng.uniform(0.5, 1, num_ranks).tolist()
    of_ranks = [
        Epoch(100.0 + 11 * i, float(steps.sum()), steps.tolist(), 1.0, 4.0, first).summarize(each)
        for steps, each in zip(steps_s, validations_s, strict=True)
    ]
    metrics = {"loss": 0.5, "accuracy": 0.9, "val_loss": 0.5, "val_accuracy": 0.9}
    return summarize_epoch(i + 1, of_ranks, metrics)


def synthetic_communication(rng: np.random.Generator) -> CommunicationLog:
    """Returns the log of a rank that has averaged the gradients of 16 arrays."""
    log = CommunicationLog()
    for i in range(16):
        log.add("horovod", f"allreduce gradient {i}", 4 << i, rng.uniform(1, 2), STEPS_PER_EPOCH)
    for name in ("allgather", "barrier", "broadcast", "gather"):
        log.add("mpi", name, 1000, rng.uniform(0, 1), 10)
    return log


def _energy(node: int, total_s: float, rng: np.random.Generator) -> NodeEnergy:
    def energy(seconds: float) -> Energy:
        return Energy("simulated", seconds, seconds * rng.uniform(150, 250), 100)

    devices = [
        DeviceEnergy(
            Channel(f"gpu:{node}-{i}", "Tesla V100-SXM2-16GB", "gpu", "nvml", "energy"),
            energy(total_s),
            {path[0]: energy(seconds) for path, seconds in PHASES_S.items() if len(path) == 1},
        )
        for i in range(RANKS_PER_NODE)
    ]
    return NodeEnergy(
        node, f"h{node:04d}", f"boot-{node}", devices, 10.0, trace=f"power-{node:04d}.csv"
    )
