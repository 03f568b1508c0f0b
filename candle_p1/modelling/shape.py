"""What the time of a run depends on: its ranks, their place on nodes, and the work of each."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf
from typing import TYPE_CHECKING

from candle_p1.scaling import scale_batch_size

if TYPE_CHECKING:
    from collections.abc import Mapping

SHARED_EPOCHS = ("strong", "strong_ceil")
"""The scalings of the epochs with which ranks share them."""


@dataclass(frozen=True)
class JobShape:
    """A run's size, and what each of its ranks does.

    Attributes:
        num_ranks: The number of ranks.
        ranks_on_node: The ranks of the fullest node.
        cores_per_node: The cores of a node; None where they are not known.
        threads: The threads with which a rank computes.
        load_threads: The threads with which a rank reads, for loaders that share the reading.
        epochs: The epochs that each rank trains.
        steps_per_epoch: The steps of an epoch on each rank.
        batch_size: The samples of a step of one rank.
        file_bytes: The bytes of all data files.
        shares_loading: Whether the ranks read each file once, together.
        weight_bytes: The bytes of the weights, which are also those of the gradients.
    """

    num_ranks: int
    ranks_on_node: int
    cores_per_node: int | None
    threads: int
    load_threads: int
    epochs: int
    steps_per_epoch: int
    batch_size: int
    file_bytes: int
    shares_loading: bool
    weight_bytes: int

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return ceil(self.num_ranks / self.ranks_on_node)

    @property
    def steps(self) -> int:
        """The steps of a rank in all of its epochs."""
        return self.epochs * self.steps_per_epoch

    @property
    def samples(self) -> int:
        """The samples on which a rank trains in all of its epochs."""
        return self.steps * self.batch_size

    @property
    def busy_neighbours(self) -> int:
        """The cores of a node that compute for other ranks than one."""
        return (self.ranks_on_node - 1) * self.threads

    @property
    def is_crowded(self) -> bool:
        """Whether more threads compute than there are cores, so that no law holds."""
        return self.ranks_on_node * self.threads > (self.cores_per_node or inf)

    @property
    def readers_on_node(self) -> int:
        """The threads of a node that read and parse a file together."""
        readers = self.ranks_on_node * self.load_threads
        return min(readers, self.cores_per_node or readers)


@dataclass(frozen=True)
class ShapeRule:
    """How the shape of a series' runs follows from the number of ranks.

    Attributes:
        base: The shape of a run of the series.
        max_ranks_on_node: The ranks that fill a node.
        epochs_scaling: As in the plan: strong, strong_ceil, weak or none.
        batch_scaling: As in the plan: none, linear, sqrt or cbrt.
        total_epochs: The epochs that were asked for: of all ranks together, where they share them.
        base_batch_size: The batch size of one rank.
        num_samples: The samples on which all ranks can train.
        shares_samples: Whether ranks share the samples of an epoch.
        max_steps: The limit of the steps of an epoch; 0: there is none.
        threads: The threads of a rank, by the number of ranks that ran.
    """

    base: JobShape
    max_ranks_on_node: int
    epochs_scaling: str
    batch_scaling: str
    total_epochs: int
    base_batch_size: int
    num_samples: int
    shares_samples: bool
    max_steps: int
    threads: Mapping[int, int]

    @property
    def is_strong(self) -> bool:
        """Whether the ranks share the work, so that ideal scaling divides the time by them."""
        return self.epochs_scaling in SHARED_EPOCHS or self.shares_samples

    def can_run(self, num_ranks: int) -> bool:
        """Returns whether every rank has at least one epoch, and all have the same number."""
        if self.epochs_scaling == "strong":
            return self.total_epochs % num_ranks == 0
        return self.epochs_scaling != "strong_ceil" or num_ranks <= self.total_epochs

    def at(self, num_ranks: int) -> JobShape:
        """Returns the shape of a run on some ranks.

        Where ranks have to share epochs that cannot be divided by them, each has the share rounded
        up; see `can_run`.
        """
        base = self.base
        on_node = min(num_ranks, self.max_ranks_on_node)
        epochs = self.total_epochs
        if self.epochs_scaling in SHARED_EPOCHS:
            epochs = ceil(epochs / num_ranks)
        batch_size = scale_batch_size(self.base_batch_size, num_ranks, self.batch_scaling)
        steps = base.steps_per_epoch
        if self.shares_samples or self.batch_scaling != "none":
            samples = self.num_samples // num_ranks if self.shares_samples else self.num_samples
            steps = max(1, ceil(samples / batch_size))
            if self.max_steps:
                steps = min(steps, self.max_steps)
        return JobShape(
            num_ranks,
            on_node,
            base.cores_per_node,
            self._threads(num_ranks, on_node),
            base.load_threads,
            epochs,
            steps,
            batch_size,
            base.file_bytes,
            base.shares_loading,
            base.weight_bytes,
        )

    def _threads(self, num_ranks: int, on_node: int) -> int:
        """Returns the threads of a rank: as it ran, else its share of a node's cores."""
        if num_ranks in self.threads:
            return self.threads[num_ranks]
        most = max(self.threads.values())
        if min(self.threads.values()) == most or not self.base.cores_per_node:
            return most
        return max(1, min(most, self.base.cores_per_node // on_node))
