"""Studies: what is varied, and at which sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from candle_p1.errors import ParameterError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

OUTPUT = "output"
"""The directory for the results of studies, unless the user names another one."""


@dataclass(frozen=True)
class StudyVariant:
    """Parameters that change together.

    Attributes:
        name: Part of the names of its runs; "" for the only variant of a study without any.
        flags: The parameters, by name.
    """

    name: str
    flags: Mapping[str, Any]


@dataclass(frozen=True)
class Size:
    """A study at one size: what is crossed to give its points, and how often each is run.

    Attributes:
        ranks: Numbers of ranks.
        repeats: Number of runs of each point.
        minutes: Time limit of a run.
        threads: Values of OMP_NUM_THREADS for each rank; empty leaves the number to the rank.
        flags: Parameters of all runs.
        vary: Values of each parameter that is varied, by name.
        environment: Values of each environment variable, one or several, by name.
        variants: Sets of parameters, at least one.
    """

    ranks: Sequence[int]
    repeats: int
    minutes: int
    threads: Sequence[int]
    flags: Mapping[str, Any]
    vary: Mapping[str, Sequence[Any]]
    environment: Mapping[str, Sequence[str]]
    variants: Sequence[StudyVariant]

    @property
    def varied(self) -> set[str]:
        """The names of the parameters in which runs differ."""
        return {*self.vary, *(name for variant in self.variants for name in variant.flags)}


@dataclass(frozen=True)
class Study:
    """A study.

    Attributes:
        name: The name of its file, without the suffix.
        path: Its file.
        title: The question it answers.
        shows: The parts of the paper it reproduces or belongs to, such as "Figure 6".
        benchmarks: The benchmarks to train, as `find_benchmark` takes them.
        seed: Seed of the order of the runs.
        sizes: Its sizes by name; the first one is the default.
    """

    name: str
    path: Path
    title: str
    shows: Sequence[str]
    benchmarks: Sequence[str]
    seed: int
    sizes: Mapping[str, Size]

    def size(self, name: str | None = None) -> tuple[str, Size]:
        """Returns a size with its name; None selects the first one.

        Raises:
            ParameterError: The study has no such size.
        """
        name = next(iter(self.sizes)) if name is None else name
        if name not in self.sizes:
            raise ParameterError(
                f"{self.name} has no size {name!r}{did_you_mean(name, self.sizes)}; choose one of"
                f" {', '.join(self.sizes)}"
            )
        return name, self.sizes[name]
