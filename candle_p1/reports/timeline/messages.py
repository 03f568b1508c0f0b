"""Messages: the tensors, fused by Horovod, that a communication library receives in one call.

The tensors of a message log the library's activity one after the other: first all begin
events, then all end events. A begin that follows an end therefore belongs to another message. A
tensor's type and shape are logged when its operation ends, but not for broadcasts.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from candle_p1.reports.timeline.events import US_PER_S

if TYPE_CHECKING:
    from collections.abc import Mapping


MAX_DIMENSIONS = 16


def tensor_bytes(args: Mapping[str, Any]) -> int | None:
    """Returns the size that the end of an operation states as dtype and shape; None if it does not.

    Args:
        args: Such as ``{"dtype": "float32", "shape": "[20, 1, 128]"}``.
    """
    if "dtype" not in args or "shape" not in args:
        return None
    return _size(str(args["dtype"]), str(args["shape"]))


@lru_cache(maxsize=4096)
def _size(dtype: str, shape: str) -> int:
    bits = re.search(r"\d{1,3}$", dtype)  # float16, bfloat16, int8, ...; "bool" has none
    lengths = map(int, re.findall(r"\d{1,12}", shape)[:MAX_DIMENSIONS])
    return (int(bits[0]) // 8 if bits else 1) * math.prod(lengths)


@dataclass(slots=True)
class Message:
    """One message.

    Attributes:
        name: The library's activity.
        begin_us: When the library receives it.
        end_us: When the activity has ended for the latest of its tensors; None before the first.
        num_tensors: Tensors fused in it.
        sizes: The bytes of its tensors whose operation has ended; None where they are not logged.
    """

    name: str
    begin_us: int
    end_us: int | None = None
    num_tensors: int = 0
    sizes: list[int | None] = field(default_factory=list)


@dataclass
class MessageStatistics:
    """The messages of one activity of a library, by size.

    Attributes:
        num: Number of messages.
        num_tensors: Tensors in all of them.
        num_bytes: Bytes of those whose size is known.
        num_unsized: Number of those whose size is not known.
        duration_us: Their total time; where two overlap, it is counted once.
        sizes: By the floor of log2 of the bytes: [messages, bytes, µs].
    """

    num: int = 0
    num_tensors: int = 0
    num_bytes: int = 0
    num_unsized: int = 0
    duration_us: int = 0
    sizes: dict[int, list[int]] = field(default_factory=dict)
    _end_us: int = 0

    def add(self, message: Message) -> None:
        """Adds a complete message."""
        end_us = message.end_us or message.begin_us
        duration_us = max(end_us - max(message.begin_us, self._end_us), 0)
        self._end_us = max(self._end_us, end_us)
        self.num += 1
        self.num_tensors += message.num_tensors
        self.duration_us += duration_us
        known = [size for size in message.sizes if size is not None]
        if len(known) < message.num_tensors:
            self.num_unsized += 1
            return
        num_bytes = sum(known)
        self.num_bytes += num_bytes
        size = self.sizes.setdefault(max(num_bytes.bit_length() - 1, 0), [0, 0, 0])
        for i, amount in enumerate((1, num_bytes, duration_us)):
            size[i] += amount

    def to_dict(self) -> dict[str, Any]:
        """Returns the statistics with units in the names."""
        return {
            "num": self.num,
            "num_tensors": self.num_tensors,
            "bytes": self.num_bytes,
            "num_unsized": self.num_unsized,
            "duration_s": self.duration_us / US_PER_S,
            "sizes": [
                {
                    "from_bytes": 2**power,
                    "below_bytes": 2 ** (power + 1),
                    "num": num,
                    "bytes": num_bytes,
                    "duration_s": us / US_PER_S,
                    "bytes_per_s": num_bytes * US_PER_S / us if us else None,
                }
                for power, (num, num_bytes, us) in sorted(self.sizes.items())
            ],
        }
