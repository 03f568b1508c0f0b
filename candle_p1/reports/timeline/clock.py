"""How the timeline's clock relates to that of this program.

Horovod's ``ts`` are microseconds of the monotonic clock (steady_clock) since rank 0's background
thread started within ``hvd.init``. The file's first event states the time of day at that moment,
``start_time_since_epoch_in_micros``; the two clocks were read one right after the other. On Linux
steady_clock and ``time.perf_counter`` are both CLOCK_MONOTONIC, so they run at the same rate and
only the offset has to be found::

    anchor = read_anchor()          # on rank 0, just before hvd.init()
    hvd.init()
    ...
    origin_s = anchor.to_perf_counter_s(read_origin_epoch_us(path))

`origin_s` is what ``time.perf_counter`` showed when the timeline's clock was 0. Its error is a few
microseconds (`ClockAnchor.uncertainty_us`, plus rounding of both readings), plus any change of the
time of day between the anchor and ``hvd.init``; NTP slews it by at most 0.5 ms per second. It must
lie between readings of perf_counter taken before and after ``hvd.init``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from candle_p1.reports.timeline.events import EventReader

if TYPE_CHECKING:
    from pathlib import Path

    from candle_p1.reports.timeline.events import Event

ORIGIN_KEY = "start_time_since_epoch_in_micros"


def origin_epoch_us(event: Event) -> int | None:
    """Returns the time of day at the clock's 0, in µs since 1970, if an event states it."""
    value = event.get("args", {}).get(ORIGIN_KEY)
    return value if isinstance(value, int) else None


def read_origin_epoch_us(path: Path) -> int | None:
    """Returns the time of day at the clock's 0 from a timeline's first event; None if it lacks it.

    Raises:
        DataError: The file cannot be read or is not a timeline.
    """
    first = next(iter(EventReader(path)), None)
    return None if first is None else origin_epoch_us(first)
