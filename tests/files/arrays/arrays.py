"""A benchmark that reads no tables: two inputs and two outputs, from .npy and .npz files."""

import numpy as np

from candle_p1.benchmark import Benchmark, DataSet, Samples
from candle_p1.data.samples import Several


class Arrays(Benchmark):
    name = "arrays"
    title = "numbers and words"
    files = {"train": "train_data", "test": "test_data"}  # noqa: RUF012

    def load_data(self, reader, params):
        train = reader.load("train", np.load)
        with np.load(reader.files.paths["test"]) as test:
            return train, test["numbers"]

    def preprocess(self, raw, params):
        def samples(numbers):
            words = np.arange(2 * len(numbers)).reshape(-1, 2) % 10
            total = numbers.sum(axis=1, keepdims=True)
            targets = {"total": total, "sign": (total > 0).astype(int)}
            return Samples(Several((numbers, words)), Several(targets))

        train, test = map(samples, raw)
        return DataSet(train, test, test)

    def loss(self, params):
        return {"total": "mse", "sign": "binary_crossentropy"}

    def metrics(self, params):
        return {"total": ["mae"], "sign": ["accuracy"]}

    def build_model(self, params, data):
        import keras
        from keras import layers

        numbers, words = layers.Input((4,)), layers.Input((2,), dtype="int64")
        embedded = layers.Flatten()(layers.Embedding(10, 3)(words))
        hidden = layers.Concatenate()([numbers, embedded])
        total = layers.Dense(1, name="total")(hidden)
        sign = layers.Dense(1, activation="sigmoid", name="sign")(hidden)
        return keras.Model([numbers, words], {"total": total, "sign": sign})

    def evaluate(self, trained):
        found = trained.predict(trained.data.test)
        if found is not None:
            targets, predicted = found
            for name in ("total", "sign"):
                assert targets[name].shape == predicted[name].shape == (70, 1)
        return super().evaluate(trained)


BENCHMARK = Arrays()
