"""What defines a point: a run's parameters without those that only say where and how to log."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from candle_p1.parameters.declarations import SUPERVISOR_PARAMETERS
from candle_p1.scaling import share_epochs

if TYPE_CHECKING:
    from collections.abc import Mapping

DATA = "data"
"""The setting that says which data: synthetic ones of a size, or files with these values."""

PLACES = {
    "cache_dir",
    "cache_limit",
    "ckpt_directory",
    "config_file",
    "data_dir",
    "data_url",
    "experiment_id",
    "home_dir",
    "model_name",
    "output_dir",
    "run_id",
    "save_path",
    "stage_dir",
}
LOGGING = {
    "communication_log",
    "logfile",
    "mllog",
    "power",
    "power_hz",
    "profiling",
    "stall_shutdown_s",
    "step_trace",
    "tensorboard",
    "timeline",
    "verbose",
}
REPEATS = {"rng_seed"}
FIRST_TIME = "cached (first time)"
"""In place of the loader `cached` where it read the file and wrote the cache, or a part of it."""

PLANNED = ("epochs_scaling", "batch_scaling", "lr_scaling", "data_parallel")
"""The plan has these as they were resolved."""

HOROVOD = "HOROVOD_"
NOT_ABOUT_COMMUNICATION = ("HOROVOD_STALL", "HOROVOD_TIMELINE", "HOROVOD_LOG")


def settings_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters that define a point, and DATA.

    That is all but the seed, places, logging, names of data files (DATA stands for these) and what
    CANDLE Supervisor adds. Of a place to stage caches it counts whether there is one, and a cache
    that had to be written makes another loader (FIRST_TIME). Lists become tuples. A run that did
    not get far enough has no DATA.
    """
    values = {name: parameter["value"] for name, parameter in record["parameters"].items()}
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if name not in _left_out() and not name.endswith("_data")
    }
    if settings.get("epochs_scaling", "") is None:
        level = settings.get("data_parallel", "epoch")
        settings["epochs_scaling"], _ = share_epochs(settings["epochs"], 1, None, level)
    if "stage_dir" in values:
        settings["staged"] = values["stage_dir"] is not None
    if "write" in record.get("phases", {}).get("load", {}).get("parts", {}):
        settings["loader"] = FIRST_TIME
    plan = record.get("plan", {})
    settings |= {name: plan[name] for name in PLANNED if name in plan}
    data = data_name(record)
    if data:
        settings[DATA] = data
    if data and not record["data"]["synthetic"]:
        for name in ("size", "data_seed"):  # say nothing where files are named
            settings.pop(name, None)
    return settings


def data_name(record: Mapping[str, Any]) -> str | None:
    """Returns the data in words; None where the run did not get as far as to say.

    Files are told apart by the digests of their values, or where these are missing by their sizes.
    """
    data = record.get("data")
    if not data:
        return None
    if data["synthetic"]:
        size = record["parameters"].get("size", {}).get("value", "of unknown size")
        return f"synthetic, {size}"
    files = [
        f"{role} {file.get('values_sha256', '')[:8] or file['file_bytes']}"
        for role, file in sorted(data["files"].items())
    ]
    return f"files: {', '.join(files)}"


def horovod_settings_of(record: Mapping[str, Any]) -> dict[str, str]:
    """Returns Horovod's settings that bear on how gradients are reduced, by variable."""
    settings = record.get("distributed", {}).get("settings", {})
    return {
        name: value
        for name, value in settings.items()
        if name.startswith(HOROVOD) and not name.startswith(NOT_ABOUT_COMMUNICATION)
    }


@cache
def _left_out() -> frozenset[str]:
    return frozenset(PLACES | LOGGING | REPEATS | {each.name for each in SUPERVISOR_PARAMETERS})
