"""Checkpoints on disk: their format, writing them beside training, keeping and reading them."""
