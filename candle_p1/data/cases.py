"""Tables of tumor cases for training and testing: ``case_id,cancer_type,<features>``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from candle_p1.data.names import match
from candle_p1.data.reader import Reader
from candle_p1.data.samples import pandas_sample
from candle_p1.data.table import CsvLayout, Table, repeated
from candle_p1.data.transforms import scale_features
from candle_p1.errors import DataError, ParameterError

LAYOUT = CsvLayout(header=True, text_columns=("case_id", "cancer_type"))


@dataclass
class Cases:
    """The cases of both files.

    Attributes:
        x_train: Features, float32, shape (cases, features).
        x_test: The same for the test cases.
        y_train: Index into `types`, int64, shape (cases,).
        y_test: The same for the test cases.
        types: The cancer types in either file, sorted.
        features: The names of the features.
    """

    x_train: NDArray[np.float32]
    x_test: NDArray[np.float32]
    y_train: NDArray[np.int64]
    y_test: NDArray[np.int64]
    types: list[str]
    features: list[str]

    @classmethod
    def read(cls, reader: Reader, uses_types: bool = True) -> Cases:
        """Reads the files with the roles train and test; checks the types if the model uses them.

        Raises:
            DataError: They cannot be read, or do not have the same features; a case has two types,
                or fewer than half of the types in the test file are in the training file.
        """
        train, test = reader.read("train", LAYOUT), reader.read("test", LAYOUT)
        if test.columns != train.columns:
            raise DataError(
                f"its {len(test.columns)} features are not the {len(train.columns)} of"
                f" {reader.files.paths['train']}, or not in the same order",
                reader.files.paths["test"],
                1,
            )
        _check_names(train, test, reader, uses_types)
        types = sorted({*train.text["cancer_type"].names, *test.text["cancer_type"].names})
        return cls(
            train.values,
            test.values,
            _indices(train, types),
            _indices(test, types),
            types,
            train.columns,
        )

    def orders(self, shuffle: bool, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the order of the cases of each file: the file's, or shuffled as in CANDLE."""
        train, test = (
            pandas_sample(len(x), 1.0, seed) if shuffle else np.arange(len(x))
            for x in (self.x_train, self.x_test)
        )
        return train, test

    def take_first(self, num_cases: int) -> None:
        """Keeps the first cases of each file, as CANDLE's train_samples does; 0 means all."""
        if num_cases:
            self.x_train, self.x_test = self.x_train[:num_cases], self.x_test[:num_cases]
            codes = self.y_train[:num_cases], self.y_test[:num_cases]
            present, indices = np.unique(np.concatenate(codes), return_inverse=True)
            self.types = [self.types[i] for i in present]
            self.y_train, self.y_test = np.split(indices, [len(self.x_train)])

    def select(self, features: list[int]) -> None:
        """Keeps some features, given by index, in this order."""
        self.x_train, self.x_test = self.x_train[:, features], self.x_test[:, features]
        self.features = [self.features[i] for i in features]

    def select_first(self, num_features: int) -> None:
        """Keeps the first features, as CANDLE's feature_subsample does; 0 means all."""
        if 0 < num_features < len(self.features):
            self.select(list(range(num_features)))

    def scale(
        self, scaling: str, train_rows: slice | NDArray[np.int64] | None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Scales the features in place, fitted to all cases or only to some training cases.

        Returns:
            The offset and the scale of each feature, as `scale_features` does.
        """
        fit_to = None if train_rows is None else [self.x_train[train_rows]]
        return scale_features(scaling, self.x_train, self.x_test, fit_to=fit_to)

    def one_hot(self, y: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the one-hot encoding of types, float32, shape (cases, types)."""
        return np.eye(len(self.types), dtype=np.float32)[y]


def num_validation(num_cases: int, fraction: float | None) -> int:
    """Returns how many training cases are used for validation.

    Raises:
        ParameterError: There would be none, or none left to train on.
    """
    num = int(num_cases * (fraction or 0))
    if not 0 < num < num_cases:
        raise ParameterError(
            f"val_split {fraction} leaves {num} of {num_cases} training cases for validation and"
            f" {num_cases - num} for training; choose a fraction such as 0.1"
        )
    return num


def _check_names(train: Table, test: Table, reader: Reader, uses_types: bool) -> None:
    ids, types = ((test.text[name], train.text[name].names) for name in LAYOUT.text_columns)
    cases = match(reader, "cases", ("test", "train"), *ids).facts
    if cases.num_matched:
        reader.warn(
            f"{cases.num_matched:,} of {cases.num_left:,} test cases are training cases, too: the"
            " model is tested on samples that it was trained on"
        )
    if uses_types:
        match(reader, "types", ("test", "train"), *types, "no case trains their outputs")
        values = [[column.values() for column in table.text.values()] for table in (train, test)]
        rows = {row for columns in values for row in zip(*columns, strict=True)}
        torn = repeated(case for case, *_ in rows)
        if torn:
            raise DataError(
                f"the case {min(torn)!r} has several types, here or in"
                f" {reader.files.paths['test']}: correct its rows",
                reader.files.paths["train"],
            )


def _indices(table: Table, types: list[str]) -> NDArray[np.int64]:
    column = table.text["cancer_type"]
    return np.array([types.index(name) for name in column.names])[column.codes]
