"""The files that a report writes for other programs."""
