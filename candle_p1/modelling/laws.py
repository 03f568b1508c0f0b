"""The phases of a run, and for each of them the terms of which its time may consist.

A phase has candidates: sums of a few terms, each with a coefficient that is fitted and cannot be
negative. The simpler ones come first. docs/modelling.md derives them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf, log, log2, sqrt
from typing import NamedTuple

STARTUP, LOAD, WAIT, TRANSFER, COMPUTE, FIRST_STEP, EXPOSED, VALIDATE, EVALUATE, REST = PHASES = (
    "start-up",
    "loading",
    "waiting for the slowest loader",
    "broadcast of the weights",
    "computing",
    "first step",
    "exposed communication",
    "validation",
    "evaluation",
    "the rest",
)
"""They add up to the time of a run. The rest is preprocessing, building the model and digests."""


@dataclass(frozen=True)
class JobShape:
    """A run's size, and what each of its ranks does."""

    num_ranks: int  # P in the laws
    ranks_on_node: int  # the ranks of the fullest node
    cores_per_node: int | None  # None where they are not known or not shared
    threads: int  # the threads with which a rank computes
    load_threads: int  # those with which it reads, for loaders that share the reading
    epochs: int  # the epochs that each rank trains
    steps_per_epoch: int  # the steps of each rank
    batch_size: int  # the samples of a step of one rank
    file_bytes: int  # the bytes of all data files
    shares_loading: bool  # whether the ranks read each file once, together
    weight_bytes: int  # the bytes of the weights, which are also those of the gradients

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


class ModelTerm(NamedTuple):
    """A term, which is multiplied by a coefficient."""

    name: str  # what the coefficient tells
    unit: str  # its unit, or that of its inverse, if this is a rate
    of: Callable[[JobShape], float]  # returns the term for a shape, without the coefficient

    @property
    def is_rate(self) -> bool:
        """Whether the inverse of the coefficient is shown."""
        return self.unit.endswith("/s")


Candidate = tuple[ModelTerm, ...]

SHARING = "other core of the node that is busy"
"""What the cores of a node slow each other: they share memory, caches and a power limit."""

_RATES: dict[str, tuple[str, Callable[[JobShape], float]]] = {
    "parse": ("rate at which a rank reads and parses", lambda s: s.file_bytes),
    "parse_sharing": (
        f"rate lost in parsing to each {SHARING}",
        lambda s: s.file_bytes * s.busy_neighbours,
    ),
    "neighbours": (
        "reading that the ranks of a node do one after the other",
        lambda s: s.file_bytes * (s.ranks_on_node - 1),
    ),
    "contend": (
        "reading that ranks do one after the other, of all ranks together",
        lambda s: s.file_bytes * (s.num_ranks - 1),
    ),
    "parse_share": (
        "rate at which one thread parses its share of a file",
        lambda s: s.file_bytes / (s.num_nodes * s.readers_on_node),
    ),
    "others_rows": (
        "rate at which nodes exchange rows",
        lambda s: s.file_bytes * (s.num_nodes - 1) / s.num_nodes,
    ),
    "tree_bytes": ("rate of the broadcast", lambda s: (s.num_ranks > 1) * s.weight_bytes),
    "sent": (  # to average gradients of G bytes, a rank sends 2 G (P - 1) / P
        "rate at which gradients are averaged, as far as back-propagation does not hide it",
        lambda s: s.steps * 2 * s.weight_bytes * (s.num_ranks - 1) / s.num_ranks,
    ),
}
_TIMES: dict[str, tuple[str, Callable[[JobShape], float]]] = {
    "load": ("loading, whatever the size", lambda s: 1),
    "doubling": ("start-up, for each doubling of the ranks", lambda s: log2(s.num_ranks)),
    # The largest of P normal deviates, in standard deviations, to leading order.
    "slowest": ("standard deviation of the ranks' loading", lambda s: sqrt(2 * log(s.num_ranks))),
    "meet": ("meeting before the broadcast", lambda s: s.num_ranks > 1),
    "levels": ("broadcast, for each level of the tree", lambda s: log2(s.num_ranks)),
    "sample": ("computing, for each sample", lambda s: s.samples),
    "sample_shared": (
        "computing that threads share, for each sample, on one thread",
        lambda s: s.samples / s.threads,
    ),
    "sample_sharing": (
        f"computing, for each sample and {SHARING}",
        lambda s: s.samples * s.busy_neighbours,
    ),
    "step": ("computing, for each step", lambda s: s.steps),
    "first_shared": (
        "first step, as far as threads share it, on one thread",
        lambda s: 1 / s.threads,
    ),
    "rounds": (
        "averaging, for each step and doubling of the ranks",
        lambda s: s.steps * log2(s.num_ranks),
    ),
    "imbalance": (
        "waiting for the slowest rank, for each step",
        lambda s: s.steps * (s.num_ranks > 1),
    ),
    "epoch": ("validation of an epoch", lambda s: s.epochs),
    "epoch_shared": ("validation of an epoch, on one rank", lambda s: s.epochs / s.num_ranks),
    "epoch_sharing": (
        f"validation of an epoch, for each {SHARING}",
        lambda s: s.epochs * s.busy_neighbours,
    ),
    "test_shared": ("evaluation, on one rank", lambda s: 1 / s.num_ranks),
}
for _short, _name in {
    "start": STARTUP,
    "first": FIRST_STEP,
    "test": EVALUATE,
    "rest": REST,
}.items():
    _TIMES[_short] = (_name, lambda s: 1)
    _TIMES[f"{_short}_sharing"] = (f"{_name}, for each {SHARING}", lambda s: s.busy_neighbours)
_TERMS = {short: ModelTerm(name, "s", of) for short, (name, of) in _TIMES.items()}
_TERMS |= {short: ModelTerm(name, "bytes/s", of) for short, (name, of) in _RATES.items()}

LOAD_TOGETHER = "loading together"
"""Stands for LOAD where ranks read each file once, together."""

_LAWS = {
    STARTUP: "start | start + start_sharing | start + doubling",
    LOAD: "parse | parse + parse_sharing | parse + neighbours | parse + contend",
    LOAD_TOGETHER: "parse_share | load | load + parse_share | load + others_rows"
    " | parse_share + others_rows",
    WAIT: "slowest | meet",
    TRANSFER: "tree_bytes | levels | tree_bytes + levels",
    COMPUTE: "sample | sample_shared | sample + sample_shared | step + sample"
    " | sample + sample_sharing",
    FIRST_STEP: "first | first_shared | first + first_shared | first + first_sharing",
    EXPOSED: "sent | rounds | imbalance | sent + rounds",
    VALIDATE: "epoch | epoch_shared | epoch + epoch_shared | epoch + epoch_sharing",
    EVALUATE: "test | test_shared | test + test_shared | test + test_sharing",
    REST: "rest | rest + rest_sharing | rest + doubling",
}

_ON_NODES = ModelTerm("power of a node", "W", lambda s: s.num_nodes)
_ON_RANKS = ModelTerm("power of a rank", "W", lambda s: s.num_ranks)
POWER: list[Candidate] = [(_ON_RANKS,), (_ON_NODES,), (_ON_NODES, _ON_RANKS)]
"""The candidates for the mean power of a job in a phase."""


def candidates(
    phase: str, shapes: Sequence[JobShape], allreduce_s: Callable[[JobShape], float] | None = None
) -> list[Candidate]:
    """Returns the candidates of one of PHASES, for runs of some shapes.

    If `allreduce_s` is given, which returns the time of averaging all gradients of a step once, in
    s, from a measurement, the share of it that is exposed is the only coefficient of the exposed
    communication.
    """
    if phase == EXPOSED and allreduce_s is not None:
        name = "share of the measured allreduce that is exposed"
        return [(ModelTerm(name, "", lambda s: s.steps * allreduce_s(s)),)]
    if phase == LOAD and any(shape.shares_loading for shape in shapes):
        phase = LOAD_TOGETHER
    return [tuple(_TERMS[t] for t in law.split(" + ")) for law in _LAWS[phase].split(" | ")]
