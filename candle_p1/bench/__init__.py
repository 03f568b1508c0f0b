"""Measured comparisons, shown beside what the paper published."""
