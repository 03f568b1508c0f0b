"""Reading tables, transforming them in memory, and taking batches from them."""
