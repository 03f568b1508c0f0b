"""Dividing samples by group, so that no group is on two sides: folds, and samples for testing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from candle_p1.data.directory import IMPORT_NAME, imported_facts
from candle_p1.data.reader import Reader
from candle_p1.data.table import Table, TextColumn
from candle_p1.data.transforms import join_rows
from candle_p1.errors import DataError, ParameterError
from candle_p1.parameters.parameter_set import ParameterSet

if TYPE_CHECKING:
    import pandas as pd


def kinds_of_groups(labels: pd.Series, groups: pd.Series) -> pd.Series:
    """Returns the class of each group, that of most of its samples, by group in order."""
    return labels.groupby(groups, sort=False).agg(lambda each: each.mode()[0])


def divisions(splitter: Any, kinds: pd.Series, groups: pd.Series) -> Iterator[pd.Series]:
    """Yields whether each sample is held out, for each division by a splitter of scikit-learn.

    The splitter divides the groups, each of which counts once, by their classes.

    Raises:
        ValueError: There are too few of them.
    """
    with warnings.catch_warnings():  # of classes with fewer groups than folds
        warnings.simplefilter("ignore", UserWarning)
        for _, chosen in splitter.split(kinds, kinds):
            yield groups.isin(kinds.index[chosen])


def check_fold(params: ParameterSet) -> None:
    """Raises ParameterError if there is no such fold."""
    if params["folds"] < 2:
        raise ParameterError(f"folds {params['folds']} ({params.origin('folds')}): give 2 or more")
    if params["fold"] > params["folds"]:
        raise ParameterError(
            f"fold {params['fold']} ({params.origin('fold')}): there are {params['folds']} folds"
        )


def hold_out(
    reader: Reader,
    params: ParameterSet,
    table: Table,
    labels: Sequence[Any],
    groups: Sequence[Any] | None = None,
) -> tuple[Table, Table]:
    """Returns the samples of the training file to train on, and those of the fold held out.

    The folds depend only on the arguments and on rng_seed, and hold all classes in equal shares as
    far as groups allow.

    Args:
        reader: Reads the groups, if group_data names their file.
        params: The parameters of the run.
        table: What the training file contains.
        labels: The class of each row; the same for all if classes do not matter.
        groups: The group of each row if there is no such file; None: each row is one.

    Raises:
        DataError: The file of groups does not belong to the training file.
        ParameterError: There are fewer groups than folds.
    """
    import pandas as pd
    from sklearn.model_selection import StratifiedKFold

    num_folds, fold = params["folds"], params["fold"]
    if (path := reader.files.paths.get("groups")) is not None:
        groups = reader.load("groups", read_groups).tolist()
        if len(groups) != len(labels):
            raise DataError(
                f"it has the groups of {len(groups):,} samples, but"
                f" {reader.files.paths['train']} has {len(labels):,}",
                path,
            )
    of_rows = pd.Series(range(len(labels)) if groups is None else groups)
    kinds = kinds_of_groups(pd.Series(labels), of_rows)
    if len(kinds) < num_folds:
        raise ParameterError(f"folds {num_folds}: there are only {len(kinds):,} groups of samples")
    splitter = StratifiedKFold(num_folds, shuffle=True, random_state=params["rng_seed"])
    try:
        is_held = [*divisions(splitter, kinds, of_rows)][fold - 1].to_numpy()
    except ValueError as error:
        raise ParameterError(f"folds {num_folds}: {error}") from error
    sides = np.flatnonzero(~is_held), np.flatnonzero(is_held)
    classes = [{labels[row] for row in rows} for rows in sides]
    if lacking := sorted(classes[0] ^ classes[1]):
        names = ", ".join(map(str, lacking))
        reader.warn(f"fold {fold} of {num_folds}: the classes {names} are not on both sides")
    return _rows_of(table, sides[0]), _rows_of(table, sides[1])


def _rows_of(table: Table, rows: NDArray[np.int64]) -> Table:
    text = {
        name: TextColumn(column.names, column.codes[rows]) for name, column in table.text.items()
    }
    return Table(join_rows((table.values, rows)), table.columns, text)


def read_groups(path: Path) -> NDArray[np.str_]:
    """Returns the group of each training sample: from import.json, or a line of text for each.

    Raises:
        ValueError: A line is empty, or the import knew no groups.
    """
    if path.name == IMPORT_NAME:
        groups = ((imported_facts(path.parent) or {}).get("groups") or {}).get("train")
        if not groups:
            raise ValueError("the data were imported without --group")
        return np.array(groups)
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    if "" in lines:
        raise ValueError(f"line {lines.index('') + 1} is empty: name the group of each sample")
    return np.array(lines)
