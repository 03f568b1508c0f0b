"""P1B3's batches as CANDLE builds them, for comparison: data frames merged for every batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from candle_p1.benchmark import Joined


@dataclass
class MergedRows:
    """The inputs of the model, merged from data frames by the names of cell line and drug.

    Attributes:
        rows: The same inputs, joined by index.
    """

    rows: Joined

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def _frames(self) -> tuple[Any, Any, Any]:
        import pandas as pd

        line, drug = self.rows.indices
        concentration = self.rows.own[:, 0]
        responses = pd.DataFrame(
            {"CELLNAME": line, "NSC": drug, "LOG_CONCENTRATION": concentration}
        )
        lines, drugs = map(pd.DataFrame, self.rows.tables)
        lines.insert(0, "CELLNAME", np.arange(len(lines), dtype=np.int32))
        drugs.insert(0, "NSC", np.arange(len(drugs), dtype=np.int32))
        return responses, lines, drugs

    def __getitem__(self, which: Any) -> NDArray[np.float32]:
        """Returns the inputs of some samples: float32, shape (samples, inputs)."""
        responses, lines, drugs = self._frames
        batch = responses.iloc[which]
        batch = batch.merge(lines, on="CELLNAME").merge(drugs, on="NSC")
        return np.asarray(batch.drop(columns=["CELLNAME", "NSC"]).to_numpy(), np.float32)
