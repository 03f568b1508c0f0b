"""Tables of tumor cases for training and testing: ``case_id,cancer_type,<features>``."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from candle_p1.data.folds import hold_out
from candle_p1.data.names import match, place_features
from candle_p1.data.reader import Reader
from candle_p1.data.samples import pandas_sample
from candle_p1.data.table import CsvLayout, Table, repeated
from candle_p1.data.transforms import order_columns, scale_features
from candle_p1.errors import DataError, ParameterError
from candle_p1.parameters.parameter_set import ParameterSet

LAYOUT = CsvLayout(header=True, text_columns=("case_id", "cancer_type"))


@dataclass
class Part:
    """Some cases of a file, such as those to train on.

    Attributes:
        x: The features of all cases of the file, float32, shape (cases, features).
        y: Their types, as an index into `Cases.types`, int64, shape (cases,).
        rows: The cases of this part, in order, int64.
    """

    x: NDArray[np.float32]
    y: NDArray[np.int64]
    rows: NDArray[np.int64]


@dataclass
class Cases:
    """The cases of the files.

    Attributes:
        x: The features of each file, by role: float32, shape (cases, features).
        y: The types of its cases, as an index into `types`: int64, shape (cases,).
        types: The cancer types in any file, sorted.
        features: The names of the features.
    """

    x: dict[str, NDArray[np.float32]]
    y: dict[str, NDArray[np.int64]]
    types: list[str]
    features: list[str]

    @classmethod
    def read(cls, reader: Reader, params: ParameterSet, uses_types: bool = True) -> Cases:
        """Reads the files; in cross-validation, the test cases are those of the fold held out.

        Checks the types if the model uses them.

        Raises:
            DataError: They cannot be read, or do not have the same features; a case has two types,
                or fewer than half of the types in another file are in the training file.
        """
        train = reader.read("train", LAYOUT)
        tables = {"train": train}
        for role in sorted({"validation", "test"} & reader.files.paths.keys()):
            table = tables[role] = reader.read(role, LAYOUT)
            columns, notes = place_features(train.columns, table.columns, reader.files.paths[role])
            if columns is not None:
                values = order_columns(table.values, columns)
                table = tables[role] = replace(table, values=values, columns=train.columns)
            for note in notes:
                reader.warn(f"{reader.files.paths[role].name}: {note}")
            _check_names(train, table, reader, role, uses_types)
        if params["folds"]:
            ids, kinds = (train.text[name].values() for name in LAYOUT.text_columns)
            labels = kinds if uses_types else [""] * len(ids)
            tables["train"], tables["test"] = hold_out(reader, params, train, labels, ids)
        names = [table.text["cancer_type"].names for table in tables.values()]
        types = sorted(set().union(*names))
        return cls(
            {role: table.values for role, table in tables.items()},
            {role: _indices(table, types) for role, table in tables.items()},
            types,
            train.columns,
        )

    def parts(self, params: ParameterSet, *, validates_on_last: bool) -> tuple[Part, Part, Part]:
        """Returns the cases for training, validation and test.

        Training and test cases have the order of their file, or are shuffled as in CANDLE.
        Validation has its own file; in cross-validation, it is the part for testing; else the
        fraction val_split of the training cases.

        Raises:
            ParameterError: The fraction leaves no cases.
        """

        def part(role: str, shuffle: bool) -> Part:
            num = len(self.x[role])
            rows = pandas_sample(num, 1.0, params["rng_seed"]) if shuffle else np.arange(num)
            return Part(self.x[role], self.y[role], rows)

        train, test = (part(role, params["shuffle"]) for role in ("train", "test"))
        if "validation" in self.x:
            validation = part("validation", shuffle=False)
        elif params["folds"]:
            validation = test
        else:
            num_cases, fraction = len(train.rows), params["val_split"]
            num = int(num_cases * (fraction or 0))
            if not 0 < num < num_cases:
                raise ParameterError(
                    f"val_split {fraction} leaves {num} of {num_cases} training cases for"
                    f" validation and {num_cases - num} for training; choose a fraction such as 0.1"
                )
            order = np.roll(train.rows, num) if validates_on_last else train.rows
            validation = replace(train, rows=order[:num])
            train = replace(train, rows=order[num:])
        return train, validation, test

    def take_first(self, num_cases: int) -> None:
        """Keeps the first cases of each file, as CANDLE's train_samples does; 0 means all."""
        if num_cases:
            self.x = {role: x[:num_cases] for role, x in self.x.items()}
            codes = [y[:num_cases] for y in self.y.values()]
            present, indices = np.unique(np.concatenate(codes), return_inverse=True)
            self.types = [self.types[i] for i in present]
            ends = np.cumsum([len(each) for each in codes])[:-1]
            self.y = dict(zip(self.y, np.split(indices, ends), strict=True))

    def select(self, features: list[int]) -> None:
        """Keeps some features, given by index, in this order."""
        self.x = {role: x[:, features] for role, x in self.x.items()}
        self.features = [self.features[i] for i in features]

    def select_first(self, num_features: int) -> None:
        """Keeps the first features, as CANDLE's feature_subsample does; 0 means all."""
        if 0 < num_features < len(self.features):
            self.select(list(range(num_features)))

    def scale(
        self, params: ParameterSet, train: Part
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Scales the features in place, fitted to all cases or only to those for training.

        Returns:
            The offset and the scale of each feature, as `scale_features` does.
        """
        fit_to = [train.x[train.rows]] if params["scaling_fit"] == "train" else None
        return scale_features(params["scaling"], *self.x.values(), fit_to=fit_to)

    def one_hot(self, y: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the one-hot encoding of types, float32, shape (cases, types)."""
        return np.eye(len(self.types), dtype=np.float32)[y]


def _check_names(train: Table, other: Table, reader: Reader, role: str, uses_types: bool) -> None:
    ids, types = ((other.text[name], train.text[name].names) for name in LAYOUT.text_columns)
    cases = match(reader, "cases", (role, "train"), *ids).facts
    if cases.num_matched:
        reader.warn(
            f"{cases.num_matched:,} of {cases.num_left:,} {role} cases are training cases, too: the"
            f" {role} metrics are those of samples that the model was trained on"
        )
    if uses_types:
        match(reader, "types", (role, "train"), *types, "no case trains their outputs")
        values = [[column.values() for column in table.text.values()] for table in (train, other)]
        rows = {row for columns in values for row in zip(*columns, strict=True)}
        torn = repeated(case for case, *_ in rows)
        if torn:
            raise DataError(
                f"the case {min(torn)!r} has several types, here or in"
                f" {reader.files.paths[role]}: correct its rows",
                reader.files.paths["train"],
            )


def _indices(table: Table, types: list[str]) -> NDArray[np.int64]:
    column = table.text["cancer_type"]
    return np.array([types.index(name) for name in column.names])[column.codes]
