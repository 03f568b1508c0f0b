"""The phases of a model, and for each of them the terms of which its time may consist.

A phase has candidates: sums of a few terms, each with a coefficient that is fitted and cannot be
negative. The simpler ones come first. docs/modelling.md derives them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import log, log2, sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from candle_p1.modelling.shape import JobShape

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

FREE_POWERS = (0.25, 1 / 3, 0.5, 2 / 3, 0.75, 1.0, 1.5, 2.0)
FREE_LOGS = (0, 1, 2)
"""The exponents i and j of free terms P^i log2(P)^j, as in Extra-P; i is 0 only where j is not."""


@dataclass(frozen=True)
class ModelTerm:
    """A term, which is multiplied by a coefficient.

    Attributes:
        name: What the coefficient tells.
        unit: The unit of the coefficient; of its inverse, if `is_rate`.
        of: Returns the term for a shape, without the coefficient.
        is_rate: Whether the inverse of the coefficient is shown, such as bytes per second.
        is_free: Whether no law stands behind it.
    """

    name: str
    unit: str
    of: Callable[[JobShape], float]
    is_rate: bool = False
    is_free: bool = False


Candidate = tuple[ModelTerm, ...]


def _several(shape: JobShape) -> float:
    return float(shape.num_ranks > 1)


def _slowest(shape: JobShape) -> float:
    """The expected largest of P normal deviates, in standard deviations, to leading order."""
    return sqrt(2 * log(shape.num_ranks))


def _sent_bytes(shape: JobShape) -> float:
    """The bytes that a rank sends to average the gradients once: 2 G (P - 1) / P."""
    return 2 * shape.weight_bytes * (shape.num_ranks - 1) / shape.num_ranks


def _constant(name: str) -> ModelTerm:
    return ModelTerm(name, "s", lambda _: 1.0)


def _shared(name: str) -> ModelTerm:
    """What the cores of a node slow each other: they share memory, caches and a power limit."""
    name = f"{name}, for each other core of the node that is busy"
    return ModelTerm(name, "s", lambda shape: float(shape.busy_neighbours))


_GROWING = ModelTerm("start-up, for each doubling of the ranks", "s", lambda s: log2(s.num_ranks))
_PARSE = ModelTerm(
    "rate at which a rank reads and parses", "bytes/s", lambda s: float(s.file_bytes), True
)
_PARSE_SHARING = ModelTerm(
    "rate lost in parsing to each other core of the node that is busy",
    "bytes/s",
    lambda s: float(s.file_bytes * s.busy_neighbours),
    True,
)
_CONTEND = ModelTerm(
    "reading that ranks do one after the other, of all ranks together",
    "bytes/s",
    lambda s: float(s.file_bytes * (s.num_ranks - 1)),
    True,
)
_NEIGHBOURS = ModelTerm(
    "reading that the ranks of a node do one after the other",
    "bytes/s",
    lambda s: float(s.file_bytes * (s.ranks_on_node - 1)),
    True,
)
_PARSE_SHARE = ModelTerm(
    "rate at which one thread parses its share of a file",
    "bytes/s",
    lambda s: s.file_bytes / (s.num_nodes * s.readers_on_node),
    True,
)
_ROWS_OF_OTHERS = ModelTerm(
    "rate at which nodes exchange rows",
    "bytes/s",
    lambda s: s.file_bytes * (s.num_nodes - 1) / s.num_nodes,
    True,
)
_SLOWEST_LOADER = ModelTerm("standard deviation of the ranks' loading", "s", _slowest)
_MEET = ModelTerm("meeting before the broadcast", "s", _several)
_TREE_BYTES = ModelTerm(
    "rate of the broadcast", "bytes/s", lambda s: _several(s) * s.weight_bytes, True
)
_TREE_LEVELS = ModelTerm("broadcast, for each level of the tree", "s", lambda s: log2(s.num_ranks))
_SAMPLE = ModelTerm("computing, for each sample", "s", lambda s: float(s.samples))
_SAMPLE_SHARED = ModelTerm(
    "computing that threads share, for each sample, on one thread",
    "s",
    lambda s: s.samples / s.threads,
)
_STEP = ModelTerm("computing, for each step", "s", lambda s: float(s.steps))
_SAMPLE_SHARING = ModelTerm(
    "computing, for each sample and other core of the node that is busy",
    "s",
    lambda s: float(s.samples * s.busy_neighbours),
)
_SENT = ModelTerm(
    "rate at which gradients are averaged, as far as back-propagation does not hide it",
    "bytes/s",
    lambda s: s.steps * _sent_bytes(s),
    True,
)
_ROUNDS = ModelTerm(
    "averaging, for each step and doubling of the ranks",
    "s",
    lambda s: s.steps * log2(s.num_ranks),
)
_IMBALANCE = ModelTerm(
    "waiting for the slowest rank, for each step",
    "s",
    lambda s: s.steps * _several(s),
)
_EPOCH = ModelTerm("validation of an epoch", "s", lambda s: float(s.epochs))
_EPOCH_SHARED = ModelTerm(
    "validation of an epoch, on one rank", "s", lambda s: s.epochs / s.num_ranks
)
_EPOCH_SHARING = ModelTerm(
    "validation of an epoch, for each other core of the node that is busy",
    "s",
    lambda s: float(s.epochs * s.busy_neighbours),
)
_TESTING = ModelTerm("evaluation, on one rank", "s", lambda s: 1 / s.num_ranks)
_FIRST_SHARED = ModelTerm(
    "first step, as far as threads share it, on one thread", "s", lambda s: 1 / s.threads
)

_LOAD_ALONE: tuple[Candidate, ...] = (
    (_PARSE,),
    (_PARSE, _PARSE_SHARING),
    (_PARSE, _NEIGHBOURS),
    (_PARSE, _CONTEND),
)
_LOAD_TOGETHER: tuple[Candidate, ...] = (
    (_PARSE_SHARE,),
    (_constant("loading, whatever the size"),),
    (_constant("loading, whatever the size"), _PARSE_SHARE),
    (_constant("loading, whatever the size"), _ROWS_OF_OTHERS),
    (_PARSE_SHARE, _ROWS_OF_OTHERS),
)
_OTHERS: dict[str, tuple[Candidate, ...]] = {
    STARTUP: (
        (_constant("start-up"),),
        (_constant("start-up"), _shared("start-up")),
        (_constant("start-up"), _GROWING),
    ),
    WAIT: ((_SLOWEST_LOADER,), (_MEET,)),
    TRANSFER: ((_TREE_BYTES,), (_TREE_LEVELS,), (_TREE_BYTES, _TREE_LEVELS)),
    COMPUTE: (
        (_SAMPLE,),
        (_SAMPLE_SHARED,),
        (_SAMPLE, _SAMPLE_SHARED),
        (_STEP, _SAMPLE),
        (_SAMPLE, _SAMPLE_SHARING),
    ),
    FIRST_STEP: (
        (_constant("first step"),),
        (_FIRST_SHARED,),
        (_constant("first step"), _FIRST_SHARED),
        (_constant("first step"), _shared("first step")),
    ),
    EXPOSED: ((_SENT,), (_ROUNDS,), (_IMBALANCE,), (_SENT, _ROUNDS)),
    VALIDATE: (
        (_EPOCH,),
        (_EPOCH_SHARED,),
        (_EPOCH, _EPOCH_SHARED),
        (_EPOCH, _EPOCH_SHARING),
    ),
    EVALUATE: (
        (_constant("evaluation"),),
        (_TESTING,),
        (_constant("evaluation"), _TESTING),
        (_constant("evaluation"), _shared("evaluation")),
    ),
    REST: (
        (_constant("the rest"),),
        (_constant("the rest"), _shared("the rest")),
        (_constant("the rest"), _GROWING),
    ),
}

_ON_NODES = ModelTerm("power of a node", "W", lambda s: float(s.num_nodes))
_ON_RANKS = ModelTerm("power of a rank", "W", lambda s: float(s.num_ranks))
POWER: tuple[Candidate, ...] = ((_ON_RANKS,), (_ON_NODES,), (_ON_NODES, _ON_RANKS))
"""The candidates for the mean power of a job in a phase."""


def candidates(
    phase: str, shapes: Sequence[JobShape], allreduce_s: Callable[[JobShape], float] | None = None
) -> list[Candidate]:
    """Returns the candidates of a phase.

    Args:
        phase: One of PHASES.
        shapes: Those of the runs.
        allreduce_s: Returns the time of averaging all gradients of a step once, in s, from a
            measurement of communication; if it is given, the share of it that is exposed is the
            only coefficient of the exposed communication.
    """
    if phase == LOAD:
        together = any(shape.shares_loading for shape in shapes)
        return list(_LOAD_TOGETHER if together else _LOAD_ALONE)
    if phase == EXPOSED and allreduce_s is not None:
        share = ModelTerm(
            "share of the measured allreduce that is exposed",
            "",
            lambda s: s.steps * _several(s) * allreduce_s(s),
        )
        return [(share,)]
    return list(_OTHERS[phase])


def free_candidates(phase: str) -> list[Candidate]:
    """Returns a constant and one free term, for phases that no law fits.

    The performance model normal form of Calotoiu et al., "Using automated performance modeling to
    find scalability bugs in complex codes", SC 2013, with one term.
    """
    constant = _constant(f"{phase}, whatever the size")
    found: list[Candidate] = []
    for power, logs in product((0.0, *FREE_POWERS), FREE_LOGS):
        if power or logs:
            found.append((constant, _free_term(phase, power, logs)))
    return found


def _free_term(phase: str, power: float, logs: int) -> ModelTerm:
    words = [f"P^{power:.3g}"] if power else []
    words += [f"log2(P)^{logs}"] if logs else []
    return ModelTerm(
        f"{phase}, times {' '.join(words)}",
        "s",
        lambda s: s.num_ranks**power * log2(s.num_ranks) ** logs,
        is_free=True,
    )
