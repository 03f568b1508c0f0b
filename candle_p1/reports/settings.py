"""The settings that define a point: the parameters that affect what a run learns or its speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from candle_p1.parameters.catalog import role_of
from candle_p1.parameters.parameter import Role
from candle_p1.scaling import share_epochs

if TYPE_CHECKING:
    from collections.abc import Mapping

DATA = "data"
"""The setting that identifies the data: the size of synthetic data, or the values of files."""

FIRST_TIME = "cached (first time)"
"""Replaces the loader `cached` where it read the file and wrote the cache, or a part of it."""

PLANNED = ("epochs_scaling", "batch_scaling", "lr_scaling", "data_parallel")
"""Settings for which the plan has the resolved values."""

HOROVOD = "HOROVOD_"
NOT_ABOUT_COMMUNICATION = ("HOROVOD_STALL", "HOROVOD_TIMELINE", "HOROVOD_LOG")


def settings_of(
    parameters: Mapping[str, Any],
    plan: Mapping[str, Any],
    data: str | None,
    *,
    is_synthetic: bool | None,
    wrote_cache: bool,
) -> dict[str, Any]:
    """Returns the parameters that define a point, and DATA.

    Omitted are the seed, places, logging, names of data files (DATA stands for these) and what
    CANDLE Supervisor adds. Where caches are staged does not matter, only whether they are. A run
    that had to write its cache has another loader (FIRST_TIME). Lists become tuples.

    Args:
        parameters: Values by name.
        plan: The scaled epochs, batch size and so on; may be empty.
        data: The data in words; None where the run did not get far enough to record them.
        is_synthetic: Whether the data are synthetic.
        wrote_cache: Whether the run wrote a cache of its data.
    """
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in parameters.items()
        if role_of(name) in (Role.LEARNING, Role.SPEED)
    }
    if settings.get("epochs_scaling", "") is None:
        level = settings.get("data_parallel", "epoch")
        settings["epochs_scaling"], _ = share_epochs(settings["epochs"], 1, None, level)
    if "stage_dir" in parameters:
        settings["staged"] = parameters["stage_dir"] is not None
    if wrote_cache:
        settings["loader"] = FIRST_TIME
    settings |= {name: plan[name] for name in PLANNED if name in plan}
    if data:
        settings[DATA] = data
    if data and not is_synthetic:
        for name in ("size", "data_seed"):  # meaningless where files are named
            settings.pop(name, None)
    return settings


def about_communication(settings: Mapping[str, str]) -> dict[str, str]:
    """Returns those of Horovod's settings that affect how gradients are averaged."""
    return {
        name: value
        for name, value in settings.items()
        if name.startswith(HOROVOD) and not name.startswith(NOT_ABOUT_COMMUNICATION)
    }
