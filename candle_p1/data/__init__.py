"""Reading tables, changing them in memory, and taking batches from them."""
