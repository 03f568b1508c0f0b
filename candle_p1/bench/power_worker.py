"""The job of a comparison of power readings: trains a benchmark, and samples every other window.

``python -m candle_p1.bench.power_worker DIRECTORY``. In one process and one training, because jobs
differ from each other by more than the percent that is looked for.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING

import keras
import numpy as np

from candle_p1.bench.power_job import PowerJob, PowerOutcome, Window
from candle_p1.bench.training import one_epoch, prepare_training
from candle_p1.bench.worker import serve
from candle_p1.benchmark import find_benchmark
from candle_p1.data.batches import TrainBatches
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.instrument.power.choose import SENSORS
from candle_p1.instrument.power.gpus import JobGpus, visible_here
from candle_p1.instrument.power.nvml import NvmlSource
from candle_p1.instrument.power.replay import ReplaySource
from candle_p1.instrument.power.sampler import Sampler
from candle_p1.instrument.power.source import SensorError
from candle_p1.records.power_file import write_traces
from candle_p1.records.power_trace import Channel, Trace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from candle_p1.distributed.comm import Communicator
    from candle_p1.instrument.power.source import PowerSource

WARM_UP_STEPS = 3
"""The first one traces the model."""
SETTLE_S = 2.0
"""Trained before the first window: NVML's power is the mean of the last second."""
NUM_SIMULATED = 4
"""Channels of the recording that is sampled where there is no sensor."""


def measure(directory: Path, comm: Communicator) -> PowerOutcome:
    """Returns what was measured.

    Raises:
        CandleError: The benchmark cannot be trained.
    """
    job = PowerJob.read(directory)
    benchmark = find_benchmark(job.benchmark)
    params = benchmark.bind(benchmark.initialize_parameters(argv=job.flags))
    training = prepare_training(benchmark, one_epoch(params), SerialCommunicator())
    device, data, plan, (model,), _ = training
    batches = TrainBatches(data.train, plan, seed=params["rng_seed"], rank=0, shuffle=True)
    sensors = _Sensors(directory, job)
    windows = _Windows(job, sensors)
    # As many steps as the windows take: they are counted in seconds.
    endless = (batches[step % len(batches)] for step in itertools.count())
    model.fit(endless, steps_per_epoch=2**31, verbose=0, callbacks=[windows])
    return PowerOutcome(
        windows=windows.done,
        sources=sensors.names,
        absent=sensors.absent,
        gpus=sensors.gpus,
        device=device.name,
        backend=keras.backend.backend(),
        threads=device.threads,
    )


class _Sensors:
    """Opens what is to be sampled, for every window anew.

    Attributes:
        names: The sources and their numbers of channels.
        absent: What is not there, and why.
        gpus: The GPUs that are read by both their readings.
    """

    def __init__(self, directory: Path, job: PowerJob) -> None:
        self._recording = directory / "recording.csv"
        self._duration_s = 2 * job.window_s + 600  # of a step that takes long
        self.names: dict[str, int] = {}
        self.absent: dict[str, str] = {}
        self.gpus: dict[str, str] = {}

    def open(self) -> list[PowerSource]:
        """Returns the sources that are there; a recording where there is none."""
        ranks = JobGpus([visible_here()])
        sources: list[PowerSource] = []
        for name, make in SENSORS.items():
            try:
                # Both readings of a GPU cost more than a run, which takes one.
                source = NvmlSource(ranks, ("energy", "power")) if name == "nvml" else make(ranks)
            except SensorError as error:
                self.absent[name] = str(error)
                continue
            for channel, reason in source.absent.items():
                self.absent[f"{name} {channel.device}"] = reason
            sources.append(source)
            self.names[name] = len(source.channels)
        if not any(source.channels for source in sources):
            if not self._recording.exists():
                _simulate(self._recording, self._duration_s)
            sources = [ReplaySource(self._recording)]
            self.names = {"replay": len(sources[0].channels)}
        self.gpus = {
            channel.device: channel.label
            for source in sources
            for channel in source.channels
            if channel.source == NvmlSource.name
        }
        return sources


def _simulate(path: Path, duration_s: float) -> None:
    """Writes a recording of GPUs at a constant power."""
    times_s = np.array([0.0, duration_s])
    traces = [
        Trace(
            Channel(f"gpu:{number}", f"GPU {number}", "gpu", "simulated", "power"),
            times_s,
            np.array([300.0, 300.0]),
            duration_s,
        )
        for number in range(NUM_SIMULATED)
    ]
    write_traces(path, traces, node=0, start_s=0.0)


class _Windows(keras.callbacks.Callback):  # type: ignore[misc]
    """Divides the training into windows, of which every other one is sampled.

    The two windows of a round change places from round to round, so that a steady drift of the
    machine hits both alike.

    Attributes:
        done: The windows that have ended.
    """

    def __init__(self, job: PowerJob, sensors: _Sensors) -> None:
        super().__init__()
        self._job, self._sensors = job, sensors
        self._order = iter([k % 4 in (0, 3) for k in range(2 * job.num_rounds)])
        self._num_steps = 0
        self._sampler: Sampler | None = None
        self._running = False
        self.done: list[Window] = []

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        self._start_s = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        assert logs is not None
        float(logs["loss"])  # waits for the step, where it is asynchronous
        now_s = time.perf_counter()
        self._num_steps += 1
        if not self._running:
            if self._num_steps == WARM_UP_STEPS:
                self._start_s = now_s
            if self._num_steps > WARM_UP_STEPS and now_s - self._start_s >= SETTLE_S:
                self._begin(next(self._order))
        elif now_s - self._start_s >= self._job.window_s:
            self._end(now_s)
            following = next(self._order, None)
            if following is None:
                self.model.stop_training = True
            else:
                self._begin(following)

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        if self._sampler:
            self._sampler.stop()

    def _begin(self, sampled: bool) -> None:
        if sampled:
            self._sampler = Sampler(self._sensors.open(), self._job.power_hz)
            self._sampler.start()
        self._running, self._num_steps = True, 0
        self._start_s = time.perf_counter()

    def _end(self, now_s: float) -> None:
        sampler, self._sampler = self._sampler, None
        window = {"num_steps": self._num_steps, "seconds": now_s - self._start_s}
        if sampler is None:
            self.done.append(Window(False, **window))  # type: ignore[arg-type]
            return
        sampler.stop()
        traces = sampler.traces()
        self.done.append(
            Window(
                True,
                **window,  # type: ignore[arg-type]
                cpu_share=sampler.overhead,
                num_samples=max((len(trace.times_s) for trace in traces), default=0),
                energies_j=dict(_energies_j(traces, self._start_s, now_s)),
            )
        )


def _energies_j(
    traces: list[Trace], begin_s: float, end_s: float
) -> Iterator[tuple[str, dict[str, float | None]]]:
    """Yields the energies of each NVIDIA GPU by both its readings."""
    by_gpu: dict[str, dict[str, float | None]] = {}
    for trace in traces:
        channel = trace.channel
        if channel.source == NvmlSource.name:
            reading = "counter" if channel.reading == "energy" else "power"
            by_gpu.setdefault(channel.device, {})[reading] = trace.energy(begin_s, end_s).energy_j
    yield from by_gpu.items()


if __name__ == "__main__":
    serve(measure)
