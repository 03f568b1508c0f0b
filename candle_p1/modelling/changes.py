"""What if: a faster file system or network, other epochs or batches (``--set NAME=VALUE``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.errors import ParameterError, did_you_mean
from candle_p1.modelling.phases import EXPOSED, LOAD, TRANSFER, WAIT
from candle_p1.modelling.samples import TimeSamples
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from candle_p1.modelling.shape import ShapeRule

MOST = 10**6
"""No factor and no number of epochs or samples is larger."""


@dataclass(frozen=True)
class Changes:
    """What is changed; by default nothing.

    Attributes:
        file_system: How many times as fast files are read.
        network: How many times as fast ranks communicate.
        epochs: The epochs: of all ranks together where they share them, else of each.
        epochs_per_rank: The epochs of each rank, whether they are shared or not.
        batch_size: The batch size, before it is scaled with the ranks.
    """

    file_system: float = 1.0
    network: float = 1.0
    epochs: int | None = None
    epochs_per_rank: int | None = None
    batch_size: int | None = None

    def __str__(self) -> str:
        told = [
            f"{name} {getattr(self, name):g} times as fast"
            for name in FACTORS
            if getattr(self, name) != 1
        ]
        told += [f"{name} {getattr(self, name):,}" for name in COUNTS if getattr(self, name)]
        return ", ".join(told).replace("_", " ") or "as it is"

    def apply_to(self, rule: ShapeRule) -> ShapeRule:
        """Returns the shapes of runs with other epochs and batches."""
        if self.batch_size is not None:
            base = rule.base
            samples = base.steps_per_epoch * base.batch_size
            steps = ceil(samples / self.batch_size)
            base = replace(base, batch_size=self.batch_size, steps_per_epoch=steps)
            rule = replace(rule, base=base, base_batch_size=self.batch_size)
        if self.epochs is not None:
            rule = replace(rule, total_epochs=self.epochs)
        if self.epochs_per_rank is not None:
            rule = replace(rule, total_epochs=self.epochs_per_rank, epochs_scaling="weak")
        return rule

    def apply_to_times(
        self, samples: TimeSamples, reading_share: float | None, seed: int = 0
    ) -> TimeSamples:
        """Returns times with another file system and network.

        Args:
            samples: The times.
            reading_share: The share of loading that is waiting for the file system. If it is None,
                nobody knows, and every sample takes another one between 0 and 1.
            seed: That of the unknown shares.
        """
        if self.file_system == 1 and self.network == 1:
            return samples
        times = dict(samples.phases_s)
        shares: Any = reading_share
        if shares is None:
            shares = np.random.default_rng(seed).random(len(times[LOAD])) if LOAD in times else 0
        for phase in (LOAD, WAIT):  # ranks wait for the loading of others
            if phase in times:
                times[phase] = times[phase] * (1 - shares + shares / self.file_system)
        for phase in (EXPOSED, TRANSFER):
            if phase in times:
                times[phase] = times[phase] / self.network
        return replace(samples, phases_s=times)


FACTORS = ("file_system", "network")
COUNTS = ("epochs", "epochs_per_rank", "batch_size")
"""What may be set: factors, which are 1 by default, and whole numbers."""


def parse_changes(words: Iterable[str]) -> Changes:
    """Returns the changes that ``--set`` names, such as ``network=2``.

    Raises:
        ParameterError: A name is unknown, or a value is not possible.
    """
    found: dict[str, Any] = {}
    for word in words:
        name, sign, text = word.partition("=")
        known = (*FACTORS, *COUNTS)
        if name not in known:
            near = did_you_mean(name, known)
            raise ParameterError(f"--set {word}: choose one of {', '.join(known)}{near}")
        if name in found:
            raise ParameterError(f"--set {name} is given twice")
        found[name] = _value(word, name, text if sign else "")
    if found.keys() >= {"epochs", "epochs_per_rank"}:
        raise ParameterError("--set epochs and --set epochs_per_rank: give only one of them")
    return Changes(**found)


def _value(word: str, name: str, text: str) -> float | int:
    try:
        value = float(text) if name in FACTORS else int(text)
    except ValueError as error:
        kind = "a factor, such as 2 or 0.5" if name in FACTORS else "a whole number"
        raise ParameterError(f"--set {word}: {name} takes {kind}") from error
    if not (isfinite(value) and 0 < value <= MOST):
        raise ParameterError(f"--set {word}: {name} is more than 0, and at most {MOST:,}")
    return value


def usual_changes(epochs_per_rank: int | None) -> Mapping[str, Changes]:
    """Returns the rows of a what-if table.

    Args:
        epochs_per_rank: The epochs of each rank now; None to leave them out.
    """
    rows = {
        "as it is": Changes(),
        "file system twice as fast": Changes(file_system=2),
        "network twice as fast": Changes(network=2),
    }
    if epochs_per_rank:
        twice = 2 * epochs_per_rank
        rows[f"{count(twice, 'epoch')} per rank"] = Changes(epochs_per_rank=twice)
    return rows
