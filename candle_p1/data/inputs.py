"""How the inputs of a model were prepared, so that new samples can be prepared likewise.

``inputs.json`` stands beside the saved model of a run. docs/running.md describes it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    ValidationError,
    model_validator,
)
from typing_extensions import Self

from candle_p1.data.table import repeated
from candle_p1.errors import DataError
from candle_p1.files import read_json

INPUTS_NAME = "inputs.json"
Floats = Annotated[
    NDArray[np.float32],
    BeforeValidator(lambda values: np.asarray(values, np.float32)),
    PlainSerializer(lambda values: values.tolist()),
]
"""float32 numbers, which are exact in JSON."""
Doubles = Annotated[
    NDArray[np.float64],
    BeforeValidator(lambda values: np.asarray(values, np.float64)),
    PlainSerializer(lambda values: values.tolist()),
]


class Target(BaseModel):
    """What a regression predicts.

    Attributes:
        name: Its name.
        unit: The unit of its values in the files.
        factor: By what an output of the model has to be multiplied to be in this unit.
    """

    name: str
    unit: str
    factor: float = 1.0

    @property
    def column(self) -> str:
        """What its column is called."""
        return f"{self.name}_{self.unit}"


class Inputs(BaseModel):
    """What the inputs of a model went through.

    Attributes:
        benchmark: The benchmark's name.
        features: The names of the features in the order of the model's inputs; None: unknown.
        classes: The names of the classes in the order of the model's outputs; None: unknown, or
            there are none.
        target: What a regression predicts.
        log2: Whether the files had been made by taking log2(x + 1) of the table's values.
        offset: Is subtracted from each feature, float32, shape (features,).
        scale: By what each is then divided, likewise.
        scaling: What these were fitted by: "maxabs", "minmax", "std" or "none".
        fitted_to: To which samples: "all", as in CANDLE, or "train".
        mean_target: The mean target of the training samples, float64, shape (outputs,): shares of
            classes, or the values that a naive predictor returns. None: there are several outputs.
        split: The numbers of samples for training, validation and testing, and the parameters that
            decided which they are.
        versions: The versions of the packages that trained the model.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    benchmark: str
    features: list[str] | None = None
    classes: list[str] | None = None
    target: Target | None = None
    log2: bool = False
    offset: Floats
    scale: Floats
    scaling: str
    fitted_to: Literal["all", "train"]
    mean_target: Doubles | None = None
    split: dict[str, Any] = {}
    versions: dict[str, str] = {}

    @model_validator(mode="after")
    def _fits(self) -> Self:
        shape = self.offset.shape
        if len(shape) != 1 or self.scale.shape != shape or not np.all(self.scale):
            raise ValueError("offset and scale are not two lists of the same length, without 0")
        if self.features is not None and len(self.features) != len(self.offset):
            raise ValueError(f"{len(self.features)} features have {len(self.offset)} offsets")
        if self.features is not None and (twice := repeated(self.features)):
            raise ValueError(f"several features are called {twice[0]!r}")
        return self

    @classmethod
    def read(cls, path: Path) -> Inputs:
        """Reads ``inputs.json``.

        Raises:
            DataError: It is missing or damaged.
        """
        try:
            return cls.model_validate(read_json(path))
        except OSError as error:
            raise DataError(f"the file cannot be read: {error.strerror}", path) from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            problem = f"it does not describe a model's inputs: {where} {first['msg']}".strip()
            raise DataError(problem, path) from error
        except ValueError as error:
            raise DataError(f"it is not JSON: {error}", path) from error

    def text(self) -> str:
        """Returns the content of ``inputs.json``."""
        return json.dumps(self.model_dump(), indent=1) + "\n"

    def describe(self) -> dict[str, Any]:
        """Returns what the record says: the classes and, of the features, number and digest."""
        names = None if self.features is None else "\n".join(self.features).encode()
        return {
            "num_features": len(self.offset),
            "features_sha256": None if names is None else hashlib.sha256(names).hexdigest(),
            "classes": self.classes,
        }

    def apply(self, rows: NDArray[np.float32]) -> None:
        """Scales rows in place, as those of the training were: float32, shape (rows, features)."""
        rows -= self.offset
        rows /= self.scale
