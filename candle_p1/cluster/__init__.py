"""Machines, and how jobs are written, submitted and checked there."""
