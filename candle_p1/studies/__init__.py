"""Sweeps: a study expands to runs, which are performed one after the other, and gone on with."""
