"""Models of the time and the energy of a run: fitted to records, or made from published values."""
