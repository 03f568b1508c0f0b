"""Synthetic records of the toy benchmark."""

import os

from candle_p1.records.record import make_record
from candle_p1.records.types import PhaseTimes
from candle_p1.scaling import ScalingPlan


def toy_record(params, *args, **kwargs):
    """Returns a record with the parameters of a run, a mapping; settings are its environment."""
    return make_record(_sections(params, *args, **kwargs))


def _sections(params, num_ranks=1, status="ok", total_s=10.0, train_s=8.0, settings=None):
    record = {
        "schema_version": 3,
        "status": status,
        "benchmark": "toy",
        "started": "2019-08-05T00:00:00+00:00",
        "num_ranks": num_ranks,
        "parameters": {name: {"value": value, "origin": "flag"} for name, value in params.items()},
    }
    if status == "running":
        return record
    record["ended"] = record["started"]
    if status != "ok":
        return record | {"failure": {"reason": f"planted {status}", "rank": 0}}
    of_steps = {"batch_size": 10, "learning_rate": 0.1, "num_samples": 10}
    plan = ScalingPlan.make(
        num_ranks=num_ranks, epochs=params["epochs"], epochs_scaling="none", **of_steps
    )
    rank = {"host": "here", "node": 0, "num_cores": 1, "threads": 1, "device": "cpu"}
    return record | {
        "ranks": [rank | {"rank": i, "local_rank": i} for i in range(num_ranks)],
        "data": {"synthetic": True, "loader": params["loader"], "files": {}},
        "plan": plan.model_dump(),
        "model": {"num_parameters": 1, "optimizer": "sgd"},
        "distributed": {"backend": "serial"},
        "phases": {"train": PhaseTimes.over([train_s] * num_ranks)},
        "total_s": total_s,
        "training": {"epochs": []},
        "efficiency": {"kind": "absent", "reason": "planted"},
        "communication": {},
        "quality": {"accuracy": {"value": 0.75, "naive": 0.5}},
        "energy": {"kind": "absent", "reason": "planted"},
        "environment": {
            **{"python": "3.11.7", "packages": {}, "system": "Linux", "host": "here"},
            **{"cpu": "a processor", "num_cores": 1, "memory_bytes": 2**30},
            "settings": dict(os.environ) if settings is None else settings,
        },
    }
