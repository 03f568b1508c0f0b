"""What the job of a comparison of power readings measures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from candle_p1.bench.job import Job

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class PowerJob(Job):
    """What the job trains, and for how long.

    Attributes:
        benchmark: Its name, path or module.
        flags: Of the benchmark.
        window_s: The length of a window.
        num_rounds: Rounds of one window that is sampled and one that is not.
        power_hz: Samples per second.
    """

    worker: ClassVar[str] = "candle_p1.bench.power_worker"

    benchmark: str
    flags: Sequence[str]
    window_s: float = 10.0
    num_rounds: int = 6
    power_hz: float = 10.0

    @property
    def name(self) -> str:
        """What is measured."""
        return "sampling of power"


@dataclass(frozen=True)
class Window:
    """Training steps one after the other.

    Attributes:
        sampled: Whether the power was sampled.
        num_steps: The steps.
        seconds: Their time.
        cpu_share: The share of one core that sampling has taken; None where it was not sampled.
        num_samples: Samples of each channel.
        energies_j: Of each GPU the energy by "counter" and by "power"; None where it is absent.
    """

    sampled: bool
    num_steps: int
    seconds: float
    cpu_share: float | None = None
    num_samples: int = 0
    energies_j: dict[str, dict[str, float | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class PowerOutcome:
    """What the job has measured.

    Attributes:
        windows: In their order; as dictionaries where they come from a file.
        sources: The names of what was sampled, each with its number of channels.
        absent: What is not there, and why.
        gpus: The names of the GPUs whose energies are compared, by device.
        device: "cpu", or the GPU's name.
        backend: Keras's.
        threads: Of one operation.
    """

    windows: list[Window]
    sources: dict[str, int]
    absent: dict[str, str]
    gpus: dict[str, str]
    device: str
    backend: str
    threads: int
