"""What a report writes for other programs."""
