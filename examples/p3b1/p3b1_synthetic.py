"""Synthetic reports: words at random, some of which tell something about the tumor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.benchmark import SyntheticFile, SyntheticRecipe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

TASKS = {"primary_site": 13, "laterality": 2, "grade": 4}
"""The tasks of CANDLE's P3B1, with the number of classes of each."""
NUM_REPORTS = {"small": (1600, 400), "full": (39_000, 10_000)}
NUM_WORDS = {"small": 60, "full": 400}
VOCABULARY = 500
NUM_PREFERRED = 12
"""The words that a class prefers."""
TELLING = 0.15
"""The share of the words that tell something about one task."""
REPORTS_AT_A_TIME = 1000


class P3b1Recipe(SyntheticRecipe):
    """Both files: a header, then the labels and words of each report, as integers."""

    name = "p3b1"
    version = 1
    roles = {"train": "p3b1_train.csv", "test": "p3b1_test.csv"}

    def files(self, size: str, seed: int) -> list[SyntheticFile]:
        """Returns both files; the same seed gives the same bytes."""
        random, num_words = np.random.default_rng(seed), NUM_WORDS[size]
        preferred = [random.integers(1, VOCABULARY, (num, NUM_PREFERRED)) for num in TASKS.values()]
        header = ",".join([*TASKS, *(f"word{i}" for i in range(num_words))]) + "\n"

        def blocks(num_reports: int) -> Iterator[bytes]:
            yield header.encode()
            for first in range(0, num_reports, REPORTS_AT_A_TIME):
                num = min(REPORTS_AT_A_TIME, num_reports - first)
                reports = write_reports(num, num_words, preferred, random)
                yield "".join(",".join(map(str, row)) + "\n" for row in reports.tolist()).encode()

        return [
            SyntheticFile(name, 4 * num_reports * num_words, blocks(num_reports))
            for name, num_reports in zip(self.roles.values(), NUM_REPORTS[size], strict=True)
        ]


def write_reports(
    num_reports: int, num_words: int, preferred: list[NDArray[Any]], random: np.random.Generator
) -> NDArray[np.int64]:
    """Returns labels and words: int64, shape (reports, tasks and words).

    The higher the number of a class or word, the rarer it is.
    """
    shape = num_reports, num_words
    words = 1 + ((VOCABULARY - 1) * random.random(shape) ** 2).astype(int)
    labels = []
    for of_class in preferred:
        rarity = 1 / np.arange(1, len(of_class) + 1)
        label = random.choice(len(of_class), size=num_reports, p=rarity / rarity.sum())
        telling = random.random(shape) < TELLING
        chosen = of_class[label[:, np.newaxis], random.integers(NUM_PREFERRED, size=shape)]
        words[telling] = chosen[telling]
        labels.append(label)
    return np.column_stack([*labels, words])
