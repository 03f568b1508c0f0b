"""Synthetic frames in the format of P2B1: lipids that stand in a membrane and move."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from candle_p1.benchmark import SyntheticFile, SyntheticRecipe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

LIPIDS = ("CHOL", "DPPC", "DIPC")
NUM_BEADS, NUM_HEAD_BEADS = 12, 4
NUM_FRAMES, NUM_MOLECULES = {"small": 8, "full": 100}, {"small": 60, "full": 3040}
NUM_FILES = {"small": {"train": 4, "test": 1}, "full": {"train": 2, "test": 1}}


class P2b1Recipe(SyntheticRecipe):
    """Two directories of files, each of which holds some frames."""

    name = "p2b1"
    version = 1
    roles = {"train": "p2b1_train", "test": "p2b1_test"}

    def files(self, size: str, seed: int) -> list[SyntheticFile]:
        """Returns the files of both directories; the same seed gives the same bytes."""
        num_frames, num_molecules = NUM_FRAMES[size], NUM_MOLECULES[size]
        num_bytes = 4 * num_frames * num_molecules * NUM_BEADS * (8 + NUM_BEADS)
        names = [
            f"{self.roles[role]}/frames_{number:02}.npy"
            for role, num_files in NUM_FILES[size].items()
            for number in range(num_files)
        ]

        def blocks(number: int) -> Iterator[bytes]:
            frames = simulate(num_frames, num_molecules, np.random.default_rng((seed, number)))
            content = io.BytesIO()
            np.save(content, frames)
            yield content.getvalue()

        return [SyntheticFile(name, num_bytes, blocks(i)) for i, name in enumerate(names)]


def simulate(
    num_frames: int, num_molecules: int, random: np.random.Generator
) -> NDArray[np.float32]:
    """Returns frames: float32, shape (frames, molecules, beads, 8 + beads).

    The fields of a bead are its position (3), the lipid as one-hot (3), whether it is in the head
    or the tail (2), and its distance to each bead of the molecule. A kind of lipid has a length and
    a tilt of its own; the molecules swing about them, and half of them stand upside down.
    """
    lipids = random.integers(len(LIPIDS), size=num_molecules)
    length = np.array([0.25, 0.45, 0.35])[lipids]
    tilt = np.array([0.1, 0.4, 0.9])[lipids] + 0.1 * random.normal(size=(num_frames, num_molecules))
    turn = random.uniform(0, 2 * np.pi, (num_frames, num_molecules))
    side = np.where(random.random(num_molecules) < 0.5, -1, 1)
    across = np.sin(tilt)
    axis = np.stack([across * np.cos(turn), across * np.sin(turn), side * np.cos(tilt)], axis=-1)
    places = random.uniform(0, 30, (num_molecules, 3)) * [1, 1, 0]
    along = (np.arange(NUM_BEADS) * length[:, np.newaxis])[..., np.newaxis]
    positions = places[:, np.newaxis] + along * axis[:, :, np.newaxis]
    positions += 0.05 * random.normal(size=positions.shape)
    frames = np.zeros((*positions.shape[:3], 8 + NUM_BEADS), np.float32)
    frames[..., :3] = positions
    frames[..., 3:6] = np.eye(len(LIPIDS))[lipids][:, np.newaxis]
    frames[..., 6] = np.arange(NUM_BEADS) < NUM_HEAD_BEADS
    frames[..., 7] = 1 - frames[..., 6]
    for frame, beads in zip(frames, positions, strict=True):
        frame[..., 8:] = np.linalg.norm(beads[:, :, np.newaxis] - beads[:, np.newaxis], axis=-1)
    return frames
