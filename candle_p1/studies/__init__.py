"""Sweeps: a study expands into runs, which are executed one after the other and can be resumed."""
