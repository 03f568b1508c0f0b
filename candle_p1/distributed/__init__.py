"""Ranks: who they are, what they run on, how they average, and what happens when one dies."""
