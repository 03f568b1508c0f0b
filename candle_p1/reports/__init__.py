"""Pictures and pages made from records alone."""
