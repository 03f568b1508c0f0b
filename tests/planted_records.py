"""Run records with planted times and qualities, which fit the schema."""

import itertools
from datetime import datetime, timedelta, timezone

import numpy as np

from candle_p1.records.rank_stats import Joules, Seconds, Watts
from candle_p1.records.record import make_record, write_record
from candle_p1.records.types import PhaseTimes
from candle_p1.reports.experiments import group
from candle_p1.reports.frame import Run
from candle_p1.scaling import ScalingPlan

PARAMETERS = {
    **{"rng_seed": 0, "output_dir": "output", "epochs": 48, "batch_size": 20},
    **{"learning_rate": 0.001, "loader": "parallel", "kernels": "fast", "epochs_scaling": None},
    **{"batch_scaling": "none", "lr_scaling": "linear", "data_parallel": "epoch"},
    **{"size": "small", "data_seed": 2019, "power": "auto", "timeline": None},
}
ENVIRONMENT = {
    **{"python": "3.11.7", "packages": {"candle-p1": "0.1.0", "keras": "3.15.1"}},
    **{"system": "Linux", "host": "vm", "cpu": "AMD EPYC", "num_cores": 2, "settings": {}},
    **{"memory_bytes": 24 * 2**30, "source": {"commit": "0123456789abcdef", "modified": False}},
}
SCALED = (
    "epochs", "batch_size", "learning_rate", "epochs_scaling", "batch_scaling", "lr_scaling",
    "data_parallel",
)  # fmt: skip
EPOCH_STEPS = 10
_started = itertools.count()


def _sections(
    benchmark="nt3",
    num_ranks=1,
    *,
    load_s=2.0,
    epoch_s=1.0,
    epochs_per_rank=None,
    startup_s=3.0,
    first_step_s=0.5,
    wait_s=0.0,
    communication_s=0.0,
    quality=None,
    naive=None,
    trained=None,
    energy_j=None,
    threads=1,
    environment=None,
    device="cpu",
    exchange=None,
    training=None,
    jit_compile=None,
    engine="horovod",
    status="ok",
    **parameters,
):
    """Returns the sections of a record.

    The total is startup_s + load_s + wait_s + the epochs of a rank times epoch_s + first_step_s. By
    default a rank trains what the scaling of the epochs gives it.
    """
    values = PARAMETERS | parameters
    loads_s = load_s if isinstance(load_s, list) else [load_s] * num_ranks
    load_s = max(loads_s)
    started = datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(minutes=next(_started))
    record = {
        **{"schema_version": 3, "status": status, "benchmark": benchmark},
        **{"started": started.isoformat(), "num_ranks": num_ranks, "num_nodes": 1},
        "launcher": "mpirun" if num_ranks > 1 else "none",
        "parameters": {name: {"value": v, "origin": "flag"} for name, v in values.items()},
    }
    if status == "running":
        return record
    record["ended"] = (started + timedelta(seconds=30)).isoformat()
    if status != "ok":
        return record | {"failure": {"reason": "rank 0 died", "rank": 0, "phase": "train"}}
    scaled = {name: values[name] for name in SCALED}
    limits = {"num_samples": 10**9, "max_steps": EPOCH_STEPS}
    plan = ScalingPlan.make(num_ranks=num_ranks, **limits, **scaled)
    epochs_per_rank = epochs_per_rank or plan.epochs_per_rank
    train_s = epochs_per_rank * epoch_s + first_step_s
    wait_begin_s = startup_s + load_s
    waited = {"communication": _spread(communication_s, num_ranks)} if num_ranks > 1 else {}
    wait = _phase(wait_begin_s, wait_s, num_ranks)
    total_s = wait_begin_s + wait_s + train_s
    useful = (total_s - communication_s - wait_s) / total_s
    rank = {"host": "vm", "node": 0, "num_cores": 2, "threads": threads, "device": device}
    files = {
        role: {"path": f"{role}.csv", "file_bytes": size, "load": _spread(s, num_ranks)}
        for role, size, s in (("train", 4 * 10**6, 0.8 * load_s), ("test", 10**6, 0.2 * load_s))
    }
    epochs = [
        _epoch(i, epoch_s, first_step_s if i == 0 else None, dict(trained or {}), num_ranks)
        for i in range(epochs_per_rank)
    ]
    averaged = {"backend": engine, "settings": exchange or {}}
    return record | {
        "ranks": [rank | {"rank": i, "local_rank": i} for i in range(num_ranks)],
        "data": {"synthetic": True, "loader": values["loader"], "files": files},
        "plan": plan.model_dump() | {"epochs_per_rank": epochs_per_rank},
        "model": {"num_parameters": 1000, "optimizer": "sgd"}
        | ({} if jit_compile is None else {"jit_compile": jit_compile}),
        "distributed": averaged if num_ranks > 1 else {"backend": "serial"},
        "phases": {
            "startup": _phase(0.0, startup_s, num_ranks),
            "load": _phase(startup_s, loads_s, num_ranks),
            "broadcast": _phase(wait_begin_s, wait_s, num_ranks, regions={"wait": wait}),
            "train": _phase(wait_begin_s + wait_s, train_s, num_ranks, **waited),
        },
        "total_s": total_s,
        "training": {"epochs": epochs, "samples_per_s": num_ranks * 200 / epoch_s}
        | (training or {}),
        "communication": {},
        "efficiency": {
            **{"load_balance": 1.0, "communication_efficiency": useful},
            "parallel_efficiency": useful,
        },
        "quality": {
            name: {"value": value} | ({"naive": naive[name]} if naive and name in naive else {})
            for name, value in (quality or {}).items()
        },
        "energy": _energy(energy_j, total_s),
        "environment": ENVIRONMENT | (environment or {}),
        "warnings": [],
    }


def planted_record(*args, **kwargs):
    """Returns a record; see _sections."""
    return make_record(_sections(*args, **kwargs))


REMOVED = object()


def changed(record, changes):
    """Returns a record with other values at some places, such as {"energy.covers": ["cpu"]}.

    REMOVED takes a key away. The record carries no raw values of ranks any more.
    """
    content = record.model_dump(exclude_unset=True)
    for place, value in changes.items():
        *within, key = place.split(".")
        section = content
        for name in within:
            section = section[int(name) if isinstance(section, list) else name]
        if value is REMOVED:
            del section[key]
        else:
            section[key] = value
    return make_record(content)


def plant(directory, *args, **kwargs):
    """Writes a record into a new directory below this one; returns its path."""
    return _write(directory, planted_record(*args, **kwargs))


def _write(directory, record):
    number = sum(1 for _ in directory.glob("run*"))
    path = directory / f"run{number:03d}/run.json"
    path.parent.mkdir()
    write_record(path, record)
    return path


def plant_study(directory, repeats, counts, **kwargs):
    """Writes records of NT3 with a slow and a fast loader, with all figures of merit."""
    merits = {"quality": {"accuracy": 0.9}, "naive": {"accuracy": 0.5}, "energy_j": 50.0}
    merits |= {"trained": {"accuracy": 0.95}}
    for repeat, num_ranks in itertools.product(range(repeats), counts):
        for loader, load_s in (("original", 9.0), ("parallel", 1.0)):
            facts = {"loader": loader, "load_s": load_s + 0.01 * repeat, "rng_seed": repeat}
            plant(directory, "nt3", num_ranks, **facts, **merits, **kwargs)


def _spread(seconds, num_ranks):
    return Seconds.over([seconds] * num_ranks)


def _phase(begin_s, seconds, num_ranks, **facts):
    seconds = seconds if isinstance(seconds, list) else [seconds] * num_ranks
    return PhaseTimes.over(seconds, begin=_spread(begin_s, num_ranks), **facts)


def _epoch(i, epoch_s, first_step_s, metrics, num_ranks):
    """Returns an epoch that takes epoch_s without the run's first step, whatever that takes."""
    steps = {"num": EPOCH_STEPS, "median": _spread(epoch_s / EPOCH_STEPS, num_ranks)}
    seconds = epoch_s
    if first_step_s is not None:
        steps["first"] = _spread(first_step_s, num_ranks)
        seconds = epoch_s * (EPOCH_STEPS - 1) / EPOCH_STEPS + first_step_s
    train = _spread(seconds, num_ranks)
    return {"epoch": i + 1, "train": train, "steps": steps, "metrics": metrics}


def _energy(energy_j, total_s):
    if energy_j is None:
        return {"kind": "absent", "reason": "no sensor"}
    return {
        **{"kind": "measured", "total_j": energy_j, "total_s": total_s, "covers": ["gpu"]},
        **{"mean_w": energy_j / total_s, "power_hz": 10.0, "phases": {}},
        **{"devices": [], "absent": [], "notes": [], "traces": []},
    }


def experiment_of(*records):
    """Returns the only experiment of some records."""
    (experiment,) = group([Run(i, record) for i, record in enumerate(records)])
    return experiment


LOAD_S = {"original": 20.0, "chunked": 10.0, "parallel": 1.0}
STUDY = {"counts": [1, 2, 4], "seeds": 3, "epochs": 32}
WEAK = {"counts": [1, 2], "seeds": 3, "epochs_scaling": "weak"}


def _plain(value):
    """Returns a value of the file of sets as Python has it."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return {"null": None, "removed": REMOVED}.get(value, value) if isinstance(value, str) else value


def records_of(group):
    """Yields the records of a group, as the file of sets describes it."""
    facts = _plain(group)
    facts = (STUDY if facts.pop("study", 0) else WEAK if facts.pop("weak", 0) else {}) | facts
    benchmark, counts = facts.pop("benchmark", "nt3"), facts.pop("counts", [2])
    seeds, loads_s = facts.pop("seeds", 1), facts.pop("loads_s", [])
    variants, changes = facts.pop("variants", [{}]), facts.pop("changes", {})
    if cores := facts.pop("cores", None):
        changes = changes | {"environment.node_cores": cores}
    for num_ranks, variant in itertools.product(counts, map(_plain, variants)):
        if isinstance(variant, str):
            variant = {"loader": variant, "load_s": LOAD_S[variant]}
        for seed in range(len(loads_s) or seeds):
            more = {"rng_seed": seed} | facts | variant
            more |= {"load_s": loads_s[seed]} if loads_s else {}
            power = more.pop("gpus", None)
            record = planted_record(benchmark, num_ranks, **more)
            record = _measured(record, **power) if power else record
            yield changed(record, changes) if changes else record


def plant_group(directory, group):
    """Writes the records of a group below a directory."""
    directory.mkdir(exist_ok=True)
    for record in records_of(group):
        _write(directory, record)


NUM_GPUS, NUM_NODES = 12, 2


def _gpus(power_w, total_s, **facts):
    """Returns a group of 12 GPUs whose powers average to power_w, from 11 W below to 11 W above."""
    watts = power_w + np.arange(-11.0, 12.0, 2.0)
    found = {"kind": "measured", "num_samples": 10, "power": Watts.over(watts).model_dump()}
    found |= {"energy": Joules.over(watts * total_s).model_dump(), "phases": {}}
    found |= {"label": "Tesla V100", "domain": "gpu", "source": "nvml", "reading": "energy"}
    found |= {"resolution_s": 0.1, "counted": True}
    return found | {"num_devices": NUM_GPUS, "nodes": (0, NUM_NODES - 1)} | facts


def _measured(record, power_w, also=None, **facts):
    """Returns a record of 12 GPUs on two nodes, of which each has this mean power.

    `also` are facts of a second group of them.
    """
    total_s, watts = record.total_s, NUM_GPUS * power_w
    energy = {"total_j": watts * total_s, "mean_w": watts, "power_hz": 1.0}
    groups = [facts, also] if also else [facts]
    energy["devices"] = [_gpus(power_w, total_s, **each) for each in groups]
    places = {f"energy.{name}": value for name, value in energy.items()}
    return changed(record, places | {"num_nodes": NUM_NODES})
