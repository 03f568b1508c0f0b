#!/usr/bin/env python
"""NT3, as CANDLE drivers and launchers start it: ``mpirun -np 2 python nt3_baseline_keras2.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from candle_p1 import train
from nt3 import BENCHMARK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from candle_p1.params import EditableParameters


def initialize_parameters(default_model: str = "nt3_default_model.txt") -> EditableParameters:
    """Returns the parameters of the file and the command line, to be overlaid at will."""
    return BENCHMARK.initialize_parameters(default_model)


def run(params: Mapping[str, Any]) -> Any:
    """Trains; returns the ``keras.callbacks.History``, with metrics over all ranks."""
    return train.run(BENCHMARK, params)


def main() -> None:
    """Runs from the command line."""
    train.main(BENCHMARK)


if __name__ == "__main__":
    main()
