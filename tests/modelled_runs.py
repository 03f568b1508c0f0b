"""Synthetic observations of runs that follow known laws, for tests of models."""

from math import log, sqrt

from candle_p1.modelling import laws
from candle_p1.modelling.observations import Observation

START_S, BYTES_PER_S, LOADER_DEVIATION_S, SAMPLE_S, SENT_BYTES_PER_S = 10.0, 6e6, 2.0, 2e-3, 2e9
WATTS = 120.0
SENDING = "rate at which gradients are averaged, as far as back-propagation does not hide it"
TRUE = {
    "start-up": START_S,
    "rate at which a rank reads and parses": BYTES_PER_S,
    "standard deviation of the ranks' loading": LOADER_DEVIATION_S,
    "computing, for each sample": SAMPLE_S,
    SENDING: SENT_BYTES_PER_S,
    "power of a rank": WATTS,
}
"""The parameters of `lawful_times`, by their names in models."""


def shape_of(num_ranks, **changes):
    """Returns the shape of a weak-scaling run of 8 epochs on nodes of 64 cores."""
    facts = {"num_ranks": num_ranks, "ranks_on_node": min(num_ranks, 8), "cores_per_node": 64}
    facts |= {"threads": 1, "load_threads": 1, "shares_loading": False}
    facts |= {"epochs": 8, "steps_per_epoch": 50, "batch_size": 20}
    facts |= {"file_bytes": 600_000_000, "weight_bytes": 60_000_000}
    return laws.JobShape(**facts | changes)


def lawful_times(shape):
    """Returns the seconds of each phase, without scatter."""
    ranks = shape.num_ranks
    sent_bytes = 2 * shape.weight_bytes * (ranks - 1) / ranks
    return dict.fromkeys(laws.PHASES, 0.0) | {
        laws.STARTUP: START_S,
        laws.LOAD: shape.file_bytes / BYTES_PER_S,
        laws.WAIT: LOADER_DEVIATION_S * sqrt(2 * log(ranks)),
        laws.COMPUTE: shape.samples * SAMPLE_S,
        laws.FIRST_STEP: 5.0,
        laws.EXPOSED: shape.steps * sent_bytes / SENT_BYTES_PER_S,
        laws.EVALUATE: 1.0,
        laws.REST: 2.0,
    }


def lawful_run(random, num_ranks, noise=0.05, times=lawful_times, **changes):
    """Returns a run whose phases scatter, half of it together."""
    shape = shape_of(num_ranks, **changes)
    together = noise * random.standard_normal()
    phases_s = {
        name: max(0.0, seconds * (1 + (together + noise * random.standard_normal()) / sqrt(2)))
        for name, seconds in times(shape).items()
    }
    watts = {"": WATTS * num_ranks * (1 + 0.02 * random.standard_normal())}
    return Observation(None, shape, phases_s, sum(phases_s.values()), watts, "simulated", None)
