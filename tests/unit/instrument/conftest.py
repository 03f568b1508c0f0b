from candle_p1.instrument.power.choose import ReplaySource
from candle_p1.instrument.power.sampler import PowerSource, Sampler


class Clock:
    def __init__(self, now_s=100.0):
        self.now_s = now_s

    def __call__(self):
        return self.now_s


class Source(PowerSource):
    """Gives values, or raises errors, one after the other; from functions of time, if given."""

    def __init__(self, channels, clock=None):
        self.channels, self._clock, self._values = list(channels), clock, dict(channels)

    def read(self, channel):
        values = self._values[channel]
        value = values(self._clock()) if self._clock else values.pop(0)
        if isinstance(value, Exception):
            raise value
        return value


def sample(sampler, clock, num):
    """Takes samples at the sampler's rate; returns the sampler."""
    for _ in range(num):
        sampler.sample()
        clock.now_s += 1 / sampler.hz
    return sampler


def replaying(path, clock, hz=10.0):
    """Returns a sampler of a recording."""
    source = ReplaySource(path, clock)
    source.start()
    return Sampler([source], hz, clock)
