"""Reading, scaling, feeding and making data."""
