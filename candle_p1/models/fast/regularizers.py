"""Keras penalties, in the implementation chosen in candle_p1.models.fast."""

from __future__ import annotations

from typing import Any

import keras

from candle_p1.models import fast


@keras.saving.register_keras_serializable("candle_p1")
class L2(keras.regularizers.L2):  # type: ignore[misc]
    """A penalty on the sum of squares. The fast implementation does not store the squares."""

    def __call__(self, x: Any) -> Any:
        """Returns the penalty."""
        if not fast.are_fast():
            return super().__call__(x)
        from candle_p1.models.fast.operations import square_sum

        return self.l2 * square_sum(x)
