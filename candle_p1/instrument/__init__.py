"""Measuring a run: phases, epochs, what the screen and the logs show."""
