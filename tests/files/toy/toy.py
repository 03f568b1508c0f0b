"""A benchmark that trains nothing: its script only writes the record that it is asked for."""

from candle_p1.benchmark import Benchmark, Parameter


class Toy(Benchmark):
    name = "toy"
    title = "nothing"
    files = {}  # noqa: RUF012
    parameters = (
        Parameter("does", str, "train", "what happens", choices=("train", "fail", "break", "hang")),
        Parameter("toy_s", float, 0.0, "how long it takes, in s", minimum=0),
        Parameter("color", str, "red", "makes no difference"),
        Parameter("shape", int, [1], "makes no difference", many=True),
    )

    def load_data(self, reader, params):
        raise NotImplementedError

    def preprocess(self, raw, params):
        raise NotImplementedError

    def build_model(self, params, data):
        raise NotImplementedError


BENCHMARK = Toy()
