"""A measuring job that times convolutions in each of their forms.

``python -m candle_p1.bench.convolutions_worker DIRECTORY``.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from candle_p1.bench.convolutions import (
    ConvolutionJob,
    ConvolutionOutcome,
    TimedConvolution,
)
from candle_p1.bench.roofline import fastest_rates
from candle_p1.bench.worker import seconds_of, serve
from candle_p1.distributed import devices
from candle_p1.distributed.backend import AUTO
from candle_p1.distributed.engines import make_engine
from candle_p1.errors import SetupError
from candle_p1.models import fast

if TYPE_CHECKING:
    from candle_p1.distributed.comm import Communicator
    from candle_p1.models.fast.convolution_costs import Convolution

LEAST_OF_TILES = 16
"""Channels and filters from which on tiles are timed; of fewer, they compute with zeros mostly."""


def measure(job: ConvolutionJob, comm: Communicator) -> ConvolutionOutcome:
    """Returns the times of a step of each convolution in each form.

    Raises:
        SetupError: There are no fast forms for this backend.
    """
    engine = make_engine(AUTO, comm)
    device = devices.configure(comm, engine, gpus=[], deterministic=True)
    if not fast.exist(on_cpu=not device.is_gpu):
        raise SetupError("the forms of convolutions are for TensorFlow on CPUs: make setup")
    times = [_time(each, job.num_calls, device.threads) for each in job.convolutions]
    return ConvolutionOutcome(device.threads, times)


def _time(of: Convolution, num_calls: int, num_threads: int) -> TimedConvolution:
    """Times a convolution in each form."""
    from candle_p1.models.fast.convolution_steps import step_of

    before = fastest_rates(num_threads)
    forms_s = {
        form: seconds_of(step_of(form, of), num_calls, min)
        for form in of.forms
        if form != "tiles" or min(of.channels, of.filters) >= LEAST_OF_TILES
    }
    gc.collect()
    return TimedConvolution(before.faster(fastest_rates(num_threads)), forms_s)


if __name__ == "__main__":
    serve(measure)
