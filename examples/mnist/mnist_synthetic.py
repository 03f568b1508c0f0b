"""Synthetic images in the format of MNIST: digits in a pixel font, moved, blotted and faded."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.benchmark import SyntheticFile, SyntheticRecipe

if TYPE_CHECKING:
    from numpy.typing import NDArray

NUM_IMAGES = {"small": (2048, 512), "full": (60_000, 10_000)}
SIDE, SCALE = 28, 3
FONT = """
.###. ..#.. .###. ####. #..#. ##### .###. ##### .###. .###.
#...# .##.. #...# ....# #..#. #.... #.... ....# #...# #...#
#...# ..#.. ....# ..##. ##### ####. ####. ...#. .###. .####
#...# ..#.. .##.. ....# ...#. ....# #...# ..#.. #...# ....#
.###. .###. ##### ####. ...#. ####. .###. ..#.. .###. .###.
"""


class MnistRecipe(SyntheticRecipe):
    """One file, as Keras publishes it; the images are not handwritten."""

    name = "mnist"
    version = 1
    roles = {"digits": "mnist.npz"}

    def files(self, size: str, seed: int) -> list[SyntheticFile]:
        """Returns the file; the same seed gives the same bytes."""
        random = np.random.default_rng(seed)
        arrays: dict[str, NDArray[np.uint8]] = {}
        for part, num in zip(("train", "test"), NUM_IMAGES[size], strict=True):
            labels = random.integers(10, size=num).astype(np.uint8)
            arrays |= {f"x_{part}": draw(labels, random), f"y_{part}": labels}
        content = io.BytesIO()
        np.savez(content, **arrays)
        return [SyntheticFile("mnist.npz", content.tell(), iter([content.getvalue()]))]


def draw(labels: NDArray[np.uint8], random: np.random.Generator) -> NDArray[np.uint8]:
    """Returns an image of each label: uint8, shape (labels, 28, 28)."""
    glyphs = np.array([[list(row) for row in line.split()] for line in FONT.split("\n")[1:-1]])
    glyphs = (glyphs.swapaxes(0, 1) == "#").repeat(SCALE, axis=1).repeat(SCALE, axis=2)
    images: NDArray[Any] = random.integers(64, size=(len(labels), SIDE, SIDE))
    tops, lefts = random.integers(3, SIDE - 3 - len(glyphs[0]), size=(2, len(labels)))
    inks, blots = random.integers(128, 256, len(labels)), random.random(images.shape) < 0.1
    for image, label, top, left, ink in zip(images, labels, tops, lefts, inks, strict=True):
        glyph = glyphs[label]
        image[top : top + len(glyph), left : left + len(glyph)][glyph] = ink
    images[blots] = 255 - images[blots]
    return images.astype(np.uint8)
