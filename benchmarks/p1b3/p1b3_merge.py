"""P1B3's batches as CANDLE builds them, for comparison: data frames merged for every batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from p1b3_tables import JoinedRows


@dataclass
class MergedRows:
    """The inputs of the model, merged from data frames by the names of cell line and drug.

    Attributes:
        rows: The same inputs, joined by index.
    """

    rows: JoinedRows

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def _frames(self) -> tuple[Any, Any, Any]:
        import pandas as pd

        rows = self.rows
        responses = pd.DataFrame(
            {"CELLNAME": rows.line, "NSC": rows.drug, "LOG_CONCENTRATION": rows.log_concentration}
        )
        lines, drugs = pd.DataFrame(rows.lines), pd.DataFrame(rows.drugs)
        lines.insert(0, "CELLNAME", np.arange(len(lines), dtype=np.int32))
        drugs.insert(0, "NSC", np.arange(len(drugs), dtype=np.int32))
        return responses, lines, drugs

    def __getitem__(self, which: Any) -> NDArray[np.float32]:
        """Returns the inputs of some samples: float32, shape (samples, inputs)."""
        responses, lines, drugs = self._frames
        batch = responses.iloc[which]
        batch = batch.merge(lines, on="CELLNAME").merge(drugs, on="NSC")
        return np.asarray(batch.drop(columns=["CELLNAME", "NSC"]).to_numpy(), np.float32)
