"""Measuring a run: phases, epochs, communication, energy, and logs for other tools."""
