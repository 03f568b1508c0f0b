"""The dose responses for training, validation and testing, by CANDLE's rules.

Rows are selected by index. They are those that CANDLE's code selects from the same files with the
same seed and pandas until 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from candle_p1.data.samples import pandas_sample
from candle_p1.errors import ParameterError
from p1b3_tables import in_order, merge, names_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from candle_p1.data.table import Table, TextColumn
    from candle_p1.parameters.parameter_set import ParameterSet

    Rows = NDArray[np.int64]

SHARES_BY_GROWTH = (
    (-np.inf, 0.0, 1.0),
    (0.0, 50.0, 0.7),
    (50.0, 100.0, 0.18),
    (100.0, np.inf, 0.01),
)
"""Naive balancing: the share kept of the responses with growth from … to … percent."""


@dataclass(frozen=True)
class Split:
    """Rows of the responses, each int64, shape (samples,).

    Attributes:
        train: The training samples.
        validation: The validation samples.
        test: The test samples, whose drugs are in neither of the others.
    """

    train: Rows
    validation: Rows
    test: Rows


@dataclass(frozen=True)
class Responses:
    """The dose responses.

    Attributes:
        line: The cell lines.
        drug: The drugs, by NSC number.
        log_concentration: log10 of the molar concentration, float32, shape (responses,).
        growth: Percent of an untreated culture, float32, shape (responses,).
    """

    line: TextColumn
    drug: TextColumn
    log_concentration: NDArray[np.float32]
    growth: NDArray[np.float32]

    @classmethod
    def of(cls, table: Table) -> Responses:
        """Returns the columns of the file."""
        column = dict(zip(table.columns, table.values.T, strict=True))
        return cls(
            table.text["CELLNAME"],
            table.text["NSC"],
            column["LOG_CONCENTRATION"],
            column["GROWTH"],
        )


def choose(responses: Responses, params: ParameterSet) -> Rows:
    """Returns the responses in the range of concentrations, balanced if requested."""
    low, high = params["min_logconc"], params["max_logconc"]
    in_range = (responses.log_concentration >= low) & (responses.log_concentration <= high)
    rows = np.flatnonzero(in_range & ~np.isnan(responses.growth))
    if params["subsample"] != "naive_balancing":
        return rows
    growth = responses.growth[rows]
    parts = []
    for low, high, share in SHARES_BY_GROWTH:
        # (-inf, 0], (0, 50), [50, 100], (100, inf)
        above = growth >= low if low == 50 else growth > low
        below = growth < high if high == 50 else growth <= high
        part = rows[above & below]
        parts.append(
            part if share == 1 else part[pandas_sample(len(part), share, params["rng_seed"])]
        )
    return np.concatenate(parts)


def split(
    responses: Responses,
    rows: Rows,
    test_lines: Sequence[str],
    test_drugs: Sequence[str],
    params: ParameterSet,
) -> Split:
    """Splits the rows that have all features.

    Neither test drugs nor test lines are used for training. The model is tested on responses of
    test lines to test drugs or, with ``test_cell_split``, of that share of the training lines.

    Raises:
        ParameterError: A part would be empty.
    """
    seed = params["rng_seed"]
    of_test_line = names_in(responses.line, test_lines)[rows]
    of_test_drug = names_in(responses.drug, test_drugs)[rows]
    seen = rows[~of_test_line & ~of_test_drug]
    if params["test_cell_split"]:
        lines = in_order(responses.line.codes[seen])
        drawn = lines[pandas_sample(len(lines), params["test_cell_split"], seed)]
        test_lines = [responses.line.names[code] for code in drawn]
    test = merge(responses.drug, merge(responses.line, rows, test_lines), test_drugs)
    seen = seen[pandas_sample(len(seen), 1.0, seed)]
    test = test[pandas_sample(len(test), 1.0, seed)]
    num_validation = int(len(seen) * (params["val_split"] or 0))
    num_train = len(seen) - num_validation
    if not (num_train and num_validation and len(test)):
        raise ParameterError(
            f"the dose responses leave {num_train} samples for training, {num_validation} for"
            f" validation and {len(test)} for testing: change min_logconc, max_logconc, subsample,"
            " val_split, test_cell_split or the features"
        )
    return Split(seen[:num_train], seen[num_train:], test)
