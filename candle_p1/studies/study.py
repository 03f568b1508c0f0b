"""Studies: what is varied, and at which sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from candle_p1.errors import ParameterError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


@dataclass(frozen=True)
class Variant:
    """Parameters that change together.

    Attributes:
        name: As it stands in the names of its runs.
        flags: The parameters, by name; none are the study's own.
    """

    name: str
    flags: Mapping[str, Any]


@dataclass(frozen=True)
class Size:
    """A study at one size: what is crossed to give its points, and how often each is run.

    Attributes:
        ranks: Numbers of ranks.
        repeats: Runs of each point.
        minutes: Time limit of a run.
        threads: OMP_NUM_THREADS of each rank, one or several; none is left to the rank.
        flags: Parameters of all runs.
        vary: Values of the parameters that are varied, by name.
        environment: Environment variables with their values, one or several.
        variants: Sets of parameters; none is one empty set without a name.
    """

    ranks: Sequence[int]
    repeats: int
    minutes: int
    threads: Sequence[int]
    flags: Mapping[str, Any]
    vary: Mapping[str, Sequence[Any]]
    environment: Mapping[str, Sequence[str]]
    variants: Sequence[Variant]

    @property
    def varied(self) -> set[str]:
        """The names of the parameters in which runs differ."""
        return {*self.vary, *(name for variant in self.variants for name in variant.flags)}


@dataclass(frozen=True)
class Study:
    """A study.

    Attributes:
        name: The name of its file.
        path: Its file.
        title: What it finds out.
        shows: What of the paper it repeats or belongs to, such as "Figure 6".
        benchmarks: What is trained, as `find_benchmark` takes it.
        seed: Of the order of the runs.
        sizes: By name.
    """

    name: str
    path: Path
    title: str
    shows: Sequence[str]
    benchmarks: Sequence[str]
    seed: int
    sizes: Mapping[str, Size]

    def size(self, name: str | None = None) -> tuple[str, Size]:
        """Returns a size with its name; None is the first one.

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
