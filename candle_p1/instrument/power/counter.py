"""Counters of energy: what they have counted, over the places where they start from 0 again."""

from __future__ import annotations

from candle_p1.instrument.power.source import SensorError
from candle_p1.records.power_trace import Channel


class Counter:
    """Turns the counts of an energy counter into J that only grow.

    Counts are added as integers, so nothing is lost where a counter starts from 0 again.

    Args:
        channel: The counter.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._rounds = 0
        self._last: tuple[float, float] | None = None

    def joules(self, time_s: float, count: float) -> float:
        """Returns the energy that a count stands for.

        A count below the last one is a counter that has started from 0 again, unless the power that
        this takes is impossible: then it was reset.

        Args:
            time_s: When it was read; after the last time.
            count: What was read.

        Raises:
            SensorError: The counter was reset, has jumped, or was not read for so long that it may
                have started from 0 more than once. Later counts say nothing about earlier ones.
        """
        channel = self._channel
        if self._last is not None:
            last_s, last = self._last
            # A counter may deliver, in a moment, what has gathered since it was last renewed.
            possible = channel.limit_w * (time_s - last_s + 2 * (channel.resolution_s or 0))
            if channel.modulus is not None and possible >= channel.modulus * channel.unit:
                raise SensorError(
                    f"the counter was not read for {time_s - last_s:.3g} s, in which it may have"
                    " started from 0 more than once: raise --power_hz"
                )
            grown = count - last
            if grown < 0 and channel.modulus is not None:
                grown += channel.modulus
                self._rounds += 1
            if grown < 0 or grown * channel.unit > possible:
                raise SensorError(
                    f"the counter went from {last * channel.unit:.6g} J to"
                    f" {count * channel.unit:.6g} J: it was reset, as with the device or its driver"
                )
        self._last = time_s, count
        return (self._rounds * (channel.modulus or 0) + count) * channel.unit
