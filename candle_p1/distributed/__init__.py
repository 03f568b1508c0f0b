"""Ranks: how they are started, communicate and average, and what happens when one dies."""
