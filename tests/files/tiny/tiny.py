"""A benchmark that trains a line in a moment, on numbers that are in no file."""

import numpy as np

from candle_p1.benchmark import Benchmark, DataSet, Parameter, Samples
from candle_p1.data.transforms import scale_features


class Tiny(Benchmark):
    name = "tiny"
    title = "a line"
    files = {}  # noqa: RUF012
    parameters = (
        Parameter("spoil", str, "nothing", "the samples of which the last has no finite target"),
    )

    def load_data(self, reader, params):
        return np.linspace(0, 1, 32, dtype=np.float32).reshape(-1, 1)

    def preprocess(self, raw, params):
        scale_features(params["scaling"], raw)

        def samples(kind):
            y = 2 * raw
            y[-1] = {"infinite": np.inf, kind: np.nan}.get(params["spoil"], y[-1])
            return Samples(raw, y)

        return DataSet(samples("train"), samples("validation"), samples("test"))

    def build_model(self, params, data):
        import keras

        return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])


BENCHMARK = Tiny()
