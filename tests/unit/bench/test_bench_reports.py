"""What the verbs of candle-p1 bench do, report and show, of planted outcomes of their jobs.

tests/files/bench_reports.txt has for each case the jobs in their order, the report without what
tells of the machine, and the lines and tables that show it.
"""

import json
import re
from dataclasses import fields
from itertools import count

import numpy as np
import pytest

from candle_p1.bench import formats, startup, step, transports
from candle_p1.bench.checkpoint import OURS, Checkpoint
from candle_p1.bench.comm import Comm
from candle_p1.bench.comm_task import GRADIENT_BYTES
from candle_p1.bench.load import Load
from candle_p1.bench.read import Read
from candle_p1.bench.startup import Startup
from candle_p1.bench.step import Step
from candle_p1.bench.task import OtherEnvironment
from candle_p1.bench.transports import ALLREDUCE, STREAM
from candle_p1.modelling.communication import measured_for
from candle_p1.records.tables import as_cells
from tests.conftest import ROOT
from tests.expected import check_expected

FILE = ROOT / "tests/files/bench_reports.txt"
OF_THE_MACHINE = ("command", "started", "machine", "published")

LOADED_S = {"original": 20.0, "chunked": 4.0, "parallel": 1.0, "npy": 0.5, "parallel-gz": 2.0}


def loads(task, num_ranks, number, scale=1.0, known=True):
    """The first rank is the slowest; each job takes a tenth longer, and converting is slow."""
    if task.converts:
        task.directory.mkdir(parents=True)
        (task.directory / "train").write_bytes(bytes(8))
    seconds = scale * LOADED_S[task.method] * (1 + 0.1 * number) * (100 if task.converts else 1)
    sampled = task.samples_memory and known
    return [
        {
            **{"elapsed_s": seconds / (1 + rank), "file_s": {"train": seconds / (2 + rank)}},
            **{"threads": 2, "matrix_bytes": 100, "checked": {"train.csv": "a"}},
            **{"bytes_read": 10 if known else None, "storage_bytes_read": 3 * rank},
            "memory": [(0.5 * rank, 0), (1.0 + rank, 200 - 100 * rank), (2.0, 0)] * sampled,
        }
        for rank in range(num_ranks)
    ]


def reads(task, num_ranks, number, are_shared=True):
    """Ranks read two blocks of 5 bytes, or the first rank reads both."""
    blocks = [[(0, 1, 5), (1, 2, 5)]] + [[]] * (num_ranks - 1)
    if num_ranks > 1 and are_shared:
        blocks = [[(0, 0.9, 5)], [(0.1, 1, 5)]]
    of = [np.array(each, float).reshape(-1, 3) for each in blocks]
    return [{"elapsed_s": 2.0 / num_ranks + 0.1 * number, "reads": {"train": each}} for each in of]


ALONE_S = [0.5, 0.7]
FIRST = {"wait_s": 9.0, "safe_s": 9.0, "plain_s": 1.0, "alone_s": ALONE_S, "beside_s": []}
SAVE = {"wait_s": 0.5, "safe_s": 2.0, "plain_s": 1.6, "alone_s": ALONE_S, "beside_s": [0.8, 0.9]}
SAVES = [FIRST, SAVE, SAVE | {"safe_s": 4.0}]
FAST = [FIRST, *[SAVE | {"beside_s": [0.1, 0.1]}] * 2]
WAITING = [FIRST, *(SAVE | {"wait_s": wait_s, "beside_s": []} for wait_s in (2.0, 4.0))]


def saves(task, num_ranks, number, ours=SAVES):
    """Ours adds a copy of the state to memory, and others two; the last rank starts last."""
    times, copies = (ours, 1) if task.variant == OURS else (WAITING, 2)
    outcome = {
        **{"state_bytes": 10**9, "num_arrays": 12, "file_bytes": 1_000_100_000, "saves": times},
        **{"restore_s": 1.5, "steps_per_epoch": 10, "batch_size": 100, "threads": 2},
        **{"device": "cpu", "training_memory": [], "memory": []},
    }
    if task.samples_memory:
        outcome["training_memory"] = [(0.0, 500), (1.0, 700)]
        outcome["memory"] = [(2.0, 600), (3.0, 700 + copies * 10**9 // num_ranks)]
    return [outcome | {"prepare_s": 20.0 + rank} for rank in range(num_ranks)]


BOUND = {
    **{"flops": 6e9, "used_flops": 3e9, "matmul_flops_per_s": 6e10, "gemm_s": 0.1},
    **{"optimizer_bytes": 2e8, "copy_bytes_per_s": 1e10, "optimizer_s": 0.02},
    **{"total_s": 0.12, "used_total_s": 0.07},
}
NEAR = {
    "losses": [0.7, 0.60003, 0.5],
    "updates": {"kernel": [0.1, -0.2, 0.20003], "bias": [0.0, 0.01]},
}
STEPS = {
    **{"steps_s": [0.2, 0.1, 0.3], "losses": [0.7, 0.6, 0.5]},
    "updates": {"kernel": [0.1, -0.2, 0.2], "bias": [0.0, 0.01]},
    "values": {"kernel": [3.0, 4.0, 0.0], "bias": [0.0, 0.02]},
    **{"batch_size": 20, "threads": 2, "device": "cpu", "backend": "tensorflow 2.18.1"},
    **{"has_fast_kernels": True, "flops": 6e9, "state_bytes": 5_000_000, "roofline": BOUND},
    **{"matrix_bytes": 7_000_000, "memory": [(0.0, 100), (1.0, 900)]},
}


def steps(task, num_ranks, number):
    """Plain steps take twice as long, averaging half as long again; the last rank is slowest."""
    factor = (2.0 if task.kernels == "plain" else 1.0) * (1 if num_ranks == 1 else 1.2)
    factor *= 1.5 if task.averages_gradients and num_ranks > 1 else 1
    near = NEAR if task.kernels == "plain" and not task.keras2 else {}
    return [
        STEPS | near | {"steps_s": [factor * s / (num_ranks - rank) for s in STEPS["steps_s"]]}
        for rank in range(num_ranks)
    ]


def on_jax(task, num_ranks, number):
    """Another environment, which is slower, and whose models begin with other random numbers."""
    there = {"backend": "jax 0.10.2", "has_fast_kernels": False, "losses": [9.0, 8.0, 7.0]}
    seconds = 0.6 + 0.3 * task.averages_gradients
    return [STEPS | there | {"steps_s": [seconds] * 3}] * num_ranks


def point(transport, operation, num_bytes, **facts):
    """What takes 10 us and a second for each GB."""
    mean_s = 1e-5 + num_bytes / 1e9
    return {
        **{"transport": transport, "operation": operation, "bytes": num_bytes},
        **{"min_s": 0.9 * mean_s, "mean_s": mean_s, "max_s": 1.2 * mean_s},
        **{"ci95_s": [0.98 * mean_s, 1.01 * mean_s], "stopped_by": "precision"},
        **{"algorithm_bytes_per_s": num_bytes / mean_s, "gradients_of": None},
        **{"bus_bytes_per_s": 1.5 * num_bytes / mean_s},
        **facts,
    }


def messages(task, num_ranks, number):
    (name,) = task.transports
    found = [point(name, ALLREDUCE, 4 << 4 * i) for i in range(6)]
    found[0]["stopped_by"], found[1]["ci95_s"] = "time", None
    found += [point(name, ALLREDUCE, n, gradients_of=of) for of, n in GRADIENT_BYTES.items()]
    found += [point(name, STREAM, 4 << 4 * i) for i in range(2)]
    overlap = {"communication_s": 1e-3, "computing_s": 1e-3, "together_s": 1.25e-3}
    overlap |= {"exposed_s": 0.25e-3, "hidden_share": 0.75}
    outcome = {
        **{"num_ranks": 4, "num_nodes": 2, "ranks_per_node": 2, "limit_bytes": 700_000_000},
        "settings": {name: {"library": f"the library of {name}", "cycle_time": "1"}},
        "points": found,
        "overlaps": [{"transport": name, "bytes": 1 << 20, **overlap}],
    }
    return [outcome] * num_ranks


def starts(task, num_ranks, number):
    """The first round's run is the fastest, and has no later step."""
    if isinstance(task, str):  # the framework of the baseline
        return [{"elapsed_s": 3.0, "parts_s": {"Python": 0.5, f"import {task}": 2.5}}]
    parts_s = {"load": 1.0, "other": 5.0 + number}
    later = {"step_s": 0.1 * number if number else None, "end_s": 0.5}
    return [{"elapsed_s": sum(parts_s.values()), "parts_s": parts_s, **later}]


JAX = OtherEnvironment("/opt/jax/bin/python", "jax")
KERAS2 = {"keras2": "/opt/keras2", "num_rounds": 1}
CASES = {
    "load, two ranks": (Load, loads, {"methods": "original,chunked,parallel", "num_ranks": 2}),
    "load, few and short": (
        Load,
        lambda *job: loads(*job, scale=1e-3, known=False),
        {"methods": "original,parallel", "num_repeats": 2},
    ),
    "load, converted": (
        Load,
        loads,
        {"methods": "original,parallel,npy,parallel-gz,parquet", "num_repeats": 1, "num_ranks": 2},
    ),
    "read": (Read, reads, {"num_ranks": (1, 2), "num_blocks": 8}),
    "read, one of many": (
        Read,
        lambda *job: reads(*job, are_shared=False),
        {"num_ranks": (1, 31), "num_repeats": 1},
    ),
    "checkpoint": (Checkpoint, saves, {"num_rounds": 3, "num_ranks": 2}),
    "checkpoint, noise and no hope": (
        Checkpoint,
        lambda *job: saves(*job, ours=FAST),
        {"num_rounds": 1, "mtbf_hours": 0.01 / 3600},
    ),
    "step": (Step, steps, {"num_steps": 3}),
    "step, other samples by weight": (
        Step,
        steps,
        {"benchmark": "p1b3", "num_rounds": 1, "by_weight": True},
    ),
    "step, Keras 2": (Step, steps, KERAS2),
    "step, Keras 2 without dropout": (Step, steps, {**KERAS2, "flags": ["--dropout", "0"]}),
    "step, ranks": (Step, steps, {"num_ranks": 2, "num_rounds": 1}),
    "step, another environment": (Step, steps, {"num_rounds": 1, "other": JAX}),
    "step, ranks there": (Step, steps, {"num_ranks": 2, "num_rounds": 1, "other": JAX}),
    "startup": (Startup, starts, {"num_ranks": 2, "num_rounds": 3}),
    "comm": (Comm, messages, {"transport": "mpi,horovod"}),
    "comm, another environment": (Comm, messages, {"transport": "mpi", "other": JAX}),
}


def rounded(text):
    return float(f"{float(text):.6g}")


def shown(part):
    if isinstance(part, str):
        return part
    headings, rows = as_cells(part)
    lines = [str(part.title or ""), *(" | ".join(each) for each in (headings, *rows))]
    return "\n".join(line.replace("\n", " ").rstrip() for line in lines)


def described(task):
    if isinstance(task, str):
        return task
    told = {each.name: getattr(task, each.name) for each in fields(task) if each.name != "points"}
    defaults = {each.name: each.default for each in fields(task)}
    return ", ".join(f"{k} {v}" for k, v in told.items() if v != defaults[k])


@pytest.mark.parametrize("name", CASES)
def test_what_was_measured_is_reported_and_shown(name, compare, monkeypatch, tmp_path):
    kind, measure, options = CASES[name]
    monkeypatch.setenv("CANDLE_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(step, "choose_backend", lambda *engine: "tensorflow")
    monkeypatch.setattr(formats, "find_spec", lambda name: name != "pyarrow")
    monkeypatch.setattr(transports, "find_spec", lambda name: name != "jax" or None)
    options = ({"num_ranks": 4} if kind is Comm else {"benchmark": "nt3"}) | options
    other = options.pop("other", None)
    if kind is Checkpoint:
        options["directory"] = str(tmp_path)
    ours, numbers, jobs = kind(**options), count(), []
    if other:
        ours.other, ours.compare_env = other, other.python

    def run(task, num_ranks, of=measure):
        jobs.append(f"job on {num_ranks}: {described(task)}")
        return of(task, num_ranks, next(numbers))

    def run_there(task, num_ranks):
        return run(task, num_ranks, on_jax if kind is Step else messages)

    monkeypatch.setattr(startup, "start_run", lambda *job: run(*job)[0])
    monkeypatch.setattr(startup, "start_baseline", lambda name, paths, num: run(name, num)[0])
    report = compare(ours, run, there=run_there)
    if kind is Comm:
        (tmp_path / "train.csv").write_text(json.dumps(report))
        found = measured_for(tmp_path / "train.csv", [])  # as models read it
        assert (found.latency_s, found.bandwidth_bytes_per_s) == pytest.approx((1e-5, 1e9))
    content = {key: value for key, value in report.items() if key not in OF_THE_MACHINE}
    content = json.loads(json.dumps(content), parse_float=rounded)
    lines = [*jobs, *(f"{key}: {json.dumps(value)}" for key, value in content.items())]
    lines += map(shown, ours.render(report))
    if kind in (Comm, Load):
        ours.picture = tmp_path / "picture.svg"
        lines += ours.draw(report)
        drawn = ours.picture.read_bytes()
        words = b", ".join(re.findall(rb">([^<>]*[a-z]{2}[^<>]*)</text>", drawn))
        lines.append(f"which has: {words.decode() or drawn[:4]}")
        ours.picture.unlink()
    text = "\n".join(lines)
    text = re.sub(r"(bench-|\.candle-p1-bench-)\w+", r"\1X", text.replace(str(tmp_path), "$TMP"))
    text = re.sub(r"\b\d(\.\d+)?e-1\d\b", "0", text)  # of rounding, which depends on the machine
    check_expected(FILE, name, text, CASES)
    assert {path.name for path in tmp_path.iterdir()} <= {"train.csv", "cache"}
