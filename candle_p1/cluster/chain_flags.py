"""The flags with which a later job can continue a run: those that turn checkpoints on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from candle_p1.checkpoints.policy import are_saved
from candle_p1.errors import ParameterError
from candle_p1.parameters.catalog import INTERVALS

if TYPE_CHECKING:
    from collections.abc import Mapping

CHAIN_FLAGS = {"ckpt_every_s": "600", "ckpt_save_best": "False", "ckpt_keep_limit": "2"}
"""The flags of a chain whose user sets no interval between checkpoints.

A chain needs the newest checkpoint, and the one before it in case of damage. By default every epoch
that is the best so far would be saved as well.
"""


def continues(params: Mapping[str, Any]) -> bool:
    """Tells whether a run with these parameters writes checkpoints, and begins from them."""
    return are_saved(params) and params["ckpt_restart_mode"] != "off"


def check_continues(params: Mapping[str, Any]) -> None:
    """Checks that the jobs of a chain can continue a run with these parameters.

    Raises:
        ParameterError: Each of them would begin anew.
    """
    if not continues(params):
        raise ParameterError(
            "--chain continues runs from checkpoints, which the flags turn off: leave"
            f" --ckpt_restart_mode at auto, and set one of {', '.join(INTERVALS)}, or none of them"
        )
