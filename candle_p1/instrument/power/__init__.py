"""Power and energy: sources of readings, the thread that samples them, and energy totals."""
