"""The features that describe a sample of P1B3, drawn and joined in CANDLE's order.

CANDLE joins one kind of features after another to the responses. On the way it draws columns and
noise from one random generator, drops the responses that lack features, and changes the order of
the others; all of this decides which samples its seed selects for training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from candle_p1.data.transforms import fill_missing
from candle_p1.errors import ParameterError
from p1b3_tables import Features, in_order, join_features, merge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from candle_p1.data.table import TextColumn
    from candle_p1.parameters.parameter_set import ParameterSet
    from p1b3_split import Responses

    Rows = NDArray[np.int64]
    Matrix = NDArray[np.float32]

LINE_KINDS = {
    "expression": ("expression",),
    "mirna": ("mirna",),
    "proteome": ("proteome", "kinome"),
    "categorical": (),
}
"""The kinds of features of cell lines, and the roles of their tables."""
DRUG_KINDS = {"descriptors": ("descriptors",), "latent": ("latent",), "noise": ()}
"""The same for drugs."""
ALL_LINE_KINDS = ("expression", "mirna", "proteome")
ALL_DRUG_KINDS = ("descriptors", "latent")
NUM_NOISE_FEATURES = 500
ONE_HOT = "line"


def tables_of(params: ParameterSet) -> list[str]:
    """Returns the roles of the tables that are used."""
    of_lines = [role for kind in _line_kinds(params) for role in LINE_KINDS[kind]]
    return of_lines + [role for kind in _drug_kinds(params) for role in DRUG_KINDS[kind]]


def draw_features(
    responses: Responses,
    rows: Rows,
    tables: dict[str, Features],
    params: ParameterSet,
    random: np.random.RandomState,
) -> tuple[Rows, list[Features], list[Features]]:
    """Draws columns of every kind of features, and selects the responses that have all kinds.

    Args:
        responses: The responses.
        rows: Those to select from.
        tables: The tables that are used, by role.
        params: Gives the kinds and feature_subsample.
        random: The generator for everything that is drawn.

    Returns:
        The selected responses, and the features of cell lines and of drugs, not yet scaled.
    """

    def drawn(roles: tuple[str, ...]) -> Features:
        table, *others = (tables[role] for role in roles)
        for other in others:
            table = table.beside(other)
        table.take_columns(params["feature_subsample"], random)
        return table

    of_lines, of_drugs = [], []
    for kind in _line_kinds(params):
        if kind == "categorical":
            of_lines.append(_one_hot(responses.line, rows))
        else:
            of_lines.append(drawn(LINE_KINDS[kind]))
            rows = merge(responses.line, rows, of_lines[-1].names)
    for kind in _drug_kinds(params):
        if kind == "noise":
            of_drugs.append(_noise(responses.drug, rows, random))
        else:
            of_drugs.append(drawn(DRUG_KINDS[kind]))
            rows = merge(responses.drug, rows, of_drugs[-1].names)
    return rows, of_lines, of_drugs


def scale_and_join(
    features: list[Features], column: TextColumn, trained_on: Rows | None, scaling: str
) -> NDArray[np.float32]:
    """Returns the scaled features of every name in a column: shape (names, features).

    The rows of names without features, which no sample uses, repeat those of another name. The
    scaling is fitted to the names of the training rows, or to the whole tables.
    """
    for each in features:
        fit_rows = None
        if trained_on is not None:
            names = [column.names[code] for code in np.unique(column.codes[trained_on])]
            fit_rows = each.rows_of(names)
        each.impute_and_scale(scaling, fit_rows)
    return join_features(features, column.names)


def _line_kinds(params: ParameterSet) -> list[str]:
    chosen: list[str] = params["cell_features"]
    return list(ALL_LINE_KINDS) if "all" in chosen else chosen


def _drug_kinds(params: ParameterSet) -> list[str]:
    chosen: list[str] = params["drug_features"]
    return list(ALL_DRUG_KINDS) if "all" in chosen else chosen


def _one_hot(line: TextColumn, rows: Rows) -> Features:
    """Returns the one-hot encoding of the cell lines of these responses, sorted as CANDLE does."""
    names = [line.names[code] for code in np.unique(line.codes[rows])]
    names.sort(key=lambda name: name.replace(":", "."))
    return one_hot(names)


def one_hot(names: list[str]) -> Features:
    """Returns the one-hot encoding of cell lines."""
    columns = [f"{ONE_HOT}:{name}" for name in names]
    return Features(names, np.eye(len(names), dtype=np.float32), columns, is_ready=True)


def _noise(drug: TextColumn, rows: Rows, random: np.random.RandomState) -> Features:
    """Returns normal noise for the drugs of these responses."""
    names = [drug.names[code] for code in in_order(drug.codes[rows])]
    values = random.normal(size=(len(names), NUM_NOISE_FEATURES)).astype(np.float32)
    columns = [f"noise:{i}" for i in range(NUM_NOISE_FEATURES)]
    return Features(names, values, columns, is_ready=True)


def prepared_by(features: list[Features]) -> tuple[list[str], Matrix, Matrix]:
    """Returns the names, the offsets and the scales of all inputs, once they are scaled."""
    names = ["LOG_CONCENTRATION", *(name for each in features for name in each.columns)]
    scaled_by = [each.scaled_by for each in features if each.scaled_by is not None]
    offsets = [np.zeros(1, np.float32), *(offset for offset, _ in scaled_by)]
    scales = [np.ones(1, np.float32), *(scale for _, scale in scaled_by)]
    return names, np.concatenate(offsets), np.concatenate(scales)


def features_again(
    read: Callable[[str], Features], params: ParameterSet, names: Sequence[str]
) -> tuple[list[Features], list[Features]]:
    """Returns the features of cell lines and of drugs that were inputs of a run, not yet scaled.

    Args:
        read: Returns the table with a role.
        params: The parameters of the run.
        names: The names of the inputs.

    Raises:
        ParameterError: They were drawn for the drugs of the run.
    """
    if "noise" in _drug_kinds(params):
        raise ParameterError("drug_features noise: it was drawn for the drugs of the run only")
    place = {name: i for i, name in enumerate(names)}

    def of(roles: Sequence[str]) -> Features:
        if not roles:
            begin = f"{ONE_HOT}:"
            return one_hot([name.removeprefix(begin) for name in names if name.startswith(begin)])
        table, *others = map(read, roles)
        for other in others:
            table = table.beside(other)
        found = [i for i, name in enumerate(table.columns) if name in place]
        table.select(np.array(sorted(found, key=lambda i: place[table.columns[i]]), np.int64))
        table.values = fill_missing(np.array(table.values))
        return table

    lines, drugs = _line_kinds(params), _drug_kinds(params)
    return [of(LINE_KINDS[kind]) for kind in lines], [of(DRUG_KINDS[kind]) for kind in drugs]
